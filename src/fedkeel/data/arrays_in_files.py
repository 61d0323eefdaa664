"""Arrays that stay in their files, so that they may be larger than memory."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NO_RESERVE = 0x4000
"""The flag MAP_NORESERVE of Linux, which `mmap` of Python 3.11 does not name."""

BLOCK = 1 << 26
"""Bytes of large arrays that are read at a time."""

_DONT_NEED = 4
"""The advice MADV_DONTNEED of Linux."""

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")
"""How a map of memory begins in ``/proc/self/smaps``; lines about it follow."""


def private_map(values: NDArray[Any]) -> NDArray[Any] | None:
    """Return an array in a file that can be written to without changing the file.

    What a model writes into its inputs would otherwise end the process, or reach the user's file.

    Args:
        values: a `numpy.memmap`, or a view of a part of one.

    Returns:
        The same numbers in the same file; None where the array is not in a file.
    """
    file, name = getattr(values, "_mmap", None), getattr(values, "filename", None)
    if file is None or name is None:
        return None
    offset = getattr(values, "offset", 0)
    offset -= offset % mmap.ALLOCATIONGRANULARITY
    with open(name, "rb") as stream:
        if sys.platform == "linux":  # no memory is reserved, of which there may be too little
            flags, prot = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            private = mmap.mmap(stream.fileno(), len(file), flags, prot, offset=offset)
        else:
            private = mmap.mmap(stream.fileno(), len(file), access=mmap.ACCESS_COPY, offset=offset)
    start = values.ctypes.data - np.frombuffer(file, dtype=np.uint8).ctypes.data
    return np.ndarray(values.shape, values.dtype, private, start, values.strides)


def joined_in_file(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other in a temporary file, which takes no memory.

    The file is deleted with the tensor, or where the system does not allow that, when the process
    ends.

    Args:
        parts: at least one, of one type and of one shape but for the first axis.
    """
    length = sum(len(part) for part in parts)
    with tempfile.TemporaryFile(prefix="fedkeel-") as file:
        out = np.memmap(
            file, parts[0].numpy().dtype, mode="w+", shape=(length, *parts[0].shape[1:])
        )
        tensor = torch.from_numpy(out)
        rest = tensor
        for part in parts:
            rest[: len(part)].copy_(part)
            rest = rest[len(part) :]
    return tensor


class Pages:
    """Gives the pages of an array in a file back to the system, once they have been read.

    A process that reads a large file through a map otherwise looks as large as the file. Pages of
    other arrays stay, and so do those of a map into which somebody has written.

    Args:
        start: address of the array.
        size: its bytes, which follow one another.
    """

    def __init__(self, start: int, size: int) -> None:
        self._start, self._size = start, size
        self._may_release = size >= BLOCK and _is_unchanged_file(start, size)

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie within the bytes from `start` to `stop` of the array."""
        if not self._may_release:
            return
        page = mmap.PAGESIZE
        first = -(-(self._start + start) // page) * page
        length = (self._start + min(stop, self._size)) // page * page - first
        if length > 0:
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONT_NEED)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _is_unchanged_file(start: int, size: int) -> bool:
    """Return whether memory is a private map of a file, none of whose pages has been changed.

    Only Linux tells; on other systems the answer is False.
    """
    try:
        lines = Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    inside = False
    for line in lines:
        if _MAPPING.match(line):
            span, flags, _, _, inode, *_ = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            inside = low <= start and start + size <= high and flags[3] == "p" and inode != "0"
        elif inside and line.startswith("Anonymous:"):
            return line.split()[1] == "0"
    return False


def bytes_or_digest(array: NDArray[Any]) -> memoryview | bytes:
    """Return the bytes of an array, or a digest of them where they are more than `BLOCK`.

    The digest is the SHA-256 of the SHA-256 of each block of `BLOCK` bytes; threads read them.
    """
    plain = np.ascontiguousarray(array)
    if plain.nbytes <= BLOCK:
        return plain.data
    values = plain.reshape(-1).view(np.uint8)
    pages = Pages(values.ctypes.data, values.nbytes)

    def digest(start: int) -> bytes:
        of_block = hashlib.sha256(values[start : start + BLOCK].data).digest()
        pages.release(start, start + BLOCK)
        return of_block

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(digest, range(0, len(values), BLOCK)))).digest()
