"""Lets torch's idle threads sleep soon where a program has imported torch before this package.

A thread of GNU OpenMP that has nothing to do first waits actively, for milliseconds, on a core that
a worker process or another program may need. How long is read when torch is loaded: the package's
``__init__`` makes it short, which comes too late where torch is there already. But OpenMP also
waits shortly as long as it has more threads than there are cores. So a team of threads is started
once, all of which sleep until the process ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import torch

_TEAM = 3
"""Threads of the team. OpenMP counts two of them, beside one for each core."""

_SHARED_ENTRIES = 1 << 17
"""Entries of a tensor that torch divides among threads."""


def let_idle_threads_sleep() -> None:
    """Let idle threads wait shortly from now on, unless the program has said how they wait."""
    is_said = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not is_said and torch.get_num_threads() > 1:
        _keep_a_team()


@cache
def _keep_a_team() -> None:
    """Start the team, where GNU OpenMP is in use."""
    if not (libraries := _libraries()):
        return
    is_started = threading.Event()

    def sleep_as_a_team() -> None:
        try:
            torch.get_num_threads()  # a new thread takes those of the process once
            for library in libraries:
                library.omp_set_num_threads(_TEAM)  # that this thread uses; other threads' stay
            torch.zeros(_SHARED_ENTRIES, device="cpu").add_(1.0)
        finally:
            is_started.set()
        threading.Event().wait()

    threading.Thread(target=sleep_as_a_team, name="fedkeel idle team", daemon=True).start()
    is_started.wait()


def _libraries() -> list[ctypes.CDLL]:
    """Return the copies of GNU OpenMP in this process; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in lines if "/libgomp" in line}
        return [ctypes.CDLL(path) for path in sorted(paths)]
    except OSError:
        return []
