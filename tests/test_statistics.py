"""Statistics over seeds, against SciPy and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedkeel.records.statistics import (
    Stat,
    finite_or_none,
    is_tied,
    mean_of_last,
    paired_difference,
    pooled_error,
    sample_deviation,
)


def test_missing_values_are_left_out() -> None:
    assert Stat.of([None, 0.5]) == Stat(0.5, None, 1, 0.5, 0.5)
    assert Stat.of([None]) is None


def test_the_deviation_is_that_of_the_sample() -> None:
    values = [0.3, 0.1, 0.7, 0.2]
    assert sample_deviation(values) == pytest.approx(np.std(values, ddof=1), rel=1e-14)
    assert sample_deviation([1.0]) is None


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    first, second = [0.8, 0.7, 0.9, 0.75], [0.6, 0.65, 0.7, 0.8]
    difference = paired_difference(dict(enumerate(first)), dict(enumerate(second)))
    assert difference is not None
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert difference.interval is not None
    assert difference.interval.low == pytest.approx(interval.low, rel=1e-12)
    assert difference.interval.high == pytest.approx(interval.high, rel=1e-12)
    assert difference.ahead == 3
    assert not difference.interval.excludes_zero


def test_only_seeds_that_both_have_are_paired() -> None:
    difference = paired_difference({0: 1.0, 1: None, 2: 5.0}, {0: 0.5, 1: 1.0, 3: 2.0})
    assert difference is not None
    assert difference.stat == Stat(0.5, None, 1, 0.5, 0.5)
    assert difference.interval is None
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_the_pooled_error_is_that_of_two_samples() -> None:
    first, second = [0.1, 0.2, 0.4], [0.3, 0.9]
    one, two = Stat.of(first), Stat.of(second)
    assert one is not None
    assert two is not None
    t = stats.ttest_ind(first, second).statistic
    assert pooled_error(one, two) == pytest.approx(abs((one.mean - two.mean) / t), rel=1e-12)
    assert is_tied(one, one)
    assert not is_tied(one, Stat(9.0, 0.1, 3, 8.9, 9.1))


def test_small_helpers() -> None:
    assert mean_of_last([]) is None
    assert mean_of_last([1.0, 2.0, 6.0], 2) == 4.0
    assert finite_or_none(math.nan) is None
    assert finite_or_none(None) is None
    assert finite_or_none(2.0) == 2.0
