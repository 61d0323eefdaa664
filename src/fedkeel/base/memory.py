"""How much memory this machine and its GPUs have free, and numbers of bytes in words."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedkeel.base.lazy import torch


def free_memory() -> int | None:
    """Return the bytes of available memory, None where the system does not tell."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024  # free memory, and caches that can be dropped
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def free_on(device: torch.device) -> int | None:
    """Return the bytes that are free on a device, None where the system does not tell."""
    if device.type != "cuda":
        return free_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def format_bytes(count: int) -> str:
    """Return a number of bytes with a suitable unit.

    >>> format_bytes(1_234_567_890), format_bytes(2_500_000), format_bytes(40)
    ('1.2 GB', '2.5 MB', '40 bytes')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
