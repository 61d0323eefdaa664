"""Runs in the threads of one process take turns, so that each gives the bits of a single run.

A module draws dropout and its first weights from torch's global generator, and the number of
threads and the precision of products belong to the whole process too. So one thread at a time
prepares, makes or checks a run, and the others wait. What other code does to them meanwhile, in
another thread, cannot be kept off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedkeel.engine.process.interrupts import is_end_requested
from fedkeel.engine.process.lane import current_lane

_POLL_SECONDS = 0.1

_turn = threading.RLock()


@contextmanager
def one_at_a_time(on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Wait until no other thread of this process is in such a context; it may be nested.

    Args:
        on_wait: called once where this thread has to wait.

    Raises:
        KeyboardInterrupt: an interrupt came while it waited.
    """
    if current_lane() is not None:  # the thread that has started it has the turn
        yield
        return
    turn = _turn  # a forked process has another one
    if not turn.acquire(blocking=False):
        if on_wait is not None:
            on_wait()
        while not turn.acquire(timeout=_POLL_SECONDS):
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and is_end_requested():
                raise KeyboardInterrupt
    try:
        yield
    finally:
        turn.release()


def _forget_other_threads() -> None:
    """Begin anew in a forked process, where no other thread is left that could end its turn."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
