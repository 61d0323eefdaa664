"""Workers wake on cores of their own, and may run anywhere afterwards."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from fedkeel.engine.process import affinity
from fedkeel.engine.process.affinity import current_core, free_core, woken_on_core

linux = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not on Linux")


def echo(pipe: Connection) -> None:
    while pipe.recv():
        pipe.send(affinity.current_core())


@linux
def test_a_process_wakes_where_it_is_told_and_is_free_again() -> None:
    cores = os.sched_getaffinity(0)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=echo, args=(theirs,), daemon=True)
    process.start()
    try:
        for one in sorted(cores):
            with woken_on_core(one, process.pid):
                expected = {one} if len(cores) > 1 else cores
                assert os.sched_getaffinity(process.pid) == expected
                ours.send(True)
                assert ours.recv() == one or len(cores) == 1
            assert os.sched_getaffinity(process.pid) == cores
    finally:
        ours.send(False)
        process.join()


@linux
def test_it_is_free_again_after_an_error_and_may_have_ended() -> None:
    own = os.getpid()
    before = os.sched_getaffinity(own)
    with pytest.raises(OSError, match="broken"), woken_on_core(min(before), own):
        raise OSError("broken")
    assert os.sched_getaffinity(own) == before
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    with woken_on_core(min(before), child.pid):
        pass


def test_each_worker_gets_a_core_that_no_other_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_allowed_cores", lambda _: {2, 5, 7})
    taken: list[int | None] = []
    for _ in range(4):
        taken.append(free_core(taken))
    assert taken == [2, 5, 7, 2]
    assert free_core([2, 7]) == 5  # in place of one that has died
    monkeypatch.setattr(affinity, "_allowed_cores", lambda _: {2})
    assert free_core([]) is None


def test_where_the_system_does_not_say_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise AttributeError

    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.setattr(os, name, missing, raising=False)
    monkeypatch.setattr(affinity.ctypes, "CDLL", missing)
    assert free_core([]) is None
    assert current_core() is None
    with woken_on_core(0, os.getpid()):
        pass
