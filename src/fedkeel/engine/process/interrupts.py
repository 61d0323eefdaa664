"""Interrupts: the first Ctrl-C or SIGTERM ends a run after its round, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType

from fedkeel.engine.process.lane import current_lane

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask for an end."""

HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)
"""The signal of a terminal that closes; Windows has none."""


@dataclass(eq=False)
class _Waiting:
    """Work that ends after an interrupt, and what is called at the first one."""

    on_interrupt: Callable[[], None] | None
    stop: threading.Event = field(default_factory=threading.Event)


_waiting: list[_Waiting] = []
"""The work of this process that waits for an interrupt, the outermost first."""

_ignores_second = False


@contextmanager
def interrupts(on_interrupt: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """Turn the first interrupt into an event that is set, and the second into KeyboardInterrupt.

    Within another `interrupts`, an interrupt sets the events of both, and this one begins with its
    event set where the outer one's is: work that was asked to end begins nothing more.

    Args:
        on_interrupt: called at the first interrupt, in a thread of its own, because the interrupt
            may have come in the middle of a line that it writes too. Where it is None, that of the
            `interrupts` around this one is called.
    """
    work = _Waiting(on_interrupt)
    if threading.current_thread() is not threading.main_thread():
        with _told_by_main_thread(work) if current_lane() is not None else nullcontext():
            yield work.stop
        return

    parent = os.getpid()
    threads: list[threading.Thread] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if work.stop.is_set():
            if not _ignores_second:
                raise KeyboardInterrupt
            return
        for outer in _waiting:
            outer.stop.set()
        work.stop.set()
        callback = next((w.on_interrupt for w in reversed(_waiting) if w.on_interrupt), None)
        if callback and os.getpid() == parent:  # a signal may reach a forked worker too
            threads.append(threading.Thread(target=callback, daemon=True))
            threads[-1].start()

    if any(outer.stop.is_set() for outer in _waiting):
        work.stop.set()
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    _waiting.append(work)
    try:
        yield work.stop
    finally:
        if work in _waiting:
            _waiting.remove(work)
        for number, handler in before.items():
            signal.signal(number, handler)
        for thread in threads:
            thread.join(1.0)


@contextmanager
def _told_by_main_thread(work: _Waiting) -> Iterator[None]:
    """Let an interrupt of the main thread set the event of work in another one."""
    if any(outer.stop.is_set() for outer in _waiting):
        work.stop.set()
    _waiting.append(work)
    try:
        yield
    finally:
        _waiting.remove(work)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[threading.Event]:
    """Interrupt the work inside once so many seconds have passed, as the first Ctrl-C does.

    Yields:
        An event that is set when the time is up; it is not set by other interrupts.
    """
    is_up = threading.Event()
    if seconds is None:
        yield is_up
        return
    with interrupts() as stop:
        main = threading.main_thread().ident

        def end() -> None:
            if stop.is_set():  # a second interrupt would end the work in the middle of a round
                return
            is_up.set()
            if hasattr(signal, "pthread_kill") and main is not None:
                signal.pthread_kill(main, signal.SIGTERM)
            else:
                signal.raise_signal(signal.SIGTERM)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield is_up
        finally:
            timer.cancel()
            timer.join()  # a signal after this would meet the handlers of before


def is_end_requested() -> bool:
    """Return whether an interrupt has asked work of this process to end."""
    return any(work.stop.is_set() for work in _waiting)


@contextmanager
def hold_signals(deliver: bool = False) -> Iterator[None]:
    """Hold signals that ask for an end; drop them, or `deliver` them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {s: signal.signal(s, lambda n, _: received.append(n)) for s in {*SIGNALS, HANGUP}}
    try:
        yield
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
        for number in received if deliver else ():
            signal.raise_signal(number)


@contextmanager
def exit_when_killed() -> Iterator[None]:
    """Turn a kill, or the end of the terminal, into `SystemExit`, so that contexts are left.

    A signal that is ignored, as ``nohup`` does it, remains ignored.
    """
    signals = [s for s in (signal.SIGTERM, HANGUP) if signal.getsignal(s) != signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        signals = []
    before = {s: signal.signal(s, lambda n, _: sys.exit(128 + n)) for s in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block interrupts, so that a child process which is started here receives none too early."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep this process's handlers of interrupts, whatever a library sets meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_interrupts_from_parent() -> None:
    """Prepare a child process in which runs are made: its parent interrupts it, once.

    A second interrupt means no more than the first, because the parent may kill this process.
    """
    global _ignores_second
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _ignores_second = True
    _waiting.clear()  # of the process that this one was forked from
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches only the parent, which tells its children


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C in a worker process: it is for the process that gives out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
