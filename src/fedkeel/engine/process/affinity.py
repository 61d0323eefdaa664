"""Processor cores: how many there are, and on which one a waiting process wakes up.

Linux may wake a worker on a core where another one has just been woken, or on that of the process
which wakes it, and look for a free core only at its next tick, four milliseconds later: as long as
a round of small clients takes. So each worker is woken on a core of its own. It is told no more
than that, and may be moved at once where other work keeps that core busy.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def cores() -> int:
    """Return the number of processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core(taken: Collection[int | None]) -> int | None:
    """Return a core of this process for a worker, one that is not taken where there is one.

    None where the system does not say which there are, or there is one alone.
    """
    known = sorted(_allowed(0))
    free = [one for one in known if one not in taken]
    return None if len(known) < 2 else (free or known)[0]


def here() -> int | None:
    """Return the core on which this process is running, None where the system does not say."""
    with suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return None


@contextmanager
def woken_on(core: int | None, process: int) -> Iterator[None]:
    """Let a process that sleeps, and is woken here, wake on a core; afterwards it may run anywhere.

    Args:
        core: None for wherever the system wakes it.
        process: its number.
    """
    everywhere = _allowed(process)
    if core not in everywhere:
        yield
        return
    _allow(process, {core})
    try:
        yield
    finally:
        _allow(process, everywhere)


def _allowed(process: int) -> set[int]:
    """Return where a process may run; nothing where the system does not say, or it has ended."""
    with suppress(OSError, AttributeError):
        return os.sched_getaffinity(process)
    return set()


def _allow(process: int, cores: set[int]) -> None:
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(process, cores)
