"""Memory of one process, or of several processes at once."""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from fedkeel.errors import RunError

ALIGNMENT = 64
"""Every tensor starts at a multiple of so many bytes, as torch's own tensors do. So sums over a
tensor are added in the same order wherever it lies."""

Allocate = Callable[[int], Tensor]
"""Number of bytes -> a tensor of that many bytes, type uint8."""

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag that allows more addresses than there is memory: many rows are never written."""


def private_memory(nbytes: int) -> Tensor:
    """Allocate memory of this process. The system provides a page when it is first written."""
    return _mapped(nbytes, "MAP_PRIVATE")


def fork_shared_memory(nbytes: int) -> Tensor:
    """Allocate memory that forked processes share, without a file or a named segment.

    The system provides a page when it is first written.
    """
    return _mapped(nbytes, "MAP_SHARED")


def shared_segment(nbytes: int) -> Tensor:
    """Allocate memory that can be handed to spawned processes.

    On Linux torch takes all of it from /dev/shm at once. Where /dev/shm is too small, torch would
    leave a file there for good, so its free space is checked first.
    """
    with suppress(OSError):  # not on Linux
        usage = shutil.disk_usage("/dev/shm")
        if usage.total and usage.free < nbytes:  # a total of 0 means no limit
            raise _out_of_memory(nbytes, MemoryError(f"/dev/shm has {usage.free / 1e9:.1f} GB"))
    try:
        storage = torch.UntypedStorage._new_shared(max(nbytes, 1))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _out_of_memory(nbytes, error) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes]


def _mapped(nbytes: int, sharing: str) -> Tensor:
    if not hasattr(mmap, sharing):  # on Windows
        return torch.empty(nbytes, dtype=torch.uint8)
    flags = getattr(mmap, sharing) | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        block = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    except OSError as error:
        raise _out_of_memory(nbytes, error) from None
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]


def _out_of_memory(nbytes: int, error: Exception) -> RunError:
    return RunError(
        "There is not enough memory for the clients' replies and states.",
        got=f"{nbytes / 1e9:.1f} GB: {str(error).splitlines()[0]}",
        do="use fewer clients, a smaller model, or a method without client state",
    )


def allocate_aligned(nbytes: int, allocate: Allocate) -> Tensor:
    """Allocate memory that starts at a multiple of `ALIGNMENT`."""
    block = allocate(nbytes + ALIGNMENT)
    shift = -block.data_ptr() % ALIGNMENT
    return block[shift : shift + nbytes]


def aligned_size(nbytes: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that is at least `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
