"""FedDecorr, restated from Shi et al. 2023, section 4: the correlations, one pair at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel.errors import CompositionError
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch, Output
from harness import toy_network
from method.players import LOCAL, equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.1
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]
EPS = 1e-8


def decorrelation(z: np.ndarray, scale: str) -> tuple[float, np.ndarray]:
    """The term and its derivative by the features."""
    n, f = z.shape
    if n == 1:
        return 0.0, np.zeros_like(z)
    centred = z - z.mean(axis=0)
    size = np.sqrt(centred.var(axis=0, ddof=1) + EPS)
    s = centred / size
    pairs = [(i, j) for i in range(f) for j in range(f) if i != j]
    share = 1 / (f * (f - 1) * n) if scale == "code" else 1 / (f * f * n * n)
    value, by_s = 0.0, np.zeros_like(z)
    for i, j in pairs:
        product = s[:, i] @ s[:, j]
        value += share * product**2
        by_s[:, i] += share * 2 * product * s[:, j]
        by_s[:, j] += share * 2 * product * s[:, i]
    # s = c / size(c), and d size / dc = c / ((n - 1) size)
    by_c = by_s / size - centred * (by_s * centred).sum(axis=0) / (size**3 * (n - 1))
    return value, by_c - by_c.mean(axis=0)


def feddecorr(setup: TrainingSetup, beta: float, scale: str, **local: object) -> Iterator[Told]:
    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        hidden, scores = setup.net.outputs(w, bx)
        slopes = (softmax(scores) - np.eye(3)[by]) / len(bx)
        return setup.net.pull_back(w, bx, slopes, beta * decorrelation(hidden, scale)[1])

    return averaged(setup, COHORTS, gradient, LR, **local)


@each("beta", [0.1, 2.0])
@each("scale", ["code", "paper"])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_feddecorr(beta: float, scale: str, local: dict) -> None:
    """The clients of 9 and 5 examples have a last batch of one."""
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = feddecorr(setup, beta, scale, **local)
    expression = f"feddecorr(beta={beta}, scale='{scale}')"
    agree(setup.ours(expression, LR, **ours), story, COHORTS, tol=1e-10)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_is_fedavg_bit_for_bit(local: object) -> None:
    assert equal(play("feddecorr(beta=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("feddecorr", local=local), play("fedavg", local=local)) > 1e-3


def term(z: np.ndarray, scale: str = "code", weight: torch.Tensor | None = None) -> float:
    features = torch.as_tensor(z)
    batch = Batch(torch.zeros(len(z), 8), torch.zeros(len(z), dtype=torch.int64), weight)
    step = Step(batch, {}, ClientInfo(0, len(z)), toy_network(), {})
    part = parse(f"feddecorr(beta=1.0, scale='{scale}')").objective.terms[0]
    return float(part.loss_term(Output(features, features), {}, step))


def test_the_term_is_the_mean_squared_correlation() -> None:
    z = np.random.default_rng(0).normal(size=(20, 5)) @ np.diag([1.0, 10.0, 0.1, 3.0, 5.0]) + 4.0
    correlations = np.corrcoef(z.T)
    squares = np.sum(correlations**2) - 5.0
    size = (19 / 20) ** 2  # variances are divided by 19, products by 20
    assert term(z) == pytest.approx(20 * size * squares / 20, rel=1e-5)
    assert term(z, "paper") == pytest.approx(size * squares / 25, rel=1e-5)


def test_shifts_and_scales_of_features_do_not_matter() -> None:
    z = np.random.default_rng(0).normal(size=(20, 5))
    moved = z * np.array([2.0, 0.5, -3.0, 1.0, 10.0]) - 7.0
    assert term(moved) == pytest.approx(term(z), rel=1e-6)


def test_copies_of_a_feature_are_worst_and_orthogonal_ones_best() -> None:
    z = np.random.default_rng(0).normal(size=(20, 1))
    assert term(z @ np.ones((1, 4))) == pytest.approx(19**2 / 20, rel=1e-6)
    apart = np.linalg.qr(np.c_[np.ones(20), np.random.default_rng(1).normal(size=(20, 4))])[0]
    assert abs(term(apart[:, 1:])) < 1e-14


def test_padding_is_left_out() -> None:
    z = np.random.default_rng(0).normal(size=(6, 5))
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).double()
    for scale in ("code", "paper"):
        assert term(z, scale, weight) == pytest.approx(term(z[[0, 2, 3, 5]], scale), rel=1e-13)
    one = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]).double()
    assert term(z, "code", one) == 0.0


@pytest.mark.parametrize("rows", [1, 4])
def test_features_that_are_all_alike_have_no_gradient(rows: int) -> None:
    features = torch.full((rows, 5), 2.0, dtype=torch.float64, requires_grad=True)
    batch = Batch(torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64))
    step = Step(batch, {}, ClientInfo(0, rows), toy_network(), {})
    value = parse("feddecorr").objective.terms[0].loss_term(Output(features, features), {}, step)
    value.backward()
    assert not value.detach().any()
    assert features.grad is not None
    assert not features.grad.any()


def test_a_single_feature_has_nothing_to_be_correlated_with() -> None:
    assert term(np.random.default_rng(0).normal(size=(20, 1))) == 0.0


def test_it_needs_features_and_mixes_examples() -> None:
    with pytest.raises(CompositionError, match="feddecorr needs FEATURES"):
        parse("feddecorr", frozenset())
