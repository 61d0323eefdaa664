"""Differences, intervals and signs."""

from __future__ import annotations

import math

import pytest

from fedkeel.records.paired import paired_difference
from fedkeel.records.statistics import SeedValues
from fedkeel.reproduce.blocks import HEADS, line_cells
from fedkeel.reproduce.outcome import TableLine, _has_same_sign, _measured_gain, _published_gain
from fedkeel.reproduce.table import CellMetric, PaperColumn, Published, Row


def published(value: float | str) -> Published:
    return Published(value=value)


def test_what_was_never_reached_is_infinitely_far() -> None:
    assert _published_gain(published(30.0), published("never")) == -math.inf
    assert _published_gain(published("never"), published("never")) is None
    assert _published_gain(published("failed"), published(3.0)) is None
    assert _published_gain(None, published(3.0)) is None
    assert _measured_gain({0: 5, 1: 6}, {0: None, 1: 9}, counts_until_target=True) == -math.inf
    assert _measured_gain({0: None}, {0: None}, counts_until_target=True) is None
    assert _measured_gain({0: 4.0}, {1: 5.0}, counts_until_target=True) is None
    assert _measured_gain({0: 4.0, 1: 9.0}, {0: 5.0}, counts_until_target=True) == -1.0


def test_a_percentage_that_is_not_there_counts_for_nothing() -> None:
    assert _measured_gain({0: None}, {0: 50.0}, counts_until_target=False) is None
    assert _measured_gain({0: None, 1: 52.0}, {0: 50.0, 1: 51.0}, counts_until_target=False) == 1.0


def test_signs() -> None:
    assert _has_same_sign(1.0, 0.1) is True
    assert _has_same_sign(-math.inf, -2.0) is True
    assert _has_same_sign(1.0, -0.1) is False
    assert _has_same_sign(0.0, 1.0) is None
    assert _has_same_sign(None, 1.0) is None


ALL: SeedValues = {0: 60.0, 1: 61.0, 2: 60.5}
BELOW: SeedValues = {0: 50.0, 1: 51.5, 2: 50.2}


def of_three(metric: CellMetric, own: SeedValues, other: SeedValues) -> TableLine:
    """A line of which three seeds were asked for."""
    return TableLine(
        row=Row(name="A", method="a", published={"c": 55.0}),
        column=PaperColumn(id="c", name="c"),
        metric=metric,
        published=published(55.0),
        published_gain=5.0,
        values=own,
        best=own,
        last=own,
        last_ten=own,
        baseline="B",
        gain=paired_difference(own, other),
        has_same_sign=_has_same_sign(5.0, _measured_gain(own, other, metric.counts_until_target)),
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
def test_a_target_is_never_reached_by_the_seeds_that_were_run(
    values: SeedValues, told: str
) -> None:
    line = of_three(CellMetric(kind="rounds_to", target=0.5), values, {})
    assert line_cells(line)[HEADS.index("measured")] == told


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
    own: SeedValues, other: SeedValues, told: str
) -> None:
    line = of_three(CellMetric(), own, other)
    assert line.gain is not None
    assert line.gain.interval is not None
    assert line.gain.interval.excludes_zero
    assert line_cells(line)[HEADS.index("same sign")] == told
