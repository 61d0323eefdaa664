"""Named tensors with a leading axis, in memory that processes may share.

An engine allocates its buffers once, from the shapes of one rehearsed reply, and every round writes
into them: row i belongs to the i-th client of the cohort. So the server finds the updates stacked,
whoever wrote them and in whatever order.
"""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.spec import TensorSpec
from fedkeel.errors import RunError
from fedkeel.tree import State, unwalk, walk

ALIGN = 64
"""Bytes that every tensor starts at a multiple of, as torch's own allocator does: sums are added in
the same order wherever the tensor lies."""

Allocate = Callable[[int], Tensor]
"""Bytes wanted -> a tensor of that many bytes, type uint8."""

Raw = dict[str, NDArray[np.uint8]]
"""Rows as they lie in memory, by path: [n, bytes of a row]."""


def private(nbytes: int) -> Tensor:
    """Allocate memory of this process. Pages are taken from the system when first written."""
    return _mapped(nbytes, "MAP_PRIVATE")


def shared(nbytes: int) -> Tensor:
    """Allocate memory that forked processes share, without a file or a named segment.

    Pages are taken from the system when first written.
    """
    return _mapped(nbytes, "MAP_SHARED")


def segment(nbytes: int) -> Tensor:
    """Allocate memory that can be handed to spawned processes.

    Nothing is copied into it, as `Tensor.share_memory_` would; yet on Linux torch asks the system
    for all of it at once, and leaves a file in /dev/shm for good where that cannot be had.
    """
    with suppress(OSError):  # not on Linux
        room = shutil.disk_usage("/dev/shm")
        if room.total and room.free < nbytes:  # a total of 0 is one without a limit
            raise _no_room(nbytes, MemoryError(f"/dev/shm has {room.free / 1e9:.1f} GB"))
    try:
        storage = torch.UntypedStorage._new_shared(max(nbytes, 1))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise _no_room(nbytes, error) from None
    return torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes]


_RESERVE_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag that lets addresses be had for more memory than there is: rows that no client needs are
never written."""


def _mapped(nbytes: int, sharing: str) -> Tensor:
    if not hasattr(mmap, sharing):  # on Windows
        return torch.empty(nbytes, dtype=torch.uint8)
    flags = getattr(mmap, sharing) | mmap.MAP_ANONYMOUS | _RESERVE_NOTHING
    try:
        block = mmap.mmap(-1, max(nbytes, 1), flags=flags)
    except OSError as error:
        raise _no_room(nbytes, error) from None
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]


def _no_room(nbytes: int, error: Exception) -> RunError:
    return RunError(
        "The system gives no room for the clients' replies and states.",
        got=f"{nbytes / 1e9:.1f} GB: {str(error).splitlines()[0]}",
        do="use fewer clients, a smaller model, or a method without client state",
    )


def aligned(nbytes: int, allocate: Allocate) -> Tensor:
    """Allocate memory that starts at a multiple of `ALIGN`."""
    block = allocate(nbytes + ALIGN)
    shift = -block.data_ptr() % ALIGN
    return block[shift : shift + nbytes]


class Buffers:
    """Named tensors [rows, ...] in one allocation.

    Args:
        spec: shape and type of each, by path.
        rows: length of the leading axis; None for tensors without one.
        allocate: where the memory comes from.
    """

    def __init__(
        self, spec: Mapping[str, TensorSpec], rows: int | None, allocate: Allocate
    ) -> None:
        count = 1 if rows is None else rows
        starts, total = {}, 0
        for path, one in spec.items():
            starts[path] = total
            total += _padded(one.nbytes * count)
        block = aligned(total, allocate)
        self.nbytes = total
        self.tensors: dict[str, Tensor] = {}
        self._bytes: dict[str, Tensor] = {}
        for path, one in spec.items():
            start = starts[path]
            flat = block[start : start + one.nbytes * count]
            lead = () if rows is None else (rows,)
            self.tensors[path] = flat.view(one.dtype).view((*lead, *one.shape))
            self._bytes[path] = flat.view(count, one.nbytes)

    def write(self, state: Mapping[str, Tensor | State], rows: Sequence[int] | None = None) -> None:
        """Copy a state in: tensors [n, ...] into n rows or, without a leading axis, as a whole."""
        if rows is not None and len(rows) == 1:
            for path, tensor in walk(state):
                self.tensors[path][rows[0]].copy_(tensor[0])
        elif rows is not None:
            index = torch.tensor(rows)
            for path, tensor in walk(state):
                target = self.tensors[path]
                target.index_copy_(0, index.to(target.device), tensor.to(target))
        else:
            for path, tensor in walk(state):
                self.tensors[path].copy_(tensor)

    def nested(self, rows: int | None = None) -> State:
        """Return the first `rows` rows of every tensor, nested by path, as views."""
        flat = self.tensors if rows is None else {k: t[:rows] for k, t in self.tensors.items()}
        return unwalk(flat)

    def raw(self, rows: int = 1) -> Raw:
        """Return the first rows as bytes, as views; all of it where there is no leading axis."""
        return {path: t[:rows].numpy() for path, t in self._bytes.items()}

    def fill(self, raw: Raw, rows: Sequence[int] = (0,)) -> None:
        """Copy the bytes [n, ...] of n rows in."""
        index = list(rows)
        for path, found in raw.items():
            self._bytes[path].numpy()[index] = found

    def row(self, index: int) -> State:
        """Return one row of every tensor, nested by path, as views."""
        return unwalk({k: t[index] for k, t in self.tensors.items()})


class Layout:
    """Named tensors row by row: all tensors of a row, then all of the next.

    Every tensor starts at a multiple of `ALIGN`, in every row: a row is the same bits wherever it
    lies, and so is what is made of it.

    Args:
        spec: shape and type of each, by path.

    Attributes:
        starts: byte of a row at which each begins.
        nbytes: bytes of a row.
    """

    def __init__(self, spec: Mapping[str, TensorSpec]) -> None:
        self.spec = dict(spec)
        self.starts: dict[str, int] = {}
        self.nbytes = 0
        for path, one in self.spec.items():
            self.starts[path] = self.nbytes
            self.nbytes += _padded(one.nbytes)

    def rows(self, block: Tensor, count: int) -> dict[str, Tensor]:
        """Return the tensors [count, ...] of the rows in a block of bytes, as views."""
        table, out = block.view(count, self.nbytes), {}
        for path, one in self.spec.items():
            start = self.starts[path]
            column = table[:, start : start + one.nbytes].view(one.dtype)
            out[path] = column.view(count, *one.shape)
        return out


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
