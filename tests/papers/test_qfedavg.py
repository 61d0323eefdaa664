"""Weights by the loss of the received model: q-FedAvg, TERM and AFL, restated from their papers.

q-FedAvg is Li et al. 2020, Algorithms 1 and 2; TERM is Li et al. 2021, Lemma 1; AFL is Mohri et al.
2019, section 4. Losses and gradients are by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from fedkeel.method.parts.afl import nearest_on_simplex
from harness import Federation
from method.players import federation, gap, play, skewed
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1, 2, 3]]
ALL = [[0, 1, 2, 3]] * 4
Rule = Callable[[int, Sequence[int], np.ndarray, np.ndarray, list[Vector]], Vector]


def loss(setup: TrainingSetup, k: int, x: Vector) -> float:
    inputs, labels = setup.data[k]
    return float(-np.log(setup.net.predict(x, inputs)[np.arange(len(labels)), labels]).mean())


def by_loss(
    setup: TrainingSetup, cohorts: Sequence[Sequence[int]], rule: Rule, weights: str = "examples"
) -> Iterator[Told]:
    x = setup.start
    for t, clients in enumerate(cohorts):
        sent = {}
        for i in clients:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            sent[i] = descend(x, steps, LR) - x
        F = np.array([loss(setup, i, x) for i in clients])
        p = setup.shares(weights, clients, t)
        x = x + rule(t, clients, F, p, [sent[i] for i in clients])
        yield Told(x, sent)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedavg(q: float) -> None:
    def rule(t, clients, F, p, deltas):
        L = 1 / LR
        dw = [-L * d for d in deltas]  # 6: L (w - w_k)
        upper = [f**q * d for f, d in zip(F, dw, strict=True)]  # 7
        h = [q * f ** (q - 1) * d @ d + L * f**q for f, d in zip(F, dw, strict=True)]
        return -sum(a * u for a, u in zip(p, upper, strict=True)) / (p @ h)  # 9

    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"qfedavg(q={q})", LR)
    assert agree(ours, by_loss(setup, COHORTS, rule), COHORTS) == len(COHORTS)


@pytest.mark.parametrize(("tilt", "weights"), [(1.5, "examples"), (-2.0, "uniform")])
def test_term(tilt: float, weights: str) -> None:
    def rule(t, clients, F, p, deltas):
        raised = p * np.exp(tilt * F)
        return sum(w * d for w, d in zip(raised / raised.sum(), deltas, strict=True))

    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"term(t={tilt})", LR, weights=weights)
    assert agree(ours, by_loss(setup, COHORTS, rule, weights), COHORTS) == len(COHORTS)


def test_afl() -> None:
    lam = np.full(4, 0.25)

    def rule(t, clients, F, p, deltas):
        shares = lam[list(clients)] / lam[list(clients)].sum()
        lam[list(clients)] += 0.3 * F
        low, high = lam.min() - 1.0, lam.max()  # the level whose excess is 1, by halving
        for _ in range(200):
            level = (low + high) / 2
            low, high = (level, high) if np.maximum(lam - level, 0).sum() > 1 else (low, level)
        lam[:] = np.maximum(lam - level, 0)
        return sum(s * d for s, d in zip(shares, deltas, strict=True))

    setup = TrainingSetup(epochs=2)
    ours = setup.ours("afl(gamma=0.3)", LR)
    story = by_loss(setup, ALL + COHORTS, rule)
    assert agree(ours, story, ALL + COHORTS) == len(ALL + COHORTS)
    assert lam.min() == 0.0 < lam.max() < 1.0


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "weights"),
    [("qfedavg(q=0.0)", None), ("term(t=0.0)", None), ("afl(gamma=0.0)", "uniform")],
)
def test_without_a_preference_it_is_fedavg(expression: str, weights: str | None) -> None:
    assert gap(play(expression, rounds=3), play("fedavg", rounds=3, weights=weights)) < 1e-15


def objective(setup: TrainingSetup, x: Vector, name: str) -> float:
    F = np.array([loss(setup, k, x) for k in range(4)])
    p = setup.shares("examples", range(4))
    return float(p @ F**3 / 3 if name == "qfedavg" else np.log(p @ np.exp(2.0 * F)) / 2.0)


@pytest.mark.parametrize("expression", ["qfedavg(q=2.0)", "term(t=2.0)"])
def test_after_fedsgd_the_step_is_along_the_gradient_of_the_objective(expression: str) -> None:
    """Its gradient by central differences."""
    setup = TrainingSetup()
    ours = setup.ours(f"fedsgd+{expression}", LR)
    ours.batches = lambda k, _: [np.arange(setup.sizes[k])]
    name, x = expression.partition("(")[0], setup.start
    ours.round()
    step = flat(ours.params) - x
    eps, slope = 1e-6, np.zeros_like(x)
    for i in range(len(x)):
        e = eps * np.eye(1, len(x), i)[0]
        slope[i] = (objective(setup, x + e, name) - objective(setup, x - e, name)) / (2 * eps)
    length = step @ slope / (slope @ slope)
    assert np.abs(step - length * slope).max() < 1e-8 < 1e-3 < np.abs(step).max()
    if name == "term":
        assert length == pytest.approx(-LR, rel=1e-6)
    else:
        assert -LR < length < 0.0


def test_qfedavg_of_one_client_is_a_shorter_step() -> None:
    alone = skewed((12,))
    ours, plain = federation("qfedavg(q=1.0)", alone), federation("fedavg", alone)
    start = flat(ours.params)
    ours.round()
    plain.round()
    far = flat(plain.params) - start
    F = float(ours.played.replies[0].uploads["qfedavg"]["loss"])
    shorter = far / (1 + far @ far / (0.1 * F))
    assert np.abs(flat(ours.params) - start - shorter).max() < 1e-14


def spread(ours: Federation, rounds: int) -> np.ndarray:
    for _ in range(rounds):
        played = ours.round()
    name = ours.plan.parts[0].name
    return np.array([float(played.replies[k].uploads[name]["loss"]) for k in range(4)])


def test_tilts_raise_the_worst_client_or_give_it_up() -> None:
    setup = TrainingSetup()
    up, none, down = (spread(setup.ours(f"term(t={t})", LR), 25) for t in (4.0, 0.0, -4.0))
    assert up.max() < none.max() - 0.05 < down.max() - 0.1
    worst = spread(setup.ours("afl(gamma=0.2)", LR), 25)
    assert worst.max() < none.max() - 0.05
    fair = spread(setup.ours("qfedavg(q=2.0)", LR), 25)
    assert fair.std() / fair.mean() < 0.6 * none.std() / none.mean()  # it is not as far yet


def test_huge_tilts_take_one_client() -> None:
    setup = TrainingSetup()
    played = setup.ours("term(t=1e6)", LR)
    losses = spread(played, 1)
    assert played.played.diagnostics["term.largest"] == 1.0
    moved = flat(played.params) - setup.start
    theirs = flat(played.played.deltas[int(losses.argmax())])
    assert np.abs(moved - theirs).max() < 1e-15


def test_the_nearest_point_on_the_simplex() -> None:
    """By its optimality: where it is above 0, x is above it by one and the same amount."""
    random = np.random.default_rng(0)
    for _ in range(50):
        x = 3 * random.normal(size=7)
        near = nearest_on_simplex(x)
        assert near.min() >= 0.0
        assert near.sum() == pytest.approx(1.0, abs=1e-14)
        gaps = x - near
        assert np.ptp(gaps[near > 0]) < 1e-14
        assert (gaps[near == 0] <= gaps.max() + 1e-14).all()
