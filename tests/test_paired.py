"""Paired differences: against SciPy, stored values of public packages, and by hand."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedkeel.errors import RunError
from fedkeel.records.paired import PairedDifference, _power, holm, paired_difference
from fedkeel.records.ranks import rank_test
from fedkeel.records.statistics import Stat

ORACLE = json.loads((Path(__file__).parent / "oracles" / "significance.json").read_text())


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
    assert difference.p_value is None
    assert difference.equivalence_p_value(1.0) is None
    assert difference.seeds_needed() is None
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_the_p_values_are_those_of_public_packages() -> None:
    pair = ORACLE["paired"]
    difference = paired_difference(*(dict(enumerate(pair[n])) for n in ("first", "second")))
    assert difference is not None
    assert difference.p_value == pytest.approx(pair["p"], rel=1e-10)
    for margin, p_value in pair["tost"]:
        assert difference.equivalence_p_value(margin) == pytest.approx(p_value, rel=1e-10)


def test_holms_correction_is_that_of_statsmodels() -> None:
    assert holm(ORACLE["holm"]["p"]) == pytest.approx(ORACLE["holm"]["corrected"], rel=1e-12)
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_equal_differences_have_no_spread() -> None:
    """A method that gains as much on every seed needs no more seeds; one that gains 0 no claim."""
    same = PairedDifference((0.25, 0.25, 0.25))
    assert same.p_value == 0.0
    assert same.seeds_needed() == 2
    assert same.equivalence_p_value(0.5) == 0.0
    assert same.equivalence_p_value(0.2) == 1.0
    assert same.bootstrap_interval is None
    assert PairedDifference((0.0, 0.0)).p_value == 1.0
    assert PairedDifference((0.0, 0.0)).seeds_needed() is None
    assert PairedDifference((0.0, 0.0)).equivalence_p_value(0.5) == 0.0


def test_the_step_of_a_coarse_score_counts_as_spread() -> None:
    """With a spread of its own, the squares are added; without, the step is all of it."""
    equal = PairedDifference((0.14,) * 3, resolution=0.02)
    same = PairedDifference((0.12, 0.14, 0.16))  # deviation 0.02
    assert equal.p_value == pytest.approx(same.p_value)
    assert equal.interval is not None
    assert same.interval is not None
    assert equal.interval.low == pytest.approx(same.interval.low)
    assert equal.seeds_needed() == same.seeds_needed()
    assert equal.equivalence_p_value(0.2) == pytest.approx(same.equivalence_p_value(0.2))
    both = PairedDifference((0.11, 0.14, 0.17), resolution=0.04)
    wide = PairedDifference((0.09, 0.14, 0.19))  # 0.05^2 = 0.03^2 + 0.04^2
    assert both.p_value == pytest.approx(wide.p_value)


@pytest.mark.parametrize(("size", "level", "seeds", "power"), ORACLE["seeds"])
def test_the_seeds_needed_are_those_of_a_power_analysis(
    size: float, level: float, seeds: float, power: float
) -> None:
    assert _power(size, 12, level) == pytest.approx(power, rel=1e-8)
    shifted = PairedDifference((size - 1, size, size + 1))  # deviation 1
    needed = shifted.seeds_needed(level)
    assert needed == (math.ceil(seeds) if seeds <= 1000 else None)


def test_a_large_difference_needs_two_seeds_and_a_tiny_one_too_many() -> None:
    assert PairedDifference((99.0, 100.0, 101.0)).seeds_needed() == 2
    assert PairedDifference((-1.0, 0.01, 1.0)).seeds_needed() is None


def test_the_bootstrap_interval_is_that_of_all_resamples() -> None:
    """BCa restated, with all 4^4 resamples in place of random ones."""
    values = np.array([0.1, 0.2, 0.25, 0.9])
    means = np.sort([np.mean(sample) for sample in product(values, repeat=4)])
    mean = values.mean()
    share = (np.mean(means < mean) + np.mean(means <= mean)) / 2
    left_out = np.array([np.delete(values, i).mean() for i in range(4)])
    away = left_out.mean() - left_out
    skew = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    z0, z = stats.norm.ppf(share), stats.norm.ppf([0.025, 0.975])
    shares = stats.norm.cdf(z0 + (z0 + z) / (1 - skew * (z0 + z)))
    interval = PairedDifference(tuple(values)).bootstrap_interval
    assert interval is not None
    expected = np.quantile(means, shares, method="inverted_cdf")
    assert [interval.low, interval.high] == pytest.approx(expected, abs=0.02)
    assert PairedDifference(tuple(values)).bootstrap_interval == interval


def test_the_test_keeps_its_level() -> None:
    """Of comparisons without a difference, at most 5 % of tables make any claim."""
    rng = np.random.default_rng(1)
    false, claimed = 0, 0
    for _ in range(400):
        table = rng.standard_normal((5, 4))
        p_values = [PairedDifference(tuple(column)).p_value or 0.0 for column in table]
        false += any(p < 0.05 for p in holm(p_values))
        claimed += any(p < 0.05 for p in p_values)
    assert false / 400 < 0.08
    assert claimed / 400 > 0.15  # without the correction it would not


def test_friedman_and_nemenyi_are_those_of_public_packages() -> None:
    oracle = ORACLE["ranks"]
    names = "abcde"
    test = rank_test(oracle["scores"], list(names))
    assert dict(zip(test.methods, test.ranks, strict=True)) == pytest.approx(oracle["mean_ranks"])
    assert list(test.ranks) == sorted(test.ranks)
    assert test.p_value == pytest.approx(oracle["friedman_p"], rel=1e-10)
    assert test.critical_difference == pytest.approx(oracle["critical_difference"], rel=1e-4)
    apart = {(names[i], names[j]) for i in range(5) for j in range(5) if i != j}
    apart = {(a, b) for a, b in apart if oracle["nemenyi_p"][names.index(a)][names.index(b)] < 0.05}
    assert apart
    assert {*test.separated, *((b, a) for a, b in test.separated)} == apart


def test_groups_are_the_longest_within_the_critical_difference() -> None:
    scores = [[0.9, 0.8, 0.3, 0.2], *[[0.8, 0.9, 0.3, 0.2], [0.9, 0.8, 0.2, 0.3]] * 4]
    test = rank_test(scores, ["a", "b", "c", "d"])
    assert test.methods == ("a", "b", "c", "d")
    assert [round(rank, 3) for rank in test.ranks] == [1.444, 1.556, 3.444, 3.556]
    # q(0.05, 4) = 2.569 in Demsar's Table 5; 2.569 sqrt(4 * 5 / 54)
    assert test.critical_difference == pytest.approx(2.569 * math.sqrt(20 / 54), abs=1e-3)
    assert test.groups == [(0, 1), (2, 3)]
    assert ("a", "c") in test.separated
    assert ("a", "b") not in test.separated


def test_methods_that_always_tie_are_not_told_apart() -> None:
    test = rank_test([[0.5, 0.5], [0.7, 0.7]], ["a", "b"])
    assert test.ranks == (1.5, 1.5)
    assert test.p_value == 1.0
    assert test.groups == [(0, 1)]
    assert test.separated == []


@pytest.mark.parametrize(("scores", "methods"), [([[1.0, 2.0]], ["a", "b"]), ([[1.0]] * 3, ["a"])])
def test_one_experiment_or_one_method_has_no_ranks(
    scores: list[list[float]], methods: list[str]
) -> None:
    with pytest.raises(RunError, match="nothing to rank"):
        rank_test(scores, methods)
