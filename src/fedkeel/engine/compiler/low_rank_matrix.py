"""A matrix as the product of two factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """A matrix left @ right, or a matrix of each of n clients.

    Args:
        left: [a, r] or [n, a, r].
        right: [r, b] or [n, r, b].
    """

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [a, b] or [n, a, b]."""
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrix."""
        return self.left.dtype

    @property
    def rank(self) -> int:
        """The inner dimension r."""
        return self.left.shape[-1]

    def dense(self) -> Tensor:
        """Return the matrix itself."""
        return torch.matmul(self.left, self.right)

    def to(self, device: torch.device) -> LowRank:
        """Return it on a device."""
        return self.map(lambda factor: factor.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> LowRank:
        """Return it with both factors changed."""
        return LowRank(change(self.left), change(self.right))


Matrix = Tensor | LowRank
"""A tensor, or a matrix as factors."""


class HasDense(Protocol):
    """A tensor in another form."""

    def dense(self) -> Tensor:
        """Return the tensor itself."""


def dense(value: Tensor | HasDense) -> Tensor:
    """Return a value as a tensor."""
    return value if isinstance(value, Tensor) else value.dense()


def saves_work(rank: int, a: int, b: int) -> bool:
    """Return whether the factors of two rounds are less work than the matrix [a, b]."""
    return 4 * rank * (a + b) <= a * b
