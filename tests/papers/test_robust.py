"""The coordinate-wise median and trimmed mean, restated from Yin et al. 2018, Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch

from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span
from fedkeel.tree import Tree
from method.players import equal, gap, play, skewed
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.3
COHORTS = [[0, 1, 2, 3, 4], [1, 3], [0, 2, 3, 4], [2], [0, 1, 4]]
Rule = Callable[[list[float]], float]


def median(values: list[float]) -> float:
    """Definition 1."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def trimmed(beta: Fraction) -> Rule:
    """Definition 2: without the largest and smallest share beta of the values."""

    def rule(values: list[float]) -> float:
        cut = floor(beta * len(values))
        return sum(sorted(values)[cut : len(values) - cut]) / (len(values) - 2 * cut)

    return rule


def robust(setup: TrainingSetup, rule: Rule) -> Iterator[Told]:
    x = setup.start
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = [lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR, momentum=0.5) - x
        x = x + np.array([rule([sent[i][j] for i in clients]) for j in range(len(x))])
        yield Told(x, sent)


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("median", median),
        ("trimmed_mean(beta=0.2)", trimmed(Fraction(1, 5))),
        ("trimmed_mean(beta=0.26)", trimmed(Fraction(26, 100))),
        ("trimmed_mean(beta=0.4)", trimmed(Fraction(2, 5))),
        ("trimmed_mean(beta=0.0)", trimmed(Fraction(0))),
    ],
)
def test_robust_means(expression: str, rule: Rule) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    agree(setup.ours(expression, LR, momentum=0.5), robust(setup, rule), COHORTS)


# --- laws ------------------------------------------------------------------------------------


def reduce(expression: str, rows: np.ndarray, mix: np.ndarray | None = None) -> Vector:
    """What a reduction makes of rows [K, D], all of which are in a tensor of one name."""
    tensors: Tree = {"w": torch.from_numpy(rows)}
    count = len(rows)
    cohort = RoundCohort(
        np.arange(count), np.ones(count) / count, 0.1, 0, Population(count, count), ("w",), 0
    )
    span = Span(tensors, None if mix is None else {"w": mix})
    return parse(expression).reduction.reduce(span, cohort)["w"].numpy()


def test_nothing_trimmed_is_the_unweighted_mean_bit_for_bit() -> None:
    plain = play("fedavg", weights="uniform")
    assert equal(play("trimmed_mean(beta=0.0)"), plain)
    assert equal(play("trimmed_mean(beta=0.2)"), plain)  # 4 clients: floor(0.8) = 0
    assert gap(play("trimmed_mean(beta=0.25)"), plain) > 1e-3


def test_the_run_cannot_weigh_clients() -> None:
    for method in ("median", "trimmed_mean", "trimmed_mean(beta=0.25)"):
        assert equal(play(method, weights="examples"), play(method))


def test_the_median_of_one_or_two_is_their_mean() -> None:
    for sizes in ((12,), (12, 7)):
        data = skewed(sizes)
        assert equal(play("median", data), play("fedavg", data, weights="uniform"))


def test_trimming_all_but_the_middle_is_the_median() -> None:
    rng = np.random.default_rng(0)
    for count in (3, 4, 7, 10):
        rows = rng.normal(size=(count, 5))
        np.testing.assert_array_equal(
            reduce("trimmed_mean(beta=0.4999)", rows), reduce("median", rows)
        )
        np.testing.assert_array_equal(reduce("median", rows), np.median(rows, axis=0))


@pytest.mark.parametrize(("share", "clients", "cut"), [(29, 100, 29), (7, 100, 7), (30, 10, 3)])
def test_the_number_trimmed_is_a_floor_without_rounding(share: int, clients: int, cut: int) -> None:
    """0.29 * 100 is 28.999... in floating point."""
    assert floor(Fraction(share, 100) * clients) == cut
    assert parse(f"trimmed_mean(beta={share / 100})").reduction.trimmed(clients) == cut  # type: ignore


def test_something_is_always_left() -> None:
    part = parse("trimmed_mean(beta=0.49999999999)").reduction
    assert [part.trimmed(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]  # type: ignore


@pytest.mark.parametrize("method", ["median", "trimmed_mean(beta=0.34)"])
def test_a_minority_cannot_move_it_out_of_the_others_range(method: str) -> None:
    rng = np.random.default_rng(1)
    honest = rng.normal(size=(4, 6))
    for size in (1e3, 1e300):
        wild = size * np.sign(rng.normal(size=(2, 6)))
        found = reduce(method, np.concatenate([wild, honest]))
        assert np.all(found >= honest.min(axis=0))
        assert np.all(found <= honest.max(axis=0))


def test_a_pulled_mean_is_far_away() -> None:
    """The same clients under the mean: the test above asks for something."""
    rows = np.concatenate([np.full((2, 6), 1e3), np.zeros((4, 6))])
    assert reduce("trimmed_mean(beta=0.0)", rows).min() > 300.0
    assert np.abs(reduce("median", rows)).max() == 0.0


@pytest.mark.parametrize("method", ["median", "trimmed_mean(beta=0.34)"])
def test_it_reduces_what_cohort_transforms_made_of_the_updates(method: str) -> None:
    rng = np.random.default_rng(2)
    rows, mix = rng.normal(size=(5, 4)), rng.normal(size=(5, 5))
    np.testing.assert_allclose(reduce(method, rows, mix), reduce(method, mix @ rows), rtol=1e-13)


def test_it_does_not_mind_numbers_without_axes() -> None:
    """Scalar parameters have rows of shape [K]."""
    tensors: Tree = {"s": torch.tensor([3.0, 1.0, 2.0])}
    cohort = RoundCohort(np.arange(3), np.ones(3) / 3, 0.1, 0, Population(3, 3), ("s",), 0)
    assert float(parse("median").reduction.reduce(Span(tensors), cohort)["s"]) == 2.0
