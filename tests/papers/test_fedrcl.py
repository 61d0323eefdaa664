"""FedRCL, restated from Seo et al. 2024, pair by pair, on a network of three layers by hand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from each import each
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.grammar import parse
from fedkeel.method.parts.fedrcl import cosines, relaxed_contrast
from fedkeel.task.batch import Batch, Output
from fedkeel.task.models import make
from fedkeel.task.network import Network
from harness import Federation, toy_network
from method.players import LOCAL, equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, flat, softmax
from papers.test_fedmlb import deep, layers
from papers.test_fedsam import MOMENTUM

LR = 0.1
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def contrast(
    z: np.ndarray, y: np.ndarray, tau: float, beta: float, lam: float
) -> tuple[float, np.ndarray]:
    """The mean of the term over the examples, and its derivative by their features."""
    n = len(z)
    sizes = np.linalg.norm(z, axis=1, keepdims=True)
    u = z / sizes
    s = u @ u.T
    value, by_s = 0.0, np.zeros((n, n))
    for i in range(n):
        others = [k for k in range(n) if k != i]
        positive = [j for j in others if y[j] == y[i]]
        if not positive:
            continue
        total = sum(np.exp(s[i, k] / tau) for k in others)
        for j in positive:
            value -= np.log(np.exp(s[i, j] / tau) / total) / len(positive)
            by_s[i, j] -= 1 / (tau * len(positive))
        for k in others:
            by_s[i, k] += np.exp(s[i, k] / tau) / (total * tau)
        near = [j for j in positive if s[i, j] > lam]
        # the public code's penalty: the share of the pair of i with itself, among those too near
        itself, theirs = np.exp(1 / tau), sum(np.exp(s[i, j] / tau) for j in near)
        value -= beta * np.log(itself / (itself + theirs))
        for j in near:
            by_s[i, j] += beta * np.exp(s[i, j] / tau) / ((itself + theirs) * tau)
    by_u = (by_s + by_s.T) @ u
    return value / n, (by_u - u * (u * by_u).sum(axis=1, keepdims=True)) / sizes / n


def fedrcl(
    setup: TrainingSetup,
    mu: float,
    options: tuple[float, float, float],
    at: tuple[int, ...] = (0, 1),
    **local: object,
) -> Iterator[Told]:
    """`at`: the layers whose outputs, before the activation, are the features."""

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        (w1, b1), (w2, b2), (w3, b3) = layers(w)
        first = bx @ w1.T + b1
        second = np.maximum(first, 0.0) @ w2.T + b2
        scores = np.maximum(second, 0.0) @ w3.T + b3
        pulls = [
            mu / len(at) * contrast(z, by, *options)[1] if level in at else 0.0
            for level, z in enumerate((first, second))
        ]
        slopes = [(softmax(scores) - np.eye(3)[by]) / len(bx)]
        slopes.insert(0, (slopes[0] @ w3) * (second > 0) + pulls[1])
        slopes.insert(0, (slopes[0] @ w2) * (first > 0) + pulls[0])
        into = (bx, np.maximum(first, 0.0), np.maximum(second, 0.0))
        return np.concatenate(
            [
                part
                for slope, x_in in zip(slopes, into, strict=True)
                for part in ((slope.T @ x_in).ravel(), slope.sum(axis=0))
            ]
        )

    return averaged(setup, COHORTS, gradient, LR, **local)


def both(expression: str, **local: object) -> tuple[TrainingSetup, Federation]:
    setup = TrainingSetup(epochs=2)
    network = deep()
    setup.start = flat(network.params)
    settings = Local(lr=LR, epochs=2, batch_size=setup.batch, **local)
    return setup, Federation(expression, network, setup.data, settings, setup.batches)


@each("options", [(0.05, 1.0, 0.7), (0.5, 2.0, 0.0)])
@each("at", [(0, 1), (1,)])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedrcl(options: tuple[float, float, float], at: tuple[int, ...], local: dict) -> None:
    """The clients of 9 and 5 examples have a last batch of one."""
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    tau, beta, lam = options
    levels = "" if at == (0, 1) else "second"
    expression = f"fedrcl(mu=0.3, tau={tau}, beta={beta}, lam={lam}, levels='{levels}')"
    setup, played = both(expression, **ours)
    agree(played, fedrcl(setup, 0.3, options, at, **local), COHORTS, tol=1e-10)


# --- published rules -------------------------------------------------------------------------


def supervised_contrastive(z: np.ndarray, y: np.ndarray, tau: float) -> float:
    """The mean over the examples by the steps of the public code of Khosla et al. (SupContrast).

    It subtracts the largest product of each row, masks the diagonal, and divides the sum over the
    positives by their number, or by 1 where there are none.
    """
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    products = u @ u.T / tau
    products -= products.max(axis=1, keepdims=True)
    off = 1.0 - np.eye(len(z))
    mask = (y[:, None] == y[None]) * off
    log_shares = products - np.log((np.exp(products) * off).sum(axis=1, keepdims=True))
    counts = mask.sum(axis=1)
    return float(-((mask * log_shares).sum(axis=1) / np.where(counts < 1e-6, 1.0, counts)).mean())


def examples(n: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, size=n)
    return rng.normal(size=(4, 5))[y] + 0.4 * rng.normal(size=(n, 5)), y


def term(
    z: np.ndarray | Tensor,
    y: np.ndarray,
    options: tuple[float, float, float] = (0.05, 1.0, 0.7),
    real: np.ndarray | None = None,
) -> Tensor:
    features, labels = torch.as_tensor(z), torch.from_numpy(y)
    ones = np.ones(len(y)) if real is None else real
    return relaxed_contrast(cosines(features), labels, torch.from_numpy(ones), *options)


@pytest.mark.parametrize("tau", [0.05, 0.3])
@pytest.mark.parametrize("options", [(1.0, 1.0), (0.0, 0.7), (1.0, 1.5)])
def test_without_the_penalty_it_is_the_supervised_contrastive_loss(
    tau: float, options: tuple[float, float]
) -> None:
    """The penalty is off with beta = 0, and no cosine is above 1."""
    z, y = examples()
    y[-1] = 7  # an example that is alone
    ours = float(term(z, y, (tau, *options)).mean())
    assert ours == pytest.approx(supervised_contrastive(z, y, tau), rel=1e-12)


@pytest.mark.parametrize("options", [(0.05, 1.0, 0.7), (0.5, 2.0, 0.0), (0.2, 0.5, -1.0)])
def test_value_and_derivative_are_those_by_hand(options: tuple[float, float, float]) -> None:
    z, y = examples()
    features = torch.from_numpy(z).requires_grad_()
    value = term(features, y, options).mean()
    expected, by_z = contrast(z, y, *options)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-12)
    (ours,) = torch.autograd.grad(value, [features])
    assert np.abs(ours.numpy() - by_z).max() < 1e-12


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_is_fedavg_bit_for_bit(local: Local) -> None:
    assert equal(play("fedrcl(mu=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("fedrcl", local=local), play("fedavg", local=local)) > 1e-3


def test_without_another_example_of_a_class_there_is_no_term() -> None:
    z, _ = examples(4)
    features = torch.from_numpy(z).requires_grad_()
    value = term(features, np.arange(4))
    assert not value.detach().any()
    (grad,) = torch.autograd.grad(value.sum(), [features])
    assert not grad.any()
    assert not term(z[:1], np.zeros(1, dtype=np.int64)).any()


def test_only_pairs_that_are_too_similar_are_penalised() -> None:
    """Three examples of a class at angles of 0, 30 and 90 degrees; cos 30 = 0.866."""
    angles = np.deg2rad([0.0, 30.0, 90.0])
    z, y = np.c_[np.cos(angles), np.sin(angles)], np.zeros(3, dtype=np.int64)
    tau = 0.5
    plain = term(z, y, (tau, 0.0, 0.7))
    relaxed = term(z, y, (tau, 1.0, 0.7))
    near = np.log1p(np.exp((np.cos(angles[1]) - 1.0) / tau))
    assert (relaxed - plain).numpy() == pytest.approx([near, near, 0.0], abs=1e-14)
    assert torch.equal(term(z, y, (tau, 1.0, 0.9)), plain)


def test_the_penalty_drives_examples_of_a_class_apart() -> None:
    """At the least loss without it all examples of a class are the same."""
    z, y = examples(12, seed=1)
    spread = {}
    for beta in (0.0, 1.0):
        w = torch.from_numpy(z.copy()).requires_grad_()
        for _ in range(400):
            (grad,) = torch.autograd.grad(term(w, y, (0.3, beta, 0.5)).mean(), [w])
            w = (w - 0.3 * grad).detach().requires_grad_()
        s = cosines(w.detach())
        alike = torch.from_numpy((y[:, None] == y) & ~np.eye(12, dtype=bool))
        spread[beta] = float(s[alike].mean())
    assert spread[0.0] > 0.98
    assert spread[1.0] < 0.7


def test_scaling_the_features_of_an_example_changes_nothing() -> None:
    z, y = examples()
    scaled = z * np.linspace(0.1, 20.0, len(z))[:, None]
    assert term(scaled, y).numpy() == pytest.approx(term(z, y).numpy(), rel=1e-12)


def test_padding_is_left_out() -> None:
    z, y = examples(8)
    real = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    kept = real > 0.0
    assert term(z, y, real=real).numpy()[kept] == pytest.approx(
        term(z[kept], y[kept]).numpy(), rel=1e-13
    )
    assert torch.isfinite(term(z, y, real=np.zeros(8))).all()


def test_features_of_zeros_have_no_gradient() -> None:
    features = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    value = term(features, np.zeros(4, dtype=np.int64)).sum()
    (grad,) = torch.autograd.grad(value, [features])
    assert torch.isfinite(value)
    assert not grad.any()


def test_maps_of_features_are_averaged_over_their_positions() -> None:
    z, y = examples(6)
    maps = torch.from_numpy(z)[:, :, None, None] + torch.tensor([[-1.0, 1.0], [3.0, -3.0]])
    sequences = torch.from_numpy(z).reshape(6, 5, 1)
    batch = Batch(torch.zeros(6, 8), torch.from_numpy(y))
    step = Step(batch, {}, ClientInfo(0, 6), toy_network(), {})
    part = parse("fedrcl").objective.terms[0]
    scores = torch.zeros(6, 4, dtype=torch.float64)
    for levels in ({"a": maps}, {"a": sequences}, {"a": maps, "b": sequences}):
        value = part.loss_term(Output(scores, levels=levels), {}, step)
        assert value.numpy() == pytest.approx(term(z, y).numpy(), rel=1e-12)


def test_of_class_probabilities_the_most_probable_class_counts() -> None:
    z, y = examples(6)
    shares = torch.full((6, 4), 0.1, dtype=torch.float64)
    shares[torch.arange(6), torch.from_numpy(y)] = 0.7
    step = Step(Batch(torch.zeros(6, 8), shares), {}, ClientInfo(0, 6), toy_network(), {})
    output = Output(torch.zeros(6, 4, dtype=torch.float64), levels={"a": torch.from_numpy(z)})
    value = parse("fedrcl").objective.terms[0].loss_term(output, {}, step)
    assert value.numpy() == pytest.approx(term(z, y).numpy(), rel=1e-12)


# --- which levels ----------------------------------------------------------------------------


def test_the_levels_of_a_resnet_are_its_stem_and_its_stages() -> None:
    network = Network(make("resnet18", (3, 32, 32), 10, {"width": 4}), head="fc")
    assert [name.rpartition(".")[2] for name in network.level_names] == [
        "conv1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
    ]
    assert toy_network().level_names == ("fc1",)
    assert deep().level_names == ("first", "second")


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    _, played = both("fedrcl(levels='first, third')")
    with pytest.raises(CompositionError, match="at the level 'third'") as raised:
        played.round()
    assert "first, second" in str(raised.value)


def test_a_network_of_one_layer_is_refused() -> None:
    network = Network(torch.nn.Sequential(torch.nn.Linear(8, 3)), head="0", dtype=torch.float64)
    setup = TrainingSetup()
    local = Local(lr=LR, epochs=1, batch_size=4)
    with pytest.raises(CompositionError, match="no level before its classifier"):
        Federation("fedrcl", network, setup.data, local, setup.batches).round()
