"""Named tensors with a leading axis, in memory that processes may share.

An engine allocates its buffers once, from the shapes of one rehearsed reply, and every round writes
into them: row i belongs to the i-th client of the cohort. So the server finds the updates stacked,
whoever wrote them and in whatever order.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.tree import State, unwalk, walk

ALIGN = 64
"""Bytes that every tensor starts at a multiple of, as torch's own allocator does: sums are added in
the same order wherever the tensor lies."""

Allocate = Callable[[int], Tensor]
"""Bytes wanted -> a tensor of that many bytes, type uint8."""


@dataclass(frozen=True)
class Spec:
    """Shape and type of one named tensor, without the leading axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * torch.empty(0, dtype=self.dtype).element_size()


def specs(state: Mapping[str, Tensor | State]) -> dict[str, Spec]:
    """Return the spec of every tensor of a state, by path."""
    return {path: Spec(tuple(t.shape), t.dtype) for path, t in walk(state)}


def private(nbytes: int) -> Tensor:
    """Allocate memory of this process. Pages are taken from the system when first written."""
    return torch.empty(nbytes, dtype=torch.uint8)


def shared(nbytes: int) -> Tensor:
    """Allocate memory that forked processes share, without a file or a named segment."""
    block = mmap.mmap(-1, max(nbytes, 1))
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]


def segment(nbytes: int) -> Tensor:
    """Allocate memory that can be handed to spawned processes."""
    block = torch.empty(nbytes, dtype=torch.uint8)
    block.share_memory_()  # type: ignore[no-untyped-call]
    return block


class Buffers:
    """Named tensors [rows, ...] in one allocation.

    Args:
        spec: shape and type of each, by path.
        rows: length of the leading axis; None for tensors without one.
        allocate: where the memory comes from.
    """

    def __init__(self, spec: Mapping[str, Spec], rows: int | None, allocate: Allocate) -> None:
        count = 1 if rows is None else rows
        starts, total = {}, 0
        for path, one in spec.items():
            starts[path] = total
            total += -(-one.nbytes * count // ALIGN) * ALIGN
        block = allocate(total + ALIGN)
        shift = -block.data_ptr() % ALIGN
        self.nbytes = total
        self.tensors: dict[str, Tensor] = {}
        for path, one in spec.items():
            start = shift + starts[path]
            flat = block[start : start + one.nbytes * count].view(one.dtype)
            lead = () if rows is None else (rows,)
            self.tensors[path] = flat.view(*lead, *one.shape)

    def write(self, state: Mapping[str, Tensor | State], row: int | None = None) -> None:
        """Copy a state in, into one row or, without a leading axis, as a whole."""
        for path, tensor in walk(state):
            target = self.tensors[path] if row is None else self.tensors[path][row]
            target.copy_(tensor)

    def nested(self, rows: int | None = None) -> State:
        """Return the first `rows` rows of every tensor, nested by path, as views."""
        flat = self.tensors if rows is None else {k: t[:rows] for k, t in self.tensors.items()}
        return unwalk(flat)

    def row(self, index: int) -> State:
        """Return one row of every tensor, nested by path, as views."""
        return unwalk({k: t[index] for k, t in self.tensors.items()})
