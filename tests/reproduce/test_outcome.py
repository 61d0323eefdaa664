"""Differences, intervals and signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedkeel.reproduce.formatting import HEADS, cells
from fedkeel.reproduce.outcome import Interval, Line, Values, _gains, _paired, _same, _signed
from fedkeel.reproduce.table import Column, Metric, Published, Row


def published(value: float | str) -> Published:
    return Published(value=value)


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    random = np.random.default_rng(1)
    one, two = random.normal(size=6) + 1, random.normal(size=6)
    found = Interval.of(list(one - two))
    assert found is not None
    low, high = stats.ttest_rel(one, two).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.mean == pytest.approx((one - two).mean())
    assert found.clear == (low * high > 0)


def test_one_seed_has_no_interval() -> None:
    assert Interval.of([]) is None
    found = Interval.of([2.0])
    assert found == Interval(2.0, None, None, 1)
    assert not found.clear


def test_what_was_never_reached_is_infinitely_far() -> None:
    assert _gains(published(30.0), published("never")) == -math.inf
    assert _gains(published("never"), published("never")) is None
    assert _gains(published("failed"), published(3.0)) is None
    assert _gains(None, published(3.0)) is None
    assert _signed({0: 5, 1: 6}, {0: None, 1: 9}, reaches=True) == -math.inf
    assert _signed({0: None}, {0: None}, reaches=True) is None
    assert _signed({0: 4.0}, {1: 5.0}, reaches=True) is None
    assert _signed({0: 4.0, 1: 9.0}, {0: 5.0}, reaches=True) == -1.0


def test_a_percentage_that_is_not_there_counts_for_nothing() -> None:
    assert _signed({0: None}, {0: 50.0}, reaches=False) is None
    assert _signed({0: None, 1: 52.0}, {0: 50.0, 1: 51.0}, reaches=False) == 1.0


def test_signs() -> None:
    assert _same(1.0, 0.1) is True
    assert _same(-math.inf, -2.0) is True
    assert _same(1.0, -0.1) is False
    assert _same(0.0, 1.0) is None
    assert _same(None, 1.0) is None


ALL: Values = {0: 60.0, 1: 61.0, 2: 60.5}
BELOW: Values = {0: 50.0, 1: 51.5, 2: 50.2}


def of_three(metric: Metric, own: Values, other: Values) -> Line:
    """A line of which three seeds were asked for."""
    return Line(
        row=Row(name="A", method="a", published={"c": 55.0}),
        column=Column(id="c", name="c"),
        metric=metric,
        published=published(55.0),
        published_gain=5.0,
        values=own,
        best=own,
        last=own,
        last_ten=own,
        baseline="B",
        gain=_paired(own, other),
        same_sign=_same(5.0, _signed(own, other, metric.reaches)),
        records=(),
        wanted=3,
        absent=(),
        expression="a",
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({0: None, 1: None, 2: None}, "never"),
        ({0: None}, "never (1/3)"),
        ({0: 40.0, 1: None, 2: None}, "40 (1/3)"),
        ({0: 40.0}, "40 (1/3)"),
        ({0: 40.0, 1: 40.0, 2: 40.0}, "40 ± 0"),
    ],
)
def test_a_target_is_never_reached_by_the_seeds_that_were_run(values: Values, told: str) -> None:
    line = of_three(Metric(kind="rounds_to", target=0.5), values, {})
    assert cells(line)[HEADS.index("measured")] == told


@pytest.mark.parametrize(
    ("own", "other", "told"),
    [
        (ALL, BELOW, "yes"),
        ({0: 60.0, 1: 61.0}, BELOW, "yes, open"),
        (ALL, {0: 50.0, 1: 51.5}, "yes, open"),
        ({0: 60.0, 1: 61.0}, {0: 50.0, 1: 51.5}, "yes, open"),
    ],
)
def test_a_sign_is_open_where_seeds_of_either_are_lost(
    own: Values, other: Values, told: str
) -> None:
    line = of_three(Metric(), own, other)
    assert line.gain is not None
    assert line.gain.clear
    assert cells(line)[HEADS.index("same sign")] == told
