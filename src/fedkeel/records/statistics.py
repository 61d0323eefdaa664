"""Statistics over seeds: means with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LAST = 10
"""Evaluations in the mean that judges a run at its end."""

_ROUNDING = 1e-12

SeedValues = Mapping[int, float | None]
"""A number for each seed; None where the run of a seed has no such number."""


@dataclass(frozen=True)
class Stat:
    """Mean and spread of a number over seeds.

    Args:
        mean: mean over the seeds that have the number.
        std: sample standard deviation (ddof 1); None for one seed.
        count: seeds that have the number.
        min: smallest value.
        max: largest value.
    """

    mean: float
    std: float | None
    count: int
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat | None:
        """Return the statistics of `values` without None; None where no value is left.

        >>> Stat.of([1.0, None, 3.0])
        Stat(mean=2.0, std=1.4142135623730951, count=2, min=1.0, max=3.0)
        """
        known = [value for value in values if value is not None]
        if not known:
            return None
        mean = statistics.fmean(known)
        return cls(mean, sample_deviation(known), len(known), min(known), max(known))


def pooled_error(first: Stat, second: Stat) -> float | None:
    """Return the pooled standard error of the difference of two means.

    None where both have one seed, which says nothing about spread.
    """
    freedom = first.count + second.count - 2
    if freedom < 1:
        return None
    squares = sum((stat.count - 1) * (stat.std or 0.0) ** 2 for stat in (first, second))
    return math.sqrt(squares / freedom * (1 / first.count + 1 / second.count))


def is_tied(first: Stat, second: Stat) -> bool:
    """Return whether two means are within one pooled standard error."""
    error = pooled_error(first, second) or 0.0
    return abs(first.mean - second.mean) <= error + _ROUNDING * max(1.0, abs(first.mean))


def sample_deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (ddof 1), or None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def mean_of_last(values: Sequence[float], count: int = LAST) -> float | None:
    """Return the mean of the last `count` values, or None where there is none.

    >>> mean_of_last([0.0, 1.0, 3.0], 2)
    2.0
    """
    return statistics.fmean(values[-count:]) if values else None


def finite_or_none(value: float | None) -> float | None:
    """Return the number, or None where it is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None
