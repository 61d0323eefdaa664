"""Ranks of methods over several experiments: Friedman's test and Nemenyi's critical difference.

Source: Demsar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006,
section 3.2, with Friedman's chi-square corrected for ties.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from fedkeel.errors import RunError
from fedkeel.records.paired import LEVEL


@dataclass(frozen=True)
class RankTest:
    """How methods rank over experiments.

    Args:
        methods: their names, the best mean rank first.
        ranks: mean rank of each: 1 is the best in every experiment; ties share their mean rank.
        experiments: number of experiments N.
        p_value: of Friedman's test that all methods are alike, by the chi-square distribution with
            k - 1 degrees of freedom; for few experiments it is approximate.
        critical_difference: mean ranks that differ by less are not told apart, by Nemenyi's test of
            all pairs at the level of 0.05: q sqrt(k (k + 1) / (6 N)).
    """

    methods: tuple[str, ...]
    ranks: tuple[float, ...]
    experiments: int
    p_value: float
    critical_difference: float

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Return the largest groups whose ranks lie within one critical difference.

        Each is (place of the first method, place of the last); those of one method are left out.
        """
        groups: list[tuple[int, int]] = []
        for first, rank in enumerate(self.ranks):
            last = max(i for i, r in enumerate(self.ranks) if r - rank < self.critical_difference)
            if last > first and all(last > end for _, end in groups):
                groups.append((first, last))
        return groups

    @property
    def separated(self) -> list[tuple[str, str]]:
        """Return the pairs (better, worse) whose ranks are a critical difference apart, or more.

        None where Friedman's test does not show that any differ.
        """
        if self.p_value >= LEVEL:
            return []
        pairs = combinations(zip(self.methods, self.ranks, strict=True), 2)
        limit = self.critical_difference
        return [(a, b) for (a, first), (b, second) in pairs if second - first >= limit]


def rank_test(scores: Sequence[Sequence[float]], methods: Sequence[str]) -> RankTest:
    """Rank methods over experiments.

    Args:
        scores: [N, k] one row for each experiment, one score for each method; higher is better.
        methods: [k] names.

    Raises:
        RunError: there are fewer than two experiments or two methods.

    >>> test = rank_test([[0.9, 0.8, 0.7], [0.9, 0.7, 0.8], [0.6, 0.5, 0.4]], ["a", "b", "c"])
    >>> test.methods, [round(rank, 2) for rank in test.ranks]
    (('a', 'b', 'c'), [1.0, 2.33, 2.67])
    """
    number, count = len(scores), len(methods)
    if number < 2 or count < 2:
        raise RunError(
            "There is nothing to rank.",
            got=f"{number} experiment(s) with {count} method(s) in common",
            expected="at least two experiments, and two methods that all of them have",
        )
    from scipy.special import chdtrc
    from scipy.stats import rankdata, studentized_range

    table = [rankdata([-score for score in row]).tolist() for row in scores]
    means = [statistics.fmean(column) for column in zip(*table, strict=True)]
    squares = math.fsum((mean - (count + 1) / 2) ** 2 for mean in means)
    ties = sum(n**3 - n for row in table for n in Counter(row).values())
    untied = 1 - ties / (number * (count**3 - count))
    chi_square = 12 * number / (count * (count + 1)) * squares / untied if untied > 0 else 0.0
    q = float(studentized_range.isf(LEVEL, count, math.inf)) / math.sqrt(2)
    order = sorted(range(count), key=lambda i: means[i])
    return RankTest(
        tuple(methods[i] for i in order),
        tuple(means[i] for i in order),
        number,
        float(chdtrc(count - 1, chi_square)),
        q * math.sqrt(count * (count + 1) / (6 * number)),
    )
