"""Long work shows that it is alive: bars on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedkeel.experiment import progress
from fedkeel.experiment.execute import start
from fedkeel.experiment.progress import Bars, Blind, Lines, Silent, Watcher, watcher
from fedkeel.records import RoundRecord, Scores
from toys import prepared


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100), text


def row(round: int, top1: float | None = None) -> RoundRecord:
    test = None if top1 is None else Scores(10, top1, 1.0, 0.5)
    return RoundRecord(round, test=test)


def play(watching: Watcher) -> None:
    """A piece of work of two runs, the second of them made before."""
    watching.plan(2)
    watching.begin("fedavg seed 0", 3, 0)
    for number in (1, 2, 3):
        watching.clients(1, 2)
        watching.row(row(number, 0.5 if number == 3 else None))
    watching.stopping()
    watching.end(reused=False)
    watching.begin("fedavg seed 1", 3, 3)
    watching.row(row(3, 0.75))
    watching.end(reused=True)


def test_which_one_is_chosen() -> None:
    assert isinstance(watcher(console(True)[0]), Bars)
    assert isinstance(watcher(console(False)[0]), Lines)
    assert isinstance(watcher(console(True)[0], quiet=True), Silent)


def test_lines_without_a_terminal() -> None:
    there, text = console(False)
    with Lines(there) as watching:
        play(watching)
    lines = text.getvalue().splitlines()
    assert lines[0] == f"[1/2] fedavg seed 0: {progress.STOPPING}"
    assert lines[1].startswith("[1/2] fedavg seed 0: ")
    assert lines[1].endswith(" s, test 50.0 %")
    assert lines[2] == "[2/2] fedavg seed 1: taken from an earlier run, test 75.0 %"
    assert len(lines) == 3
    assert "\x1b" not in text.getvalue()


def test_a_line_every_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    there, text = console(False)
    watching = Lines(there, seconds=10)
    watching.plan(1)
    watching.begin("fedavg", 9, 0)
    for number in (1, 2, 3):
        now[0] += 6
        watching.row(row(number, number / 10))
    now[0] += 11
    watching.clients(3, 5)
    assert text.getvalue().splitlines() == [
        "fedavg: round 2/9, test 20.0 %",
        "fedavg: round 4: 3/5 clients",
    ]


def test_bars_on_a_terminal() -> None:
    there, text = console(True)
    with Bars(there) as watching:
        play(watching)
        shown = watching._progress.tasks
        assert [task.total for task in shown] == [3, 2]
        assert shown[0].completed == 3
        assert shown[0].fields["note"] == "test 75.0 %"
        assert shown[1].completed == 2
    assert "stopping after this round" in text.getvalue()


def test_one_run_needs_no_bar_of_runs() -> None:
    with Bars(console(True)[0]) as watching:
        watching.plan(1)
        watching.begin("fedavg", 3, 1)
        watching.clients(1, 4)
        assert len(watching._progress.tasks) == 1
        assert 1.2 <= watching._progress.tasks[0].completed <= 1.3


def test_runs_side_by_side_are_told_when_they_are_over() -> None:
    there, text = console(False)
    watching = Lines(there)
    watching.plan(3)
    watching.made("fedavg seed 0", row(3, 0.5), 2.04)
    watching.made("fedavg seed 1", None, 61.0)
    Blind(watching).made("fedavg seed 2", row(3, 0.5), 1.0)
    assert text.getvalue().splitlines() == [
        "[1/3] fedavg seed 0: 2.0 s, test 50.0 %",
        "[2/3] fedavg seed 1: 61.0 s",
        "[3/3] fedavg seed 2: 1.0 s",
    ]
    with Bars(console(True)[0]) as bars:
        bars.plan(3)
        bars.made("fedavg seed 0", row(3, 0.5), 2.0)
        assert bars._progress.tasks[1].completed == 1
        assert bars._progress.tasks[1].fields["note"] == "fedavg seed 0"


def test_who_may_not_see_the_test_set_sees_all_else() -> None:
    there, text = console(False)
    with Blind(Lines(there)) as watching:
        play(watching)
    lines = text.getvalue().splitlines()
    assert lines[0] == f"[1/2] fedavg seed 0: {progress.STOPPING}"
    assert lines[2] == "[2/2] fedavg seed 1: taken from an earlier run"
    assert "test" not in text.getvalue()


def test_nothing_is_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Silent() as watching:
        play(watching)
    assert capfd.readouterr() == ("", "")


class Listens(Silent):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def begin(self, label: str, rounds: int, done: int) -> None:
        self.told.append((label, rounds, done))

    def clients(self, trained: int, of: int) -> None:
        self.told.append(("clients", trained, of))

    def row(self, row: RoundRecord) -> None:
        self.told.append(("row", row.round))

    def end(self, reused: bool) -> None:
        self.told.append(("end", reused))


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_a_run_tells_of_every_client_and_round(kind: str) -> None:
    watching = Listens()
    start(prepared("scaffold", rounds=2, kind=kind, workers=2), watcher=watching)
    assert watching.told[0] == ("scaffold seed 0", 2, 0)
    assert [told for told in watching.told if told[0] == "row"] == [("row", 1), ("row", 2)]
    assert watching.told[-1] == ("end", False)
    counts = [told[1] for told in watching.told if told[0] == "clients"]
    assert counts.count(4) == 2  # everybody, in each round
    assert sorted(set(counts))[-1] == 4
