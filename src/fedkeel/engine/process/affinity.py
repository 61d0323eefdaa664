"""Processor cores: how many there are, and on which core a waiting process wakes up.

Linux may wake a worker on a core where another worker has just been woken, or on the core of the
process that wakes it. It then looks for a free core only at its next tick, four milliseconds later,
which is as long as a round of small clients. So each worker is woken on a core of its own. After
that it may run on any core again, in case other work keeps its core busy.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def core_count() -> int:
    """Return the number of processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()


def free_core(taken: Collection[int | None]) -> int | None:
    """Return a core for a worker, one that is not taken if possible.

    None where the system does not tell the cores of this process, or there is only one.
    """
    cores = sorted(_allowed_cores(0))
    free = [core for core in cores if core not in taken]
    return None if len(cores) < 2 else (free or cores)[0]


def current_core() -> int | None:
    """Return the core on which this process is running, None where the system does not tell."""
    with suppress(OSError, AttributeError):
        return int(ctypes.CDLL(None).sched_getcpu())
    return None


@contextmanager
def woken_on_core(core: int | None, process: int) -> Iterator[None]:
    """Make a sleeping process wake on a core if it is woken in this context.

    Args:
        core: None lets the system choose.
        process: process id.
    """
    allowed = _allowed_cores(process)
    if core not in allowed:
        yield
        return
    _allow_cores(process, {core})
    try:
        yield
    finally:
        _allow_cores(process, allowed)


def _allowed_cores(process: int) -> set[int]:
    """Return where a process may run; empty where the system does not tell, or it has ended."""
    with suppress(OSError, AttributeError):
        return os.sched_getaffinity(process)
    return set()


def _allow_cores(process: int, cores: set[int]) -> None:
    with suppress(OSError, AttributeError):
        os.sched_setaffinity(process, cores)
