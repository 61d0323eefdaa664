"""Runs at the same time: the same bits, no processes left, and interrupts that lose nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import fedkeel as fk
from fedkeel import config
from fedkeel.config import Space
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.features.progress.display import FINISHED, REUSED, ProgressDisplay
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study.pool import (
    RunOutcome,
    RunRequest,
    default_jobs,
    groups_of,
    run_all,
    single_process,
)
from fedkeel.study.tune import tune
from toys import Kills, Net, Raises, Slow, children, eventually, federation, held

RATES = (0.001, 0.1, 1.0)


def ingredients(model: object = Net, marked: int | None = None) -> Ingredients:
    data = federation(marked=marked)
    return Ingredients(fk.Task(model), lambda seed: data, held(), "toy")


def settings(lr: float = 0.05, rounds: int = 3, kind: str = "sequential") -> config.Run:
    return config.Run(
        rounds=rounds,
        local=fk.Local(lr=lr, epochs=1, batch_size=4),
        engine=fk.Engine(kind=kind, workers=2, parallel_clients=2, checkpoint_seconds=0),
    )


def orders(
    wanted: list[config.Run], given: Ingredients, out: Path, jobs: int
) -> Iterator[RunRequest]:
    """Each in a folder of its own, however often the same is wanted."""
    for number, one in enumerate(wanted):
        if jobs > 1:
            one = one.model_copy(update={"engine": single_process(one.engine)})
        prepared = prepare(one, given)
        folder = out / prepared.key
        yield RunRequest(f"run {number}", folder, partial(make, prepared, folder))


def make(prepared: Prepared, folder: Path, display: ProgressDisplay, name: str) -> str:
    return start(prepared, folder, resume=True, callbacks=[display.follow(name)]).record.status


def made_of(
    wanted: list[config.Run],
    given: Ingredients,
    out: Path,
    jobs: int = 1,
    display: ProgressDisplay | None = None,
) -> list[RunOutcome | None]:
    return run_all(orders(wanted, given, out, jobs), jobs, display)


def rows(found: list) -> list[str]:
    return [
        repr([{**vars(row), "seconds": None, "processor_seconds": None} for row in made.rows])
        for made in found
    ]


class Listens(ProgressDisplay):
    """Writes down how far each run came, and how it ended."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.stopped = 0

    def row(self, run: str, row: RoundRecord) -> None:
        self.rounds[run] = row.round

    def end(self, run: str, how: str) -> None:
        assert run not in self.ends
        self.ends[run] = how

    def stopping(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def before() -> Iterator[set[int]]:
    """The processes that there were; no others are left."""
    found = set(children(os.getpid()))  # the server that commands are forked from, perhaps
    yield found
    assert eventually(lambda: set(children(os.getpid())) <= found, 5)


def test_the_same_bits_whatever_the_number(tmp_path: Path) -> None:
    wanted = [settings(lr) for lr in RATES]
    watchers = Listens(), Listens(), Listens()
    one_by_one = made_of(wanted, ingredients(), tmp_path / "a", 1, watchers[0])
    both = made_of(wanted, ingredients(), tmp_path / "b", 2, watchers[1])
    again = made_of(wanted, ingredients(), tmp_path / "b", 2, watchers[2])
    assert rows(again) == rows(both) == rows(one_by_one)
    assert [made.folder.name for made in both] == [made.folder.name for made in one_by_one]
    for display, how in zip(watchers, (FINISHED, FINISHED, REUSED), strict=True):
        assert display.rounds == {"run 0": 3, "run 1": 3, "run 2": 3}
        assert set(display.ends.values()) == {how}


def test_a_search_is_the_same_whatever_the_number(tmp_path: Path) -> None:
    space = Space(space={"local.lr": config.Range(low=0.001, high=1.0, log=True)}, trials=5)
    found = [
        tune(settings(), ingredients(), ["fedavg", "scaffold"], space, tmp_path / str(jobs), jobs)
        for jobs in (1, 3)
    ]
    assert found[0].rows == found[1].rows
    assert found[0].trials == found[1].trials


@pytest.mark.parametrize("kind", ["workers", "vectorized", "auto"])
def test_a_process_starts_no_others(tmp_path: Path, kind: str) -> None:
    wanted = [settings(lr, kind=kind) for lr in RATES[:2]]
    found = made_of(wanted, ingredients(), tmp_path, 2)
    for made in found:
        engine = RunFolder(made.folder).read_run().engine
        assert engine.workers == 1
        assert engine.kind == {"workers": "sequential"}.get(kind, engine.kind)


def test_a_run_that_several_workers_began_goes_on_in_one_process(tmp_path: Path) -> None:
    one = settings(kind="auto", rounds=6)
    whole = made_of([one], ingredients(), tmp_path / "whole", 2)

    class Ends(ProgressDisplay):
        def row(self, run: str, row: RoundRecord) -> None:
            if row.round == 2:
                signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "out"
    assert made_of([one], ingredients(), out, 1, Ends()) == [None]
    [folder] = out.iterdir()
    record = RunFolder(folder).read_run()
    engine = replace(record.engine, kind="workers", workers=2)
    RunFolder(folder).write_run(replace(record, engine=engine))
    assert rows(made_of([one], ingredients(), out, 2)) == rows(whole)


def test_an_interrupt_ends_runs_after_their_round(tmp_path: Path) -> None:
    wanted = [settings(lr, rounds=40) for lr in RATES]
    slow = ingredients(partial(Slow, 0.01))
    display = Listens()

    def interrupt() -> None:
        eventually(lambda: len(list(tmp_path.glob("*/checkpoint/round-*"))) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    found = made_of(wanted, slow, tmp_path, 2, display)
    thread.join()
    assert found == [None, None]  # the third one was not begun
    assert display.stopped == 1
    assert display.ends == {"run 0": "interrupted", "run 1": "interrupted"}
    folders = [RunFolder(p) for p in tmp_path.iterdir()]
    assert [folder.read_run().status for folder in folders] == ["interrupted"] * 2
    for folder in folders:
        saved = folder.load()
        assert saved is not None
        assert 0 < saved.round == folder.rows()[-1].round < 40


def test_a_second_interrupt_ends_at_once(tmp_path: Path, before: set[int]) -> None:
    def interrupt() -> None:
        eventually(lambda: len(set(children(os.getpid())) - before) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        made_of([settings(0.1), settings(0.2)], ingredients(partial(Slow, 0.3)), tmp_path, 2)
    thread.join()


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    from torch import nn

    explodes = partial(nn.Sequential, nn.Linear(5, 6), nn.Linear(6, 3))
    wanted = [settings(lr, rounds=5) for lr in (1e6, 0.1)]
    for jobs in (1, 2):
        display = Listens()
        bad, good = made_of(wanted, ingredients(explodes), tmp_path / str(jobs), jobs, display)
        assert isinstance(bad.error, TrainingError)
        assert "diverged" in bad.error.what
        assert (good.error, len(good.rows)) == (None, 6)
        assert display.ends == {"run 0": bad.error.what, "run 1": FINISHED}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_finished_run_without_rows_is_reported(tmp_path: Path, jobs: int) -> None:
    wanted, given = [settings(lr) for lr in (0.01, 0.05)], ingredients()
    made = made_of(wanted, given, tmp_path)
    assert made[0] is not None
    (made[0].folder / "rounds.jsonl").write_text("")
    first, other = made_of(wanted, given, tmp_path, jobs)
    assert first is not None
    assert other is not None
    assert isinstance(first.error, RunError)
    assert "lacks rounds" in first.error.what
    assert other.error is None


def test_a_process_that_is_killed_is_reported(tmp_path: Path) -> None:
    killer, wanted = ingredients(Kills, marked=0), [settings(0.1), settings(0.2)]
    for made in made_of(wanted, killer, tmp_path, 2):
        assert isinstance(made.error, RunError)
        assert "The process of a run ended: run " in made.error.what
        assert "exit code -9" in str(made.error)
        assert len(made.error.lines()) <= 4


def test_a_search_ends_where_a_process_is_killed(tmp_path: Path) -> None:
    """It would choose by what is left otherwise."""
    killer = ingredients(Kills, marked=0)
    space = Space(space={"local.lr": (0.1, 0.2)})
    with pytest.raises(RunError, match=r"ended: fedavg, local.lr 0\.[12], seed 0"):
        tune(settings(), killer, ["fedavg"], space, tmp_path, 2)


def test_what_a_model_raises_is_reported(tmp_path: Path) -> None:
    wanted = [settings()]
    for jobs in (1, 2):
        [made] = made_of(wanted, ingredients(Raises, marked=4), tmp_path / str(jobs), jobs)
        assert "this example is marked" in str(made.error)


def test_a_fault_of_the_program_is_raised(tmp_path: Path) -> None:
    def fails(display: ProgressDisplay, name: str) -> str:
        raise KeyError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        run_all([RunRequest("one", tmp_path / "one", fails)], 2)


def test_jobs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each core, as far as there are runs and memory; one where a run is spread out."""
    monkeypatch.setattr("fedkeel.study.pool.core_count", lambda: 4)
    monkeypatch.setattr("fedkeel.study.pool.has_gpu", lambda device: device == "cuda")

    def jobs(runs: int = 9, **engine: object) -> int:
        values = {"engine": fk.Engine(**{"kind": "auto", **engine})}
        return default_jobs(prepare(settings().model_copy(update=values), ingredients()), runs)

    assert (jobs(), jobs(3), jobs(kind="sequential")) == (4, 3, 4)
    assert (jobs(kind="workers"), jobs(workers=2), jobs(devices=["cpu"])) == (1, 1, 1)
    assert jobs(kind="vectorized", device="cuda") == 1
    monkeypatch.setattr("fedkeel.study.pool.free_memory", lambda: 1000)
    assert jobs() == 1
    monkeypatch.setattr("fedkeel.study.pool.free_memory", lambda: None)
    assert jobs() == 4
    monkeypatch.setattr("fedkeel.engine.process.forking.start_method", lambda: "spawn")
    assert jobs() == 1


def test_groups_are_runs_that_follow_one_another() -> None:
    def request(name: str, group: str, most: int = 3, folder: str = "") -> RunRequest:
        return RunRequest(name, Path(folder or name), lambda *given: "finished", group, most)

    requests = [request(n, "x") for n in "abcd"] + [request("e", "y"), request("f", "y")]
    requests += [request("g", "z", 1), request("h", "z", 1)]
    requests += [request("i", "w"), request("j", "w", folder="i")]  # one folder: not at a time
    assert [[r.name for r in group] for group in groups_of(requests)] == [
        *(["a", "b", "c"], ["d"], ["e", "f"], ["g"], ["h"], ["i"], ["j"])
    ]


def test_an_error_before_the_first_round(tmp_path: Path) -> None:
    def fails(display: ProgressDisplay, name: str) -> str:
        raise ConfigError("no such file")

    for jobs in (1, 2):
        display = Listens()
        [made] = run_all([RunRequest("one", tmp_path / "one", fails)], jobs, display)
        assert (made.rows, made.error.what) == ([], "no such file")
        assert display.ends == {"one": "no such file"}


@pytest.mark.parametrize("late", [0.0, 0.3])
def test_two_runs_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """Also where both have found it empty before either begins."""
    alone = RunFolder.alone

    def hesitates(folder: RunFolder) -> AbstractContextManager[None]:
        time.sleep(late)
        return alone(folder)

    monkeypatch.setattr(RunFolder, "alone", hesitates)
    slow = ingredients(partial(Slow, 0.02))
    prepared = [prepare(settings(lr), slow) for lr in (0.1, 0.2)]
    out = tmp_path / "one"
    wanted = [RunRequest(str(i), out, partial(make, one, out)) for i, one in enumerate(prepared)]
    errors = [made.error for made in run_all(wanted, 2)]
    assert sum(isinstance(error, RunError) for error in errors) == 1


def test_without_fork_a_search_goes_on_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeel.engine.process.forking.start_method", lambda: "spawn")
    space = Space(space={"local.lr": (0.1, 0.2)})
    with pytest.raises(ConfigError, match="forked"):
        tune(settings(), ingredients(), ["fedavg"], space, tmp_path, 2)
    assert tune(settings(), ingredients(), ["fedavg"], space, tmp_path, 1).complete


def at_once(folder: Path, display: ProgressDisplay, name: str) -> str:
    prepared = prepare(settings(), ingredients())
    return make(prepared, folder, display, name)


@pytest.mark.slow
def test_without_fork_an_order_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.engine.process.forking.start_method", lambda: "spawn")
    wanted = [RunRequest(n, tmp_path / n, partial(at_once, tmp_path / n)) for n in ("a", "b")]
    display = Listens()
    assert [len(made.rows) for made in run_all(wanted, 2, display)] == [4, 4]
    assert display.ends == {"a": FINISHED, "b": FINISHED}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    slow = ingredients(partial(Slow, 0.02))
    wanted = [
        RunRequest("one", out, partial(make, prepare(settings(lr), slow), out))
        for lr in RATES
        for out in [tmp_path / str(lr)]
    ]
    display = Listens()
    assert all(made.error is None for made in run_all(wanted, 3, display))
    assert display.ends == dict.fromkeys(("one", "one (again)", "one (again) (again)"), FINISHED)


class Hears(ProgressDisplay):
    """Counts words on clients, and writes down those on rounds."""

    def __init__(self) -> None:
        self.ticks, self.heard = 0, []

    def clients(self, run: str, trained: int, count: int) -> None:
        self.ticks += 1

    def row(self, run: str, row: RoundRecord) -> None:
        self.heard.append(row.round)


def test_rounds_are_told_however_many_clients_there_are(tmp_path: Path) -> None:
    """Words on clients come many times a second, and would take every turn."""
    display = Hears()
    made_of([settings(rounds=6)], ingredients(partial(Slow, 0.02)), tmp_path, 2, display)
    assert display.ticks > 3
    assert len(display.heard) >= 4


def test_an_interrupt_in_the_last_round_stops_what_would_follow(tmp_path: Path) -> None:
    class Ends(Listens):
        def row(self, run: str, row: RoundRecord) -> None:
            if (run, row.round) == ("run 0", 3):
                signal.raise_signal(signal.SIGINT)

    display = Ends()
    [made] = made_of([settings(lr) for lr in RATES], ingredients(), tmp_path, 1, display)
    assert made.error is None
    assert (len(made.rows), display.stopped) == (4, 1)


def test_a_second_polite_signal_does_not_hurry_a_process(tmp_path: Path, before: set[int]) -> None:
    """Whoever sends it to all processes of a job sends it twice to those of runs."""

    def interrupt() -> None:
        eventually(lambda: len(list(tmp_path.glob("*/rounds.jsonl"))) == 2)
        time.sleep(0.5)
        for _ in range(2):
            for pid in set(children(os.getpid())) - before:
                os.kill(pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    slow = ingredients(partial(Slow, 0.05))
    assert made_of([settings(lr, rounds=60) for lr in RATES], slow, tmp_path, 2) == [None, None]
    thread.join()
    for folder in map(RunFolder, tmp_path.iterdir()):
        assert folder.read_run().status == "interrupted"
        assert folder.load().round == folder.rows()[-1].round > 0


def test_a_stopped_process_does_not_keep_an_interrupt_from_ending_the_runs(
    tmp_path: Path, before: set[int]
) -> None:
    """It cannot hear that it is asked to end; the other one saves its round."""

    def interrupt() -> None:
        eventually(lambda: len(list(tmp_path.glob("*/rounds.jsonl"))) == 2)
        os.kill(min(set(children(os.getpid())) - before), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    slow = ingredients(partial(Slow, 0.05))
    assert made_of([settings(lr, rounds=60) for lr in RATES], slow, tmp_path, 2) == [None, None]
    thread.join()
    statuses = sorted(RunFolder(folder).read_run().status for folder in tmp_path.iterdir())
    assert statuses == ["interrupted", "running"]


def begun(out: Path) -> bool:
    """Whether a run has made some rounds."""
    return any(len(file.read_text().splitlines()) > 2 for file in out.glob("*/rounds.jsonl"))


def test_what_ends_all_is_told_at_once(tmp_path: Path) -> None:
    """And the others save what they have."""

    def fails(display: ProgressDisplay, name: str) -> str:
        eventually(lambda: begun(tmp_path))
        raise ConfigError("no such file")

    [long] = orders([settings(rounds=60)], ingredients(partial(Slow, 0.05)), tmp_path, 2)
    wanted = [
        long,
        RunRequest("bad", tmp_path / "bad", fails),
        RunRequest("never", tmp_path / "x", fails),
    ]
    found = run_all(wanted, 2, may_continue=lambda made: made.error is None)
    assert (found[0], len(found)) == (None, 2)
    assert RunFolder(long.folder).load().round > 0


def test_an_error_between_orders_lets_runs_save(tmp_path: Path) -> None:
    def broken() -> Iterator[RunRequest]:
        yield from orders([settings(rounds=60)], ingredients(partial(Slow, 0.05)), tmp_path, 2)
        eventually(lambda: begun(tmp_path))
        raise KeyError("oops")

    with pytest.raises(KeyError):
        run_all(broken(), 2)
    [folder] = map(RunFolder, tmp_path.iterdir())
    assert folder.read_run().status == "interrupted"
    assert folder.load().round > 0
