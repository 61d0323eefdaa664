"""Ctrl-C ends a run cleanly: the first one after the round at hand, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

POLITE = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask for an end."""

_open: list[threading.Event] = []
"""Those who wait for an interrupt, the outermost first."""

_patient = False


def be_patient() -> None:
    """Take no second interrupt for haste from now on: whoever is in haste kills this process."""
    global _patient
    _patient = True
    _open.clear()  # of the process that this one was forked from


@contextmanager
def interrupts(told: Callable[[], None]) -> Iterator[threading.Event]:
    """Turn the first interrupt into an event that is set, and the second into an exception.

    One within another sets the events of both, and begins with its event set where the outer one's
    is: what has been asked to end begins nothing more.

    Args:
        told: called at the first one, in a thread of its own: the interrupt may have come in the
            middle of another line of what it writes to.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    parent = os.getpid()
    telling: list[threading.Thread] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if not _patient:
                raise KeyboardInterrupt
            return
        for one in _open:
            one.set()
        if os.getpid() == parent:  # and not in a worker, which a polite kill may reach too
            telling.append(threading.Thread(target=told, daemon=True))
            telling[-1].start()

    if any(one.is_set() for one in _open):
        stop.set()
    before = {s: signal.signal(s, handle) for s in POLITE}
    _open.append(stop)
    try:
        yield stop
    finally:
        if stop in _open:
            _open.remove(stop)
        for number, handler in before.items():
            signal.signal(number, handler)
        for thread in telling:
            thread.join(1.0)
