"""Counts in cells: which cells there are, that no small count is told, and quantiles of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel.flower.value_cells import (
    CELLS,
    LEAVES,
    edges,
    intervals,
    leaf_counts,
    merged,
    quantiles,
)

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def test_a_cell_is_at_most_a_sixteenth_as_wide_as_its_values_are_large() -> None:
    at = edges()
    assert len(at) == LEAVES + 1
    assert (at[0], at[-1]) == (-np.inf, np.inf)
    assert np.array_equal(at, -at[::-1])
    assert 0.0 in at
    inner = at[1:-1]
    low, high = inner[:-1], inner[1:]
    sizes = np.maximum(np.abs(low), np.abs(high))
    assert (high > low).all()
    is_wide = high - low > np.minimum(np.abs(low), np.abs(high)) / 16
    assert sizes[is_wide].max() <= 2.0**-31
    assert inner.max() > 4e9


def test_the_tree_has_the_whole_line_at_its_top() -> None:
    low, high = intervals()
    assert len(low) == len(high) == CELLS
    assert (low[-1], high[-1]) == (-np.inf, np.inf)
    assert (low[-3], high[-3], low[-2], high[-2]) == (-np.inf, 0.0, 0.0, np.inf)


values = st.lists(
    st.one_of(st.integers(-20, 120).map(float), st.floats(-1e12, 1e12)), min_size=1, max_size=300
)


@given(values=values, minimum=st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_quantiles_are_within_what_is_said_and_no_small_count_is_told(
    values: list[float], minimum: int
) -> None:
    """The bounds hold for numpy's own quantiles of the values, whatever was too few for a cell."""
    array = np.array(values)
    cells = merged(leaf_counts(array), minimum)
    assert cells.sum() == len(array)
    if len(array) >= minimum:
        assert not ((cells > 0) & (cells < minimum)).any()
    low, high = intervals()
    for place in np.flatnonzero(cells[:-1]):
        within = ((array >= low[place]) & (array < high[place])).sum()
        assert cells[place] <= within
    for found in quantiles(cells, SHARES):
        exact = np.quantile(array, found.share, method="inverted_cdf")
        assert found.low is None or found.low <= exact
        assert found.high is None or exact <= found.high
        if found.value is not None:
            assert found.low is not None
            assert found.high is not None
            assert found.low <= found.value <= found.high
            size = max(abs(found.low), abs(found.high))
            assert found.high - found.low <= max(0.25 * size, 1e-10)


def test_what_is_left_for_the_whole_line_is_no_small_count() -> None:
    """Neither an outlier, nor values that are missing and count as known."""
    ones = np.array([1.0] * 100 + [8.0] * 12)
    cells = merged(leaf_counts(ones), 10, also=3)
    assert cells[cells > 0].tolist() == [93, 12, 10]
    cells = merged(leaf_counts(np.append(ones, -50.0)), 10)
    assert (cells[cells > 0].tolist(), cells[-1]) == ([91, 12, 10], 10)
    cells = merged(leaf_counts(ones[-12:]), 10, also=3)  # too few would remain in the only cell
    assert (cells[cells > 0].tolist(), cells[-1]) == ([15], 15)


def test_few_values_take_no_full_cell_with_them() -> None:
    """Of 141 zeros, 4 ones and 143 twos all quartiles are told, and no value that is not known."""
    codes = np.repeat([0.0, 1.0, 2.0], [141, 4, 143])
    low, median, high = quantiles(merged(leaf_counts(codes), 10), (0.25, 0.5, 0.75))
    assert (low.value, low.low) == (0.0, 0.0)
    assert low.high == pytest.approx(0.0, abs=1e-10)
    assert (median.value, median.low, median.high) == (None, 0.0, 2.125)
    assert (high.low, high.high) == (2.0, 2.125)
    assert high.value == pytest.approx(2.0, abs=0.125)
    (lost,) = quantiles(merged(leaf_counts(codes[:20]), 30, also=10), (0.5,))
    assert (lost.value, lost.low, lost.high) == (None, None, None)


def test_quantiles_of_many_values_are_close() -> None:
    array = np.random.default_rng(0).lognormal(3.0, 1.0, 20_000)
    for found in quantiles(merged(leaf_counts(array), 10), SHARES):
        exact = np.quantile(array, found.share)
        assert found.low is not None
        assert found.high is not None
        assert found.high - found.low <= found.low / 8
        assert found.value == pytest.approx(exact, rel=0.01)


def test_nothing_has_no_quantiles() -> None:
    (found,) = quantiles(np.zeros(CELLS, dtype=np.int64), (0.5,))
    assert (found.value, found.low, found.high) == (None, None, None)
