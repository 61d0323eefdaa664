"""How the tensors of a row lie in a block of bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeel.engine.process.shared_memory import aligned_size
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.record import RowCodec

HEADER = "header"
"""Path of a row's header in a layout. Paths of other tensors contain a part's name and a slash."""


class RowLayout:
    """Named tensors row by row: all tensors of one row, then all of the next row.

    In every row each tensor starts at a multiple of `ALIGNMENT`. So what is computed from a row has
    the same bits wherever the row lies.

    Args:
        spec: shape and type of each tensor, by path.

    Attributes:
        starts: byte of a row at which each tensor begins.
        nbytes: bytes of a row.
    """

    def __init__(self, spec: Mapping[str, TensorSpec]) -> None:
        self.spec = dict(spec)
        self.starts: dict[str, int] = {}
        self.nbytes = 0
        for path, item in self.spec.items():
            self.starts[path] = self.nbytes
            self.nbytes += aligned_size(item.nbytes)

    def rows(self, block: Tensor, count: int) -> dict[str, Tensor]:
        """Return the tensors [count, ...] of the rows in a block of bytes, as views."""
        table, tensors = block.view(count, self.nbytes), {}
        for path, item in self.spec.items():
            start = self.starts[path]
            column = table[:, start : start + item.nbytes].view(item.dtype)
            tensors[path] = column.view(count, *item.shape)
        return tensors


def row_layout(spec: Mapping[str, TensorSpec], codec: RowCodec | None = None) -> RowLayout:
    """Return the layout of a client's row: the codec's header, then the tensors."""
    if codec is None:
        return RowLayout(spec)
    return RowLayout({HEADER: TensorSpec((len(codec.paths),), torch.int64), **spec})
