"""FedUV, restated from Son et al. 2024: its terms and their derivatives by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.config import Local
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.grammar import parse
from fedkeel.method.parts.feduv import closeness, narrowness
from fedkeel.task.batch import Batch, Output
from harness import oracle, toy_network
from method.players import LOCAL, equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.1
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def by_scores(p: np.ndarray) -> np.ndarray:
    """The derivative of the term of variance by the scores."""
    n, classes = p.shape
    if n == 1:
        return np.zeros_like(p)
    centred = p - p.mean(axis=0)
    std = np.sqrt((centred**2).sum(axis=0) / (n - 1))
    slopes = -1.0 * (std < classes**-0.5) * centred / ((n - 1) * std) / classes
    return p * (slopes - (slopes * p).sum(axis=1, keepdims=True))


def by_features(z: np.ndarray) -> np.ndarray:
    """The derivative of the term of uniformity, also through the median distance."""
    slopes, n = np.zeros_like(z), len(z)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    d = {(i, j): float(np.sum((z[i] - z[j]) ** 2)) for i, j in pairs}
    apart = sorted((value, pair) for pair, value in d.items() if value > 0)
    if not apart:
        return slopes
    m, middle = apart[(len(apart) - 1) // 2]
    by_d = {pair: -np.exp(-value / m) / (m * len(pairs)) for pair, value in d.items()}
    by_d[middle] += sum(value * np.exp(-value / m) for value in d.values()) / (m**2 * len(pairs))
    for (i, j), slope in by_d.items():
        slopes[i] += 2 * slope * (z[i] - z[j])
        slopes[j] -= 2 * slope * (z[i] - z[j])
    return slopes


def feduv(setup: TrainingSetup, lam: float, mu: float, **local: object) -> Iterator[Told]:
    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        hidden, scores = setup.net.outputs(w, bx)
        p = softmax(scores)
        slopes = (p - np.eye(3)[by]) / len(bx) + lam * by_scores(p)
        return setup.net.pull_back(w, bx, slopes, mu * by_features(hidden))

    return averaged(setup, COHORTS, gradient, LR, **local)


@pytest.mark.parametrize(("lam", "mu"), [(2.5, 0.5), (1.0, 0.0), (0.0, 2.0)])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_feduv(lam: float, mu: float, local: dict) -> None:
    """The clients of 9 and 5 examples have a last batch of one."""
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = feduv(setup, lam, mu, **local)
    agree(setup.ours(f"feduv(lam={lam}, mu={mu})", LR, **ours), story, COHORTS, tol=1e-10)


# --- the authors' code -----------------------------------------------------------------------


@pytest.mark.parametrize("case", range(6))
def test_the_terms_are_those_of_its_authors(case: int) -> None:
    o = oracle("feduv_a")
    o = {k.split(".", 1)[1]: v for k, v in o.items() if k.startswith(f"case{case}.")}
    logits, features = (torch.from_numpy(o[k]).requires_grad_() for k in ("logits", "features"))
    lam, mu = float(o["std_coeff"]), float(o["unif_coeff"])
    part = parse(f"feduv(lam={lam}, mu={mu})").objective.terms[0]
    batch = Batch(torch.zeros(len(logits), 8), torch.zeros(len(logits), dtype=torch.int64))
    step = Step(batch, {}, ClientInfo(0, len(logits)), toy_network(), {})
    value = part.loss_term(Output(logits, features), {}, step)
    assert float(value.detach()) == pytest.approx(float(o["loss"]), abs=1e-12)
    by_logits, by_features = torch.autograd.grad(value, [logits, features], allow_unused=True)
    assert np.abs(by_logits.numpy() - o["grad_logits"]).max() < 1e-10
    if not int(o["has_duplicate_rows"]):
        assert np.abs(by_features.numpy() - o["grad_features"]).max() < 1e-10


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_is_fedavg_bit_for_bit(local: Local) -> None:
    assert equal(play("feduv(lam=0.0, mu=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("feduv", local=local), play("fedavg", local=local)) > 1e-3


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float64)


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_balanced_and_certain_probabilities_lack_no_variance(classes: int) -> None:
    """A share 1/Y of ones has variance (1/Y)(1 - 1/Y) n / (n - 1), and less than 1/Y is lacking."""
    certain = torch.eye(classes, dtype=torch.float64).repeat(2, 1)
    n = 2 * classes
    std = (n / (n - 1) * (1 / classes) * (1 - 1 / classes)) ** 0.5
    lacking = max(0.0, classes**-0.5 - std)
    assert float(narrowness(certain, ones(n))) == pytest.approx(lacking, abs=1e-15)
    alike = torch.full((n, classes), 1 / classes, dtype=torch.float64)
    assert float(narrowness(alike, ones(n))) == pytest.approx(classes**-0.5, rel=1e-12)


def test_shifting_turning_and_scaling_features_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(9, 4))
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    plain = float(closeness(torch.from_numpy(z), ones(9)))
    moved = float(closeness(torch.from_numpy(50.0 + 3.0 * z @ turn), ones(9)))
    assert moved == pytest.approx(plain, rel=1e-11)
    assert 0.0 < plain < 1.0


def test_padding_is_left_out() -> None:
    rng = np.random.default_rng(0)
    z, p = torch.from_numpy(rng.normal(size=(6, 5))), torch.from_numpy(rng.dirichlet([1] * 3, 6))
    kept, real = [0, 2, 3, 5], torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).double()
    assert float(closeness(z, real)) == pytest.approx(float(closeness(z[kept], ones(4))), rel=1e-13)
    found, wanted = narrowness(p, real), narrowness(p[kept], ones(4))
    assert float(found) == pytest.approx(float(wanted), rel=1e-13)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("value", [0.0, 0.1])
def test_features_and_scores_that_are_all_alike_have_no_gradient(rows: int, value: float) -> None:
    features = torch.full((rows, 5), value, dtype=torch.float64, requires_grad=True)
    logits = torch.full((rows, 3), value, dtype=torch.float64, requires_grad=True)
    term = narrowness(torch.softmax(logits, dim=1), ones(rows)) + closeness(features, ones(rows))
    wanted = 0.0 if rows == 1 else 3**-0.5 + 1.0
    assert float(term.detach()) == pytest.approx(wanted, rel=1e-12)
    if term.requires_grad:
        for slope in torch.autograd.grad(term, [logits, features], allow_unused=True):
            assert slope is None or float(slope.abs().max()) < 1e-15
