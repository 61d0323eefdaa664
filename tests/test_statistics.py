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
