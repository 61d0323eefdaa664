"""The progress of runs: bars on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedkeel.features.progress import display as progress
from fedkeel.features.progress.display import (
    FINISHED,
    REUSED,
    ProgressBars,
    ProgressDisplay,
    ProgressLines,
    WithoutScores,
    progress_display,
)
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.start import start
from toys import prepared


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100), text


def row(round: int, accuracy: float | None = None) -> RoundRecord:
    test = None if accuracy is None else Scores(10, {"accuracy": accuracy})
    return RoundRecord(round, test=test)


def play(display: ProgressDisplay) -> None:
    """A piece of work of two runs, the second of them made before."""
    display.plan(2, 6)
    display.begin("fedavg seed 0", 3, 0)
    for number in (1, 2, 3):
        display.clients("fedavg seed 0", 1, 2)
        display.row("fedavg seed 0", row(number, 0.5 if number == 3 else None))
    display.stopping()
    display.end("fedavg seed 0", FINISHED)
    display.begin("fedavg seed 1", 3, 3)
    display.row("fedavg seed 1", row(3, 0.75))
    display.end("fedavg seed 1", REUSED)


def test_which_one_is_chosen() -> None:
    assert isinstance(progress_display(console(True)[0]), ProgressBars)
    assert isinstance(progress_display(console(False)[0]), ProgressLines)
    assert isinstance(progress_display(console(True)[0], quiet=True), ProgressDisplay)


def test_steps_are_called_what_they_are() -> None:
    there, text = console(False)
    with ProgressLines(there, seconds=0.0) as display:
        display.begin("dlg, client 3", 600, 0)
        WithoutScores(display).step("dlg, client 3", 6, "iteration")
        display.end("dlg, client 3", FINISHED)
    assert text.getvalue().splitlines()[0] == "dlg, client 3: iteration 6/600"


def test_lines_without_a_terminal() -> None:
    there, text = console(False)
    with ProgressLines(there) as display:
        play(display)
    lines = text.getvalue().splitlines()
    assert lines[:2] == ["2 runs of 6 rounds in all", progress.STOPPING]
    assert lines[2].startswith("[1/2] fedavg seed 0: ")
    assert lines[2].endswith(" s, test 50.0 %")
    assert lines[3] == "[2/2] fedavg seed 1: taken from an earlier run, test 75.0 %"
    assert len(lines) == 4
    assert "\x1b" not in text.getvalue()


def test_a_line_every_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    there, text = console(False)
    display = ProgressLines(there, seconds=10)
    display.plan(1, 9)
    display.begin("fedavg", 9, 0)
    for number in (1, 2, 3):
        now[0] += 6
        display.row("fedavg", row(number, number / 10))
    now[0] += 11
    display.clients("fedavg", 3, 5)
    assert text.getvalue().splitlines() == [
        "fedavg: round 2/9, test 20.0 %",
        "fedavg: round 4: 3/5 clients",
    ]


def test_bars_on_a_terminal() -> None:
    there, text = console(True)
    with ProgressBars(there) as display:
        play(display)
        [every] = display._progress.tasks  # those of the runs have gone
        assert (every.total, every.completed) == (6, 6)
        assert every.fields["text"] == "2 of 2 runs"
    assert "stopping after this round" in text.getvalue()


def test_one_run_needs_no_bar_of_all() -> None:
    with ProgressBars(console(True)[0]) as display:
        display.plan(1, 3)
        display.begin("fedavg", 3, 1)
        display.clients("fedavg", 1, 4)
        [only] = display._progress.tasks
        assert 1.2 <= only.completed <= 1.3
        display.row("fedavg", row(2, 0.75))
        assert (only.completed, only.fields["text"]) == (2, "test 75.0 %")


def beside(display: ProgressDisplay) -> None:
    """Four runs, two at a time: one ends early, one not at all, and one before it begins."""
    display.plan(4, 12)
    display.begin("one", 3, 0)
    display.begin("two [x]", 3, 1)
    display.row("two [x]", row(2, 0.25))
    display.row("one", row(1, 0.5))
    display.end("one", FINISHED)
    display.begin("three", 3, 0)
    display.end("two [x]", "diverged")
    display.end("four", "no such file")
    display.end("three", "interrupted")


def test_runs_side_by_side_in_lines() -> None:
    there, text = console(False)
    beside(ProgressLines(there, prefix="[quick] "))
    assert text.getvalue().splitlines() == [
        "[quick] 4 runs of 12 rounds in all",
        "[quick] [1/4] one: 0.0 s, test 50.0 %",
        "[quick] [2/4] two [x]: diverged, test 25.0 %",
        "[quick] four: no such file",
        "[quick] [3/4] three: interrupted",
    ]


def test_runs_side_by_side_in_bars() -> None:
    there, text = console(True)
    with ProgressBars(there, prefix="[quick] ") as display:
        beside(display)
        [every] = display._progress.tasks
        assert every.description == r"\[quick] 4 runs"
        assert every.completed == 3 + 2  # all of the first one, and what the second one made
        assert every.fields["text"] == "4 of 4 runs"
    assert "[quick] two [x]: diverged" in text.getvalue()
    assert "[quick] four: no such file" in text.getvalue()


def test_who_may_not_see_the_test_set_sees_all_else() -> None:
    there, text = console(False)
    with WithoutScores(ProgressLines(there)) as display:
        play(display)
    lines = text.getvalue().splitlines()
    assert lines[1] == progress.STOPPING
    assert lines[3] == "[2/2] fedavg seed 1: taken from an earlier run"
    assert "test" not in text.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_true_of_all_runs_is_said_once(terminal: bool) -> None:
    there, text = console(terminal)
    kind = ProgressBars if terminal else ProgressLines
    with kind(there) as shown:
        for display in (shown, WithoutScores(shown)):
            display.begin("fedavg", 3, 0)
            display.warn("fedavg", "mind the gap")
            display.end("fedavg", FINISHED)
    assert text.getvalue().count("warning: mind the gap") == 1


def test_nothing_is_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        play(display)
    assert capfd.readouterr() == ("", "")


class Listens(ProgressDisplay):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def begin(self, run: str, rounds: int, done: int, score: MetricInfo = ACCURACY) -> None:
        self.told.append((run, rounds, done))

    def clients(self, run: str, trained: int, count: int) -> None:
        self.told.append(("clients", trained, count))

    def row(self, run: str, row: RoundRecord) -> None:
        self.told.append(("row", row.round))

    def end(self, run: str, how: str) -> None:
        self.told.append(("end", how))


@pytest.mark.parametrize("kind", ["sequential", "workers"])
def test_a_run_tells_of_every_client_and_round(kind: str) -> None:
    display = Listens()
    ready = prepared("scaffold", rounds=2, kind=kind, workers=2)
    start(ready, callbacks=[display.follow("a run")])
    assert display.told[0] == ("a run", 2, 0)
    assert [told for told in display.told if told[0] == "row"] == [("row", 1), ("row", 2)]
    assert display.told[-1] == ("end", FINISHED)
    counts = [told[1] for told in display.told if told[0] == "clients"]
    assert counts.count(4) == 2  # everybody, in each round
    assert sorted(set(counts))[-1] == 4


def test_one_piece_of_work_after_another() -> None:
    there, text = console(False)
    line = ProgressLines(there)
    with ProgressBars(console(True)[0]) as bar:
        for display in (bar, line, bar, line):
            play(display)
        [every] = bar._progress.tasks
        assert every.fields["text"] == "2 of 2 runs"
    assert text.getvalue().count("[1/2] fedavg seed 0") == 2


def test_a_run_that_goes_on_says_in_which_round() -> None:
    there, text = console(False)
    display = ProgressLines(there, seconds=0.0)
    display.begin("fedavg", 100, 50)
    display.clients("fedavg", 3, 10)
    assert text.getvalue() == "fedavg: round 51: 3/10 clients\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_comes_before_the_first_run_is_shown(terminal: bool) -> None:
    """Large models are silent for a minute there."""
    there, text = console(terminal)
    with progress_display(there) as display:
        display.prepare()
        WithoutScores(display).prepare()
        if isinstance(display, ProgressBars):
            display._progress.refresh()
            (task,) = display._progress.tasks
            assert task.description == progress.PREPARING
        assert progress.PREPARING in text.getvalue()
        display.begin("fedavg seed 0", 3, 0)
        if isinstance(display, ProgressBars):
            assert [task.description for task in display._progress.tasks] == ["fedavg seed 0"]


def test_names_move_no_cursor() -> None:
    there, text = console(False)
    with ProgressLines(there) as display:
        display.warn("x", "a\x1b[2Jb")
    assert text.getvalue() == "warning: a\\x1b[2Jb\n"
