"""Runs in the threads of one process take turns."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.runner.result import Result
from fedkeel.study.conformance.checks import run_checks
from toys import Net, federation, held, same

SECONDS = 60.0


def large() -> nn.Module:
    """A network without random numbers of its own, whose first weights take a while to draw."""
    return nn.Sequential(nn.Linear(5, 1500), nn.ReLU(), nn.Linear(1500, 300), nn.Linear(300, 3))


def run(model: Callable[[], nn.Module], seed: int, progress: bool = False) -> Result:
    return fk.run(
        "fedavg",
        task=fk.Task(model),
        clients=federation(),
        test=held(20),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1, batch_size=8),
        clients_per_round=2,
        engine=fk.Engine(kind="sequential"),
        seed=seed,
        progress=progress,
    )


@pytest.mark.parametrize("model", [partial(Net, dropout=0.5), large], ids=["dropout", "large"])
def test_runs_in_threads_have_the_bits_that_they_have_alone(
    model: Callable[[], nn.Module],
) -> None:
    alone = [run(model, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(partial(run, model), range(4)))
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert not same(alone[0], alone[1])


def test_threads_leave_the_number_of_threads_and_the_generator_as_they_were() -> None:
    before = torch.get_num_threads(), torch.random.get_rng_state()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(partial(run, Net), range(3)))
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


@contextmanager
def in_another_thread() -> Iterator[threading.Event]:
    """Let another thread be at work, until the event is set."""
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        with one_at_a_time():
            began.set()
            end.wait(SECONDS)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert began.wait(SECONDS)
        yield end
    finally:
        end.set()
        thread.join(SECONDS)


def test_who_waits_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with in_another_thread() as end, ThreadPoolExecutor(1) as pool:
        result = pool.submit(run, Net, 0, progress=True)
        shown, deadline = "", time.monotonic() + SECONDS
        while not shown and time.monotonic() < deadline:
            shown = capfd.readouterr().err
            time.sleep(0.01)
        assert shown.startswith("waiting: another thread of this process is making a run")
        assert not result.done()
        end.set()
        assert result.result().record.status == "finished"


def test_a_turn_may_be_within_another() -> None:
    with in_another_thread() as end:
        waits: list[int] = []

        def wait() -> None:
            waits.append(1)
            end.set()

        with one_at_a_time(wait), one_at_a_time(wait):
            assert waits == [1]


@contextmanager
def pressing_raises() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, as in a shell; in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("within", ["a run", "nothing"])
def test_ctrl_c_ends_the_wait(within: str) -> None:
    context = interrupts(lambda: None) if within == "a run" else pressing_raises()
    with in_another_thread() as end:
        press = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        with context, pytest.raises(KeyboardInterrupt), one_at_a_time(press.start):
            raise AssertionError("it did not wait")
        assert not end.is_set()


def test_a_check_waits_too() -> None:
    done: list[object] = []
    with in_another_thread() as end:
        thread = threading.Thread(
            target=lambda: done.extend(
                run_checks("fedavg", names=["its docstring says what it is"])
            )
        )
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        end.set()
        thread.join(SECONDS)
    assert len(done) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    with in_another_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads is the point
        child = os.fork()
        if not child:
            signal.alarm(int(SECONDS))
            with one_at_a_time(lambda: os._exit(1)):
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
