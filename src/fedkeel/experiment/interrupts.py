"""Ctrl-C ends a run cleanly: the first one after the round at hand, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def interrupts(told: Callable[[], None]) -> Iterator[threading.Event]:
    """Turn the first interrupt into an event that is set, and the second into an exception.

    Args:
        told: called at the first one.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    parent = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        if os.getpid() == parent:  # and not in a worker, which a polite kill may reach too
            with suppress(RuntimeError):  # the interrupt came in the middle of another line
                told()

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
