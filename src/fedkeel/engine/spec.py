"""Shapes and types of named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.tree import State, walk


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one named tensor, without the leading axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def specs_of(state: Mapping[str, Tensor | State]) -> dict[str, TensorSpec]:
    """Return the spec of every tensor of a state, by path."""
    return {path: TensorSpec(tuple(t.shape), t.dtype) for path, t in walk(state)}
