"""Named tensors with a leading axis in one block of memory, which processes may share.

An engine allocates its buffers once, from the shapes of one rehearsed reply, and writes into them
in every round. Row i belongs to the i-th client of the cohort, so the server finds the updates
stacked, in whatever order and by whichever process they were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.process.shared_memory import Allocate, aligned_size, allocate_aligned
from fedkeel.engine.spec import TensorSpec
from fedkeel.tree import State, unwalk, walk

RowBytes = dict[str, NDArray[np.uint8]]
"""Bytes of n rows by path: [n, bytes of a row]."""


class TensorBuffers:
    """Named tensors [rows, ...] in one allocation.

    Args:
        spec: shape and type of each tensor, by path.
        rows: length of the leading axis; None for tensors without one.
        allocate: provides the memory.
    """

    def __init__(
        self, spec: Mapping[str, TensorSpec], rows: int | None, allocate: Allocate
    ) -> None:
        count = 1 if rows is None else rows
        leading = () if rows is None else (rows,)
        self.nbytes = sum(aligned_size(item.nbytes * count) for item in spec.values())
        self.tensors: dict[str, Tensor] = {}
        self._bytes: dict[str, Tensor] = {}
        block, start = allocate_aligned(self.nbytes, allocate), 0
        for path, item in spec.items():
            flat = block[start : start + item.nbytes * count]
            self.tensors[path] = flat.view(item.dtype).view((*leading, *item.shape))
            self._bytes[path] = flat.view(count, item.nbytes)
            start += aligned_size(item.nbytes * count)

    def write(self, state: Mapping[str, Tensor | State], rows: Sequence[int] | None = None) -> None:
        """Copy tensors [n, ...] into n rows; without `rows`, copy tensors without leading axis."""
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

    def state(self, rows: int | None = None) -> State:
        """Return the first `rows` rows of every tensor, nested by path, as views."""
        return unwalk(
            self.tensors if rows is None else {k: t[:rows] for k, t in self.tensors.items()}
        )

    def read_bytes(self, rows: int = 1) -> RowBytes:
        """Return the bytes of the first rows, as views; all bytes if there is no leading axis."""
        return {path: t[:rows].numpy() for path, t in self._bytes.items()}

    def write_bytes(self, row_bytes: RowBytes, rows: Sequence[int] = (0,)) -> None:
        """Copy the bytes [n, ...] of n rows in."""
        index = list(rows)
        for path, array in row_bytes.items():
            self._bytes[path].numpy()[index] = array
