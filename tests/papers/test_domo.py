"""DOMO, restated from Xu and Huang 2022, as two public codes have its pre-momentum fusion.

They write the momentum as a mean gradient over K local steps, the same K for every client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from each import each
from fedkeel.config import Local
from harness import Federation
from method.players import LOCAL, gap, play
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, paced

LR = 0.1
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 1, 3], [1, 2], [0, 3]]
FALLING = [0.1, 0.08, 0.08, 0.05, 0.05, 0.03]


def domo(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    rates: Sequence[float],
    fusion: float,
    beta: float,
    gamma: float,
    K: int = 1,
    weights: str = "examples",
    **local: object,
) -> Iterator[Told]:
    """K = 1 says that m is a sum over the steps, however many there are."""
    x = setup.start
    m = np.zeros_like(x)
    for t, clients in enumerate(cohorts):
        eta = rates[t]
        fused = x - fusion * eta * K * m
        y = {}
        for i in clients:
            steps = [lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]
            assert K in (1, len(steps))
            y[i] = descend(fused, iter(steps), eta, **local)
        p = setup.shares(weights, clients, t)
        d = sum(s * (fused - y[i]) for s, i in zip(p, clients, strict=True)) / (eta * K)
        m = beta * m + d
        x = x - gamma * eta * K * m
        yield Told(x, {i: y[i] - fused for i in clients}, {"m": -K * m})


def look(ours: Federation) -> Mapping[str, Vector]:
    return {"m": flat(ours.played.server.memory["domo"]["m"])}


@each("given", [(0.9, 0.9, 1.0), (0.3, 0.6, 0.7)])
@each("rates", [[LR] * 6, FALLING])
@each("local", [{}, {"momentum": 0.9}])
def test_domo(given: tuple[float, float, float], rates: list[float], local: dict) -> None:
    """Unequal clients that make four steps each."""
    setup = TrainingSetup(sizes=(8, 5, 7, 6), epochs=2)
    ours = setup.ours("domo(fusion={}, beta={}, lr={})".format(*given), LR, **local)
    story = domo(setup, COHORTS, rates, *given, K=4, **local)
    assert agree(ours, paced(ours, story, rates), COHORTS, look) == 6


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_domo_with_unequal_work(weights: str) -> None:
    setup = TrainingSetup(sizes=(9, 3, 12, 7))
    story = domo(setup, COHORTS, [LR] * 6, 0.5, 0.8, 1.0, weights=weights)
    ours = setup.ours("domo(fusion=0.5, beta=0.8)", LR, weights=weights)
    agree(ours, story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


@each(
    ("method", "other", "weights"),
    [
        ("domo(fusion=0.0, beta=0.0)", "fedavg", None),
        ("domo(fusion=0.0, beta=0.0, lr=0.5)", "addition(lr=0.5)", None),
        ("domo(fusion=0.0, beta=0.7, lr=0.5)", "momentum(beta=0.7, lr=0.5)", None),
        ("domo(fusion=0.7, beta=0.7)", "fedacg(lam=0.7, beta=0.0)", "uniform"),
    ],
)
@each("momentum", [0.0, 0.9])
def test_reductions(method: str, other: str, weights: str | None, momentum: float) -> None:
    local = Local(lr=0.05, epochs=2, batch_size=4, momentum=momentum)
    options = {"local": local, "weights": weights, "rounds": 4}
    assert gap(play(method, **options), play(other, **options)) < 1e-13


def test_the_fusion_does_something() -> None:
    ours = play("domo(fusion=0.5, beta=0.7)", rounds=3, local=LOCAL)
    assert gap(ours, play("domo(fusion=0.0, beta=0.7)", rounds=3, local=LOCAL)) > 1e-3


def test_it_stands_still_where_fedavg_does() -> None:
    quadratics = Quadratics()
    ended = quadratics.play("domo(fusion=0.4, beta=0.4)", 0.1, 0.0, 100)
    there = quadratics.fixed_point(0.1, 0.0, np.ones(3))
    np.testing.assert_allclose(ended, there, rtol=0, atol=1e-8)
