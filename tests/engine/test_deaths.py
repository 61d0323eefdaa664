"""Workers that die are replaced without a trace in the result, and none outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process import forking
from fedkeel.engine.reply_rows import ReplyRows
from fedkeel.engine.trainer import Trainer
from fedkeel.engine.workers import Workers
from fedkeel.errors import StoppedProcess, TrainingError
from fedkeel.method.context import Message
from fedkeel.method.server_round import server_message
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel
from fedkeel.runner.start import start
from toys import Kills, Net, Raises, Slow, alive, children, eventually, federation, prepared, same

EVERYONE = np.arange(6)


def pool(ready: Prepared, workers: int, how: str = "fork") -> Workers:
    message = server_message(ready.plan, ready.server, 0.05)
    return Workers(ready.setup, ready.spec, 6, message, workers, start=how)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> object:
    before = set(children(os.getpid()))
    yield
    assert eventually(lambda: set(children(os.getpid())) <= before, 5.0)


class AtRow(Callback):
    """Does something after a round."""

    def __init__(self, round: int, act: Callable[[], None]) -> None:
        self._round, self._act = round, act

    def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
        if row.round == self._round:
            self._act()


class AtClient(Callback):
    """Does something once a client of the first round has been trained."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_clients_trained(self, trained: int, count: int) -> None:
        act, self._act = self._act, lambda: None
        act()


def kill_one() -> None:
    os.kill(children(os.getpid())[0], signal.SIGKILL)


def kill_all() -> None:
    for pid in children(os.getpid()):
        os.kill(pid, signal.SIGKILL)


# --- replaced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [pytest.param("fedavg", marks=pytest.mark.slow), "scaffold", "gradma"],
)
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_worker_killed_in_mid_round_leaves_no_trace(
    tmp_path: Path, method: str, workers: int
) -> None:
    """It dies while it trains client 3, the first time that client takes part."""
    clients = federation(marked=3)
    more = {"clients": clients, "per_round": 6}
    one = start(prepared(method, Kills, **more))
    once = tmp_path / "once"
    model = partial(Kills, once)
    two = start(prepared(method, model, **more, kind="workers", workers=workers))
    assert once.exists()
    assert same(one, two)


class Wide(nn.Module):
    """Two layers, wide enough for sums to be rounded in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def vectorized(method: str, parallel_clients: int, workers: int) -> Prepared:
    groups = {"kind": "vectorized", "parallel_clients": parallel_clients, "workers": workers}
    return prepared(method, Wide, clients=federation(12), per_round=12, **groups)


@pytest.mark.parametrize(
    ("method", "parallel_clients"),
    [
        pytest.param("fedavg", 1, marks=pytest.mark.slow),
        ("scaffold", 4),
        pytest.param("fedavg", 4, marks=pytest.mark.slow),
        pytest.param("fedgc", 4, marks=pytest.mark.slow),
    ],
)
def test_a_lost_client_group_is_trained_again_as_it_was(
    method: str, parallel_clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers die on one group in the second round, before and after they have trained it."""
    one = start(vectorized(method, parallel_clients, workers=2))
    deaths, train, here = tmp_path / "deaths", ReplyRows.train, os.getpid()
    deaths.touch()

    def train_or_die(self: ReplyRows, trainer: Trainer, message: Message, jobs, *rest) -> None:  # type: ignore[no-untyped-def]
        died = deaths.stat().st_size
        has_first = any(job.row == 0 for job in jobs)
        dies = message.round == 1 and has_first and os.getpid() != here and died < 2
        if not dies or died == 1:
            train(self, trainer, message, jobs, *rest)
        if dies:
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ReplyRows, "train", train_or_die)
    two = start(vectorized(method, parallel_clients, workers=2))
    assert deaths.stat().st_size == 2
    assert same(one, two)


@pytest.mark.parametrize(
    ("method", "parallel_clients"),
    [
        ("fedavg", 4),
        pytest.param("fedavg", 1, marks=pytest.mark.slow),
        pytest.param("fedgc", 4, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_workers_changes_no_bit(method: str, parallel_clients: int) -> None:
    one, other = (start(vectorized(method, parallel_clients, n)) for n in (1, 3))
    assert same(one, other)


@pytest.mark.parametrize("act", [kill_one, kill_all])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_killed_between_rounds_leave_no_trace(
    act: Callable[[], None], workers: int
) -> None:
    """They are found dead when the next round is given out."""
    one = start(prepared("scaffold", per_round=6))
    ready = prepared("scaffold", per_round=6, kind="workers", workers=workers)
    two = start(ready, callbacks=[AtRow(1, act)])
    assert same(one, two)


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_killed_at_any_moment_leave_no_trace(workers: int) -> None:
    one = start(prepared("scaffold", per_round=6))
    ready = prepared("scaffold", per_round=6, kind="workers", workers=workers)
    assert same(one, start(ready, callbacks=[AtClient(kill_all)]))


def test_a_killed_evaluation_is_made_again() -> None:
    ready = prepared()
    network = ready.setup.training.network
    with pool(ready, 3) as engine:
        before = engine.evaluate(network.params, {}, "test").states
        kill_all()
        assert torch.equal(before, engine.evaluate(network.params, {}, "test").states)
        assert len(children(os.getpid())) == 3


def test_pids_change_when_a_worker_is_replaced() -> None:
    ready = prepared()
    message = server_message(ready.plan, ready.server, 0.05)
    with pool(ready, 2) as engine:
        before = set(children(os.getpid()))
        kill_one()
        engine.train(message, EVERYONE, lambda _: None)
        after = set(children(os.getpid()))
    assert len(after) == 2
    assert len(before & after) == 1


# --- given up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_client_that_always_kills_its_worker_is_named(workers: int) -> None:
    ready = prepared(
        model=Kills,
        clients=federation(marked=3),
        per_round=6,
        kind="workers",
        workers=workers,
    )
    began = time.monotonic()
    with pytest.raises(TrainingError, match="died 3 times on the same work") as found:
        start(ready)
    assert found.value.got == "exit code -9 on client 3"
    assert "memory" in found.value.why
    assert "sequential" in found.value.do
    assert time.monotonic() - began < 30


def test_what_the_others_did_in_that_round_is_not_kept(tmp_path: Path) -> None:
    ready = prepared(
        "scaffold",
        Kills,
        clients=federation(marked=3),
        per_round=6,
        kind="workers",
        workers=2,
    )
    with pytest.raises(TrainingError):
        start(ready, tmp_path / "run")
    found = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert len(found) == 1  # round 0


# --- nobody is left behind ------------------------------------------------------------------------
# The fixture at the top looks for processes after every test of this file.


def test_after_an_error_nobody_is_left() -> None:
    more = {"clients": federation(marked=3), "per_round": 6, "kind": "workers", "workers": 3}
    with pytest.raises(TrainingError):
        start(prepared(model=Raises, **more))
    assert children(os.getpid()) == []


def test_after_success_nobody_is_left() -> None:
    start(prepared(kind="workers", workers=3))
    assert children(os.getpid()) == []


def test_after_an_interrupt_nobody_is_left() -> None:
    """An exception may come at any moment, also while the others work."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    ready = prepared(model=Slow, per_round=6, kind="workers", workers=3)
    with pytest.raises(KeyboardInterrupt):
        start(ready, callbacks=[AtClient(interrupt)])
    assert children(os.getpid()) == []


def test_after_a_failed_start_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = Workers._start_worker, []

    def second_fails(self: Workers, device: str) -> object:
        if begun:
            raise BlockingIOError("no more processes")
        begun.append(begin(self, device))
        return begun[0]

    monkeypatch.setattr(Workers, "_start_worker", second_fails)
    with pytest.raises(BlockingIOError):
        start(prepared(kind="workers", workers=2))
    assert not begun[0].child.process.is_alive()


def test_a_worker_that_hangs_is_ended_with_the_run() -> None:
    """Here one is stopped; a real one may be deep in a computation."""
    ready = prepared(per_round=6)
    with pool(ready, 2):
        pid = children(os.getpid())[0]
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not alive(pid)


def work_for_ever(ready: Prepared, how: str, busy: Path) -> None:
    """Be the parent of workers that are always busy."""
    threading.Timer(60, os._exit, (1,)).start()
    message = server_message(ready.plan, ready.server, 0.05)
    with pool(ready, 2, how) as engine:
        while True:
            engine.train(message, EVERYONE, lambda _: busy.touch())


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_no_worker_outlives_a_killed_parent(tmp_path: Path, how: str) -> None:
    """The parent is killed in the middle of a round and can tidy nothing up."""
    ready, busy = prepared(model=partial(Slow, 0.1), per_round=6), tmp_path / "busy"
    work = (ready, how, busy)
    parent = multiprocessing.get_context("fork").Process(target=work_for_ever, args=work)
    parent.start()
    assert eventually(busy.exists, 40)
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.kill()
    parent.join(10)
    assert eventually(lambda: not any(alive(worker) for worker in workers))


class Stuck(Net):
    """Takes a minute over every batch, in a worker of a child process of this one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.maker, self.folder = os.getpid(), folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.maker not in (os.getpid(), os.getppid()):
            (self.folder / str(os.getpid())).touch()
            time.sleep(60.0)
        return Net.forward(self, x)


@pytest.mark.parametrize("signals", [(), (signal.SIGSTOP,)])
def test_busy_and_stopped_workers_end_with_a_killed_parent_at_once(
    tmp_path: Path, signals: tuple[int, ...]
) -> None:
    """A step may take minutes, and a process that is stopped looks at nothing."""
    ready = prepared(model=partial(Stuck, tmp_path), per_round=6)
    work = (ready, "fork", tmp_path / "never")
    parent = multiprocessing.get_context("fork").Process(target=work_for_ever, args=work)
    parent.start()
    assert eventually(lambda: len(list(tmp_path.iterdir())) == 2, 40)
    workers = [int(file.name) for file in tmp_path.iterdir()]
    for number in signals:
        os.kill(workers[0], number)
    parent.kill()
    parent.join(10)
    assert eventually(lambda: not any(alive(worker) for worker in workers), 5.0)


def test_elsewhere_a_thread_waits_for_the_end_of_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(parent: int) -> None:
        threading.Thread(target=forking._exit_after_parent, daemon=True).start()

    monkeypatch.setattr(forking, "end_with_parent", watch)
    test_busy_and_stopped_workers_end_with_a_killed_parent_at_once(tmp_path, ())


# --- stopped, not ended ---------------------------------------------------------------------------


def test_a_stopped_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once it goes on, so does the run, with the same bits."""
    monkeypatch.setattr(forking, "STOPPED_SECONDS", 0.5)
    one = start(prepared("scaffold", per_round=6))
    stopped: list[int] = []

    def stop_one() -> None:
        stopped.append(children(os.getpid())[0])
        os.kill(stopped[0], signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (stopped[0], signal.SIGCONT)).start()

    ready = prepared("scaffold", per_round=6, kind="workers", workers=2)
    with pytest.warns(StoppedProcess, match="kill -CONT") as found:
        two = start(ready, callbacks=[AtRow(1, stop_one)])
    assert [str(warning.message).split()[1] for warning in found] == [str(stopped[0])]
    assert same(one, two)


def test_the_first_interrupt_ends_a_run_with_a_stopped_worker(tmp_path: Path) -> None:
    """The stopped one cannot hear; another does its work, and the round is saved."""

    def stop_one() -> None:
        os.kill(children(os.getpid())[0], signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    ready = prepared("scaffold", rounds=9, per_round=6, kind="workers", workers=2)
    first = start(ready, tmp_path / "run", callbacks=[AtRow(1, stop_one)])
    assert (first.record.status, len(first.rows)) == ("interrupted", 3)
    whole = start(prepared("scaffold", rounds=9, per_round=6))
    assert same(whole, start(ready, tmp_path / "run", resume=True))


def test_the_watcher_of_these_tests_sees_processes() -> None:
    with pool(prepared(model=Net), 2):
        assert len(children(os.getpid())) == 2
    assert children(os.getpid()) == []
