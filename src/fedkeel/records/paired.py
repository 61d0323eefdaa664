"""Paired differences over seeds: intervals, tests, their correction, and the seeds they need.

Runs with the same seed share the initial model, the cohorts and the batches, so methods are
compared seed by seed. Sources: Student's paired t-test; Schuirmann, J. Pharmacokinet. Biopharm. 15,
1987 (two one-sided tests); Efron, JASA 82, 1987 (BCa bootstrap); Holm, Scand. J. Stat. 6, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.records.statistics import SeedValues, Stat

CONFIDENCE = 0.95
"""Level of the intervals."""

LEVEL = 1 - CONFIDENCE
"""Probability of a false claim that is accepted, over all comparisons of a table together."""

POWER = 0.8
"""Probability of showing a difference of the measured size with the seeds that it needs."""

MOST_SEEDS = 1000
"""Seeds above which a difference counts as out of reach."""

RESAMPLES = 9999
"""Bootstrap resamples of an interval; their random numbers are the same each time."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a mean."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low * self.high > 0


@dataclass(frozen=True)
class PairedDifference:
    """Differences between two methods, seed by seed: first minus second.

    Args:
        values: one for each seed that both methods have; at least one.
        resolution: the step in which values can differ, 1 / n for a share of n examples. It is
            added to the spread, as steps hide a smaller one: seeds that agree exactly on few
            examples are no certainty.
    """

    values: tuple[float, ...]
    resolution: float = 0.0

    @property
    def stat(self) -> Stat:
        """Statistics of the differences."""
        stat = Stat.of(self.values)
        if stat is None:
            raise ValueError("a paired difference has at least one value")
        return stat

    @property
    def is_coarse(self) -> bool:
        """Whether the step may hide the spread over seeds: more examples have to tell."""
        return (self.stat.std or 0.0) < self.resolution

    @property
    def ahead(self) -> int:
        """Seeds on which the first is higher."""
        return sum(value > 0 for value in self.values)

    @property
    def interval(self) -> Interval | None:
        """The 95 % t-interval of the mean difference; None for one seed, which has no spread.

        >>> gain = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
        >>> round(gain.interval.low, 3), round(gain.interval.high, 3)
        (-0.484, 4.484)
        """
        error = self._error
        if error is None:
            return None
        from scipy.special import stdtrit  # slow to import, and rarely needed

        half = error * float(stdtrit(len(self.values) - 1, (1 + CONFIDENCE) / 2))
        return Interval(self.stat.mean - half, self.stat.mean + half)

    @property
    def bootstrap_interval(self) -> Interval | None:
        """The 95 % BCa bootstrap interval of the mean difference; None where all are equal.

        It assumes no normal distribution, and is too narrow for fewer than about ten seeds.
        """
        if len(set(self.values)) < 2:
            return None
        import numpy as np
        from scipy.stats import bootstrap

        interval = bootstrap(
            (np.array(self.values),),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="BCa",
            rng=np.random.default_rng(0),
        ).confidence_interval
        return Interval(float(interval.low), float(interval.high))

    @property
    def p_value(self) -> float | None:
        """The two-sided p-value of the paired t-test; None for one seed.

        >>> round(PairedDifference((1.0, 2.0, 3.0)).p_value, 4)
        0.0742
        """
        if self._error is None:
            return None
        return min(1.0, 2 * self._above(-abs(self.stat.mean)))

    def equivalence_p_value(self, margin: float) -> float | None:
        """Return the p-value of "the mean difference is not within ± `margin`"; None for one seed.

        The larger of two one-sided t-tests: below a level, the difference is smaller than the
        margin at that level.

        Args:
            margin: > 0, in the unit of the values.

        >>> round(PairedDifference((-0.1, 0.0, 0.1)).equivalence_p_value(0.5), 4)
        0.0065
        """
        if self._error is None:
            return None
        return self._above(abs(self.stat.mean) - margin)

    def seeds_needed(self, level: float = LEVEL) -> int | None:
        """Return how many seeds show a difference of this mean and spread, with a power of 0.8.

        Args:
            level: of the two-sided paired t-test; that of one comparison among several.

        Returns:
            The smallest number, at least 2; None for one seed, for a mean of 0, and above 1,000.
        """
        error, mean = self._error, abs(self.stat.mean)
        if error is None or mean == 0:
            return None
        if error == 0:
            return 2
        size = mean / (error * math.sqrt(len(self.values)))
        if _power(size, MOST_SEEDS, level) < POWER:
            return None
        low, high = 1, MOST_SEEDS  # the power grows with the seeds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _power(size, middle, level) >= POWER else (middle, high)
        return high

    @property
    def _error(self) -> float | None:
        """Standard error of the mean, None for one seed."""
        std = self.stat.std
        if std is None:
            return None
        return math.hypot(std, self.resolution) / math.sqrt(len(self.values))

    def _above(self, value: float) -> float:
        """Return the probability that a t-distributed mean difference is below `value`."""
        from scipy.special import stdtr

        error = self._error or 0.0
        if error == 0:
            return 0.0 if value < 0 else 1.0
        return float(stdtr(len(self.values) - 1, value / error))


def paired_difference(
    first: SeedValues, second: SeedValues, resolution: float = 0.0
) -> PairedDifference | None:
    """Return the difference over the seeds that have both numbers; None where no seed has."""
    pairs = [(value, second.get(seed)) for seed, value in first.items()]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    return PairedDifference(tuple(differences), resolution) if differences else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, by Holm's step-down procedure.

    All that are below a level may be claimed together: the probability of any false claim among
    them is at most that level.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def _power(size: float, seeds: int, level: float) -> float:
    """Return the power of a two-sided paired t-test for a mean of `size` deviations."""
    from scipy.special import nctdtr, stdtrit

    limit, shift = float(stdtrit(seeds - 1, 1 - level / 2)), size * math.sqrt(seeds)
    below = [float(nctdtr(seeds - 1, shift, bound)) for bound in (limit, -limit)]
    if math.isnan(below[0]):  # the mean is so far away that the series does not converge
        return 1.0
    return 1 - below[0] + (0.0 if math.isnan(below[1]) else below[1])
