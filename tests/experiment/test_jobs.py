"""Runs at the same time: the same bits, no processes left, and interrupts that lose nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import fedkeel as fk
from fedkeel import config
from fedkeel.config import Space
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.experiment.jobs import make_all
from fedkeel.experiment.prepare import Ingredients, Prepared
from fedkeel.experiment.progress import Silent
from fedkeel.experiment.tune import tune
from fedkeel.records import RoundRecord, RunFolder
from toys import Kills, Net, Raises, Slow, children, eventually, federation, held

RATES = (0.001, 0.1, 1.0)


def ingredients(model: object = Net, marked: int | None = None) -> Ingredients:
    data = federation(marked=marked)
    return Ingredients(fk.Task(model), lambda seed: data, held(), "toy")


def settings(lr: float = 0.05, rounds: int = 3, kind: str = "sequential") -> config.Run:
    return config.Run(
        rounds=rounds,
        local=fk.Local(lr=lr, epochs=1, batch_size=4),
        engine=fk.Engine(kind=kind, workers=2, chunk=2, checkpoint_seconds=0),
    )


def place(out: Path, prepared: Prepared) -> Path:
    return out / prepared.key


def rows(found: list) -> list[str]:
    return [repr([{**vars(row), "seconds": None} for row in made.rows]) for made in found]


class Listens(Silent):
    def __init__(self) -> None:
        self.made_: list[tuple[str, int]] = []
        self.stopped = 0
        self.reused = 0

    def made(self, label: str, row: RoundRecord | None, seconds: float) -> None:
        self.made_.append((label, 0 if row is None else row.round))

    def stopping(self) -> None:
        self.stopped += 1

    def end(self, reused: bool) -> None:
        self.reused += reused


@pytest.fixture(autouse=True)
def _no_one_is_left() -> object:
    yield
    assert eventually(lambda: not children(os.getpid()), 5)


def test_the_same_bits_whatever_the_number(tmp_path: Path) -> None:
    wanted = [settings(lr) for lr in RATES]
    alone = make_all(wanted, ingredients(), partial(place, tmp_path / "a"))
    watcher = Listens()
    both = make_all(wanted, ingredients(), partial(place, tmp_path / "b"), 2, watcher)
    assert rows(both) == rows(alone)
    assert [made.folder.name for made in both] == [made.folder.name for made in alone]
    assert sorted(watcher.made_) == [("fedavg seed 0", 3)] * 3
    again = make_all(wanted, ingredients(), partial(place, tmp_path / "b"), 2, watcher)
    assert rows(again) == rows(alone)
    assert (len(watcher.made_), watcher.reused) == (3, 3)


def test_a_search_is_the_same_whatever_the_number(tmp_path: Path) -> None:
    space = Space(space={"local.lr": config.Range(low=0.001, high=1.0, log=True)}, trials=5)
    found = [
        tune(settings(), ingredients(), ["fedavg", "scaffold"], space, tmp_path / str(jobs), jobs)
        for jobs in (1, 3)
    ]
    assert found[0].rows == found[1].rows
    assert found[0].trials == found[1].trials


@pytest.mark.parametrize("kind", ["workers", "vectorised", "auto"])
def test_a_process_starts_no_others(tmp_path: Path, kind: str) -> None:
    wanted = [settings(lr, kind=kind) for lr in RATES[:2]]
    found = make_all(wanted, ingredients(), partial(place, tmp_path), 2)
    for made in found:
        engine = RunFolder(made.folder).read_run().engine
        assert engine["workers"] == 1
        assert engine["kind"] == {"workers": "sequential"}.get(kind, engine["kind"])


def test_a_run_that_several_workers_began_goes_on_in_one_process(tmp_path: Path) -> None:
    one = settings(kind="auto", rounds=6)
    whole = make_all([one], ingredients(), partial(place, tmp_path / "whole"), 2)

    class Ends(Silent):
        def row(self, row: RoundRecord) -> None:
            if row.round == 2:
                signal.raise_signal(signal.SIGTERM)

    out = tmp_path / "out"
    assert make_all([one], ingredients(), partial(place, out), 1, Ends()) == [None]
    [folder] = out.iterdir()
    record = RunFolder(folder).read_run()
    record.engine.update(kind="workers", workers=2)
    RunFolder(folder).write_run(record)
    assert rows(make_all([one], ingredients(), partial(place, out), 2)) == rows(whole)


def test_an_interrupt_ends_runs_after_their_round(tmp_path: Path) -> None:
    wanted = [settings(lr, rounds=40) for lr in RATES]
    slow = ingredients(partial(Slow, 0.01))
    watcher = Listens()

    def interrupt() -> None:
        eventually(lambda: len(list(tmp_path.glob("*/checkpoint/round-*"))) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    found = make_all(wanted, slow, partial(place, tmp_path), 2, watcher)
    thread.join()
    assert found == [None, None, None]
    assert watcher.stopped == 1
    folders = [RunFolder(p) for p in tmp_path.iterdir()]
    assert [folder.read_run().status for folder in folders] == ["interrupted"] * 2
    for folder in folders:
        saved = folder.load()
        assert saved is not None
        assert 0 < saved.round == folder.rows()[-1].round < 40


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    def interrupt() -> None:
        eventually(lambda: len(children(os.getpid())) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        make_all([settings(0.1), settings(0.2)], ingredients(partial(Slow, 0.7)),
                 partial(place, tmp_path), 2)  # fmt: skip
    thread.join()


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    from torch import nn

    explodes = partial(nn.Sequential, nn.Linear(5, 6), nn.Linear(6, 3))
    wanted = [settings(lr, rounds=5) for lr in (1e6, 0.1)]
    for jobs in (1, 2):
        out = partial(place, tmp_path / str(jobs))
        bad, good = make_all(wanted, ingredients(explodes), out, jobs)
        assert "diverged" in bad.error
        assert (good.error, len(good.rows)) == ("", 6)


def test_a_process_that_is_killed_is_reported(tmp_path: Path) -> None:
    killer = ingredients(Kills, marked=0)
    with pytest.raises(TrainingError, match=r"The process of a run ended: fedavg seed 0") as found:
        make_all([settings(0.1), settings(0.2)], killer, partial(place, tmp_path), 2)
    assert "exit code -9" in str(found.value)
    assert len(found.value.lines()) <= 4


def test_what_a_model_raises_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="this example is marked"):
        make_all([settings()], ingredients(Raises, marked=0), partial(place, tmp_path), 2)


def test_a_folder_that_another_process_writes_into_is_refused(tmp_path: Path) -> None:
    def same(prepared: Prepared) -> Path:
        return tmp_path / "one"

    slow = ingredients(partial(Slow, 0.02))
    with pytest.raises(RunError):
        make_all([settings(0.1), settings(0.2)], slow, same, 2)


def test_without_fork_runs_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.experiment.jobs.START", "spawn")
    with pytest.raises(ConfigError, match="forked"):
        make_all([settings()], ingredients(), partial(place, tmp_path), 2)
    assert len(make_all([settings()], ingredients(), partial(place, tmp_path), 1)) == 1
