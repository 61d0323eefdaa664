"""The lowest and the highest values of the training inputs, by which odd new ones are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeel.data.arrays_in_files import Pages
from fedkeel.data.read.scaling import spread

MOST = 100
"""Places of inputs without names that have a range each; of more, such as pixels, all have one."""

_ROWS = 1024  # examples handled at a time, so that no copy of a whole set is made

ValueRange = tuple[tuple[float, ...], tuple[float, ...]]
"""The lowest and the highest value at each of F places."""


def place_count(shape: Sequence[int], channels: int | None, is_table: bool) -> int:
    """Return F, how many ranges inputs of a shape have.

    They are one for each column of a table, for each number of an input of one axis, for each
    channel that was standardised by itself, and else one for all numbers.

    Args:
        shape: shape of one input.
        channels: length of the scale that they were standardised by, None without one.
        is_table: whether they are the columns of a table.

    >>> [place_count((12,), None, False), place_count((3, 8, 8), 3, False)]
    [12, 3]
    >>> [place_count((784,), None, False), place_count((1, 8, 8), 64, False)]
    [1, 1]
    """
    if len(shape) == 1:
        count = shape[0]
    else:
        count = channels if channels in (*shape[:1], *shape[-1:]) and channels else 1
    return count if is_table or count <= MOST else 1


def is_place_count(count: int, shape: Sequence[int]) -> bool:
    """Return whether inputs of a shape may have so many ranges."""
    return count == 1 or (count > 1 and count in (*shape[:1], *shape[-1:]))


def places(shape: Sequence[int], count: int) -> Tensor:
    """Return of each number of an input, [...] of its shape, at which of F places it is.

    Raises:
        ValueError: a scale of so many numbers does not fit the shape.
    """
    if count == 1:
        return torch.zeros(tuple(shape), dtype=torch.int64)
    return spread(torch.arange(count), shape).expand(tuple(shape))


def measure_range(x: Tensor, count: int) -> ValueRange:
    """Return the lowest and the highest value of inputs [N, ...] at each of F places."""
    low = x[0].clone()
    high = low.clone()
    pages, width = Pages(x.data_ptr(), x.nbytes if x.is_contiguous() else 0), x[0].nbytes
    for start in range(0, len(x), _ROWS):
        part = x[start : start + _ROWS]
        torch.minimum(low, part.amin(0), out=low)
        torch.maximum(high, part.amax(0), out=high)
        pages.release(start * width, (start + len(part)) * width)
    place = places(x.shape[1:], count).flatten()
    lows = low.new_full((count,), torch.inf).scatter_reduce(0, place, low.flatten(), "amin")
    highs = low.new_full((count,), -torch.inf).scatter_reduce(0, place, high.flatten(), "amax")
    return _digits(lows), _digits(highs)


def _digits(values: Tensor) -> tuple[float, ...]:
    """Return numbers with nine digits, which tell every float32."""
    return tuple(float(f"{value:.9g}") for value in values.tolist())
