"""The cells in which sites count values: the same everywhere, so that counts of sites add up.

They are those of a floating-point number of 11 bits: 16 cells for each doubling of a value, so a
cell is at most a sixteenth as wide as its values are large. Nobody chooses them, so no two answers
of a site have a difference that would tell of a few examples.

A site sends no small count. Values that are too few for their cell count in a wider one: pairs of
cells are joined, and pairs of these, until there are enough such values in one. Where even the
whole line has too few, it gets as many from the fullest cell as it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CellCounts = NDArray[np.int64]

LEAVES = 2**11
"""Cells that have no cell within them."""

CELLS = 2 * LEAVES - 1
"""All cells of the tree: the leaves in order, then pairs of them, and so on to the whole line."""

STEPS = 16
"""Cells of each doubling."""

SMALLEST = -31
"""Values smaller than 2 to this power are in cells of equal width."""

NARROWEST = 2.0**SMALLEST / STEPS
"""That width. The cells beside 0 are as wide."""

CLOSE = 0.25
"""How far apart the bounds of a quantile are at most that has a value, of the larger of them."""


@cache
def edges() -> Floats:
    """Return the [LEAVES + 1] edges of the leaves, ascending, infinite at both ends."""
    blocks = LEAVES // 2 // STEPS
    within = np.arange(STEPS) / STEPS
    doublings = [2.0 ** (SMALLEST + block) * (1.0 + within) for block in range(blocks - 1)]
    positive = np.concatenate([2.0**SMALLEST * within, *doublings, [math.inf]])
    return np.concatenate([-positive[:0:-1], positive])


@cache
def intervals() -> tuple[Floats, Floats]:
    """Return the lower and the upper edge of each cell, [CELLS] each."""
    low, high = edges()[:-1], edges()[1:]
    lows, highs = [low], [high]
    while len(low) > 1:
        low, high = low[::2], high[1::2]
        lows.append(low)
        highs.append(high)
    return np.concatenate(lows), np.concatenate(highs)


def leaf_counts(values: Floats) -> CellCounts:
    """Return [LEAVES] how many values each leaf has, of those from its lower edge on."""
    places = np.searchsorted(edges(), values, side="right") - 1
    counts: CellCounts = np.bincount(places, minlength=LEAVES)
    return counts


def merged(leaves: CellCounts, minimum: int, also: int = 0) -> CellCounts:
    """Return [CELLS] counts of which none is smaller than a minimum, but for 0.

    Each value counts in a cell that it lies in, and what is left in the last one, the whole line.
    What that lacks is taken from the fullest other cell, or all of it, where too few would remain.

    Args:
        leaves: [LEAVES] how many values each leaf has.
        minimum: smallest count that is told; of fewer values in all, they are told as they are.
        also: values that may be anywhere on the line.

    >>> cells = merged(leaf_counts(np.array([1.0, 1.01, 1.02, 1.1, 1.2, 1.3])), 3)
    >>> low, high = intervals()
    >>> [(float(low[i]), float(high[i]), int(cells[i])) for i in np.flatnonzero(cells)]
    [(1.0, 1.0625, 3), (1.0, 1.5, 3)]
    >>> cells = merged(leaf_counts(np.ones(20)), 3, also=1)
    >>> cells[cells > 0].tolist()
    [18, 3]
    """
    levels, rest = [], leaves
    while len(rest) > 1:
        shown = np.where(rest >= minimum, rest, 0)
        levels.append(shown)
        rest = (rest - shown).reshape(-1, 2).sum(axis=1)
    cells = np.concatenate([*levels, rest + also])
    fullest, lacks = int(cells[:-1].argmax()), minimum - int(cells[-1])
    if 0 < lacks < minimum:
        has = int(cells[fullest])
        moved = lacks if has - lacks >= minimum else has
        cells[[fullest, -1]] += [-moved, moved]
    return cells


def within_minimum(shown: CellCounts, rest: CellCounts, minimum: int) -> None:
    """Move counts from the smallest shown ones to the rest [1] until that is no small count.

    >>> shown, rest = np.array([12, 90, 11]), np.array([3])
    >>> within_minimum(shown, rest, 10)
    >>> shown.tolist(), rest.tolist()
    ([12, 90, 0], [14])
    """
    while 0 < rest[0] < minimum and shown.any():
        place = int(np.where(shown > 0, shown, shown.max() + 1).argmin())
        rest += shown[place]
        shown[place] = 0


@dataclass(frozen=True)
class Quantile:
    """The smallest value that at least a share of all values are not above.

    Args:
        share: of the values, in (0, 1).
        value: an estimate; None where its bounds are further apart than `CLOSE` times the larger.
        low: the value is at least this; None where nothing bounds it.
        high: it is at most this, likewise.
    """

    share: float
    value: float | None
    low: float | None
    high: float | None


def quantiles(cells: CellCounts, shares: Sequence[float]) -> tuple[Quantile, ...]:
    """Return quantiles of values that were counted in cells [CELLS].

    The k-th smallest value lies between the k-th smallest of the lower and of the upper edges of
    the values' cells. Within that, where it is narrow, values are taken to lie evenly in their
    cells, and to be 0 in the two beside it.

    >>> cells = merged(leaf_counts(np.repeat([0.0, 1.0, 2.0], [141, 4, 143])), 10)
    >>> from dataclasses import astuple
    >>> for found in quantiles(cells, (0.01, 0.25, 0.5, 0.75)):
    ...     print(*(end if end is None else round(end, 3) for end in astuple(found)))
    0.01 None None 0.0
    0.25 0.0 0.0 0.0
    0.5 None 0.0 2.125
    0.75 2.062 2.0 2.125
    """
    places = np.flatnonzero(cells > 0)
    if not len(places):
        return tuple(Quantile(share, None, None, None) for share in shares)
    lows, highs = (ends[places] for ends in intervals())
    counts = cells[places]
    total = int(counts.sum())
    has_ends = np.isfinite(lows) & np.isfinite(highs)
    evenly = _Evenly.of(lows[has_ends], highs[has_ends], counts[has_ends])
    found = []
    for share in shares:
        rank = max(math.ceil(round(share * total, 9)), 1)
        low, high = _ranked(lows, counts, rank), _ranked(highs, counts, rank)
        ends = (end if math.isfinite(end) else None for end in (low, high))
        value = None
        if evenly is not None and _are_close(low, high):
            is_zero = low <= 0.0 <= high
            value = 0.0 if is_zero else float(np.clip(evenly.value(share), low, high))
        found.append(Quantile(share, value, *ends))
    return tuple(found)


def _are_close(low: float, high: float) -> bool:
    """Return whether bounds are so close that a value between them is worth saying."""
    width = high - low
    return width <= NARROWEST or (math.isfinite(width) and width <= CLOSE * max(-low, high))


def _ranked(ends: Floats, counts: CellCounts, rank: int) -> float:
    """Return the end of the cell of the value of a rank, where values are ordered by ends."""
    order = np.argsort(ends, kind="stable")
    place = int(np.searchsorted(np.cumsum(counts[order]), rank))
    return float(ends[order][place])


@dataclass(frozen=True)
class _Evenly:
    """The distribution of values that lie evenly in their cells.

    Args:
        at: edges, ascending.
        below: how many values are below each.
    """

    at: Floats
    below: Floats

    @classmethod
    def of(cls, lows: Floats, highs: Floats, counts: CellCounts) -> _Evenly | None:
        """Return that of cells with two ends, None where there are none."""
        if not len(lows):
            return None
        at = np.unique(np.concatenate([lows, highs]))
        below = np.zeros(len(at))
        for low, high, count in zip(lows, highs, counts, strict=True):
            below += count * np.clip((at - low) / (high - low), 0.0, 1.0)
        return cls(at, below)

    def value(self, share: float) -> float:
        """Return a quantile."""
        return float(np.interp(share * self.below[-1], self.below, self.at))
