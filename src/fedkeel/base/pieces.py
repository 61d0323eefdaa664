"""Comparisons of tensors piece by piece: what is made of a piece stays in the processor's cache.

Of the 129 million parameters of a VGG11 each whole temporary takes 500 MB, which the system has to
give and take back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 2**18
"""Entries of a piece."""


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape piece by piece, each piece as a vector; on a GPU in one piece."""
    size = max(tensors[0].numel(), 1) if tensors[0].is_cuda else PIECE
    yield from zip(*(torch.split(t.reshape(-1), size) for t in tensors), strict=True)


def largest_entry(t: Tensor) -> float:
    """Return the largest absolute entry, NaN where one is; 0 of an empty tensor."""
    if not t.numel():
        return 0.0
    return float(torch.stack([part.abs().max() for (part,) in pieces(t)]).max())


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference, NaN where one is; 0 of empty tensors."""
    if not first.numel():
        return 0.0
    differences = [(a - b).abs().max() for a, b in pieces(first, second)]
    return float(torch.stack(differences).max())


def are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same entries, those that are not a number among them."""
    pairs = pieces(first, second)
    return all(torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def are_close(first: Tensor, second: Tensor, relative: float, absolute: float) -> bool:
    """Return whether entries differ by at most `absolute` and a part `relative` of the second."""
    return all(
        torch.equal(a, b) or torch.allclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
        for a, b in pieces(first, second)
    )
