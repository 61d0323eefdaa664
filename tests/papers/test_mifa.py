"""MIFA, restated from Gu et al. 2021, Algorithm 1, and from the authors' two trainers.

The table of all clients is kept whole and summed anew in every round; ours moves the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from each import each
from harness import Federation
from method.players import equal, federation, gap, play
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, paced

LR = 0.2
# all were there after the fifth round; client 1 is away for four, and nobody comes in two of all
COHORTS = [[0, 1], [0, 2], [], [2, 3], [0, 4], [1, 2, 3], [0, 1], [], [3, 4]]
FALLING = [0.2, 0.15, 0.15, 0.15, 0.1, 0.1, 0.08, 0.07, 0.08]


def mifa(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    rates: Sequence[float],
    start: str,
    beta: float = 0.0,
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    count = len(setup.sizes)
    table: dict[int, Vector] = {}
    v = np.zeros_like(x)
    for t, clients in enumerate(cohorts):
        eta = rates[t]
        sent = {}
        for i in clients:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            sent[i] = descend(x, steps, eta, **local) - x
            table[i] = sent[i] / eta
        if start == "wait" and len(table) < count:
            update = np.zeros_like(x)
        else:
            update = eta * sum(table.values()) / (len(table) if start == "seen" else count)
        v = beta * v + update
        x = x + v
        rows = {f"G{i}": table[i] for i in clients}
        seen = np.array([float(len(table))])
        yield Told(x, sent, {"sum": sum(table.values()), "seen": seen, **rows})


def look(ours: Federation) -> Mapping[str, Vector]:
    memory = ours.played.server.memory["mifa"]
    rows = {f"G{i}": flat(row["mifa"]["G"]) for i, row in ours.rows.items()}
    seen = np.array([float(memory["seen"])])
    assert ours.played.diagnostics["mifa.seen"] == seen
    return {"sum": flat(memory["sum"]), "seen": seen, **rows}


@each("start", ["seen", "no_wait"])
@each("rates", [[LR] * 9, FALLING])
@each("local", [{}, {"momentum": 0.9}])
def test_mifa(start: str, rates: list[float], local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    ours = setup.ours(f"mifa(start='{start}')", LR, **local)
    story = mifa(setup, COHORTS, rates, start, **local)
    assert agree(ours, paced(ours, story, rates), COHORTS, look) == 9


@pytest.mark.parametrize("rates", [[LR] * 9, FALLING])
def test_mifa_that_waits(rates: list[float]) -> None:
    """Until the fifth round the model is the initial one, bit for bit."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    ours = setup.ours("mifa(start='wait')", LR)
    story = paced(ours, mifa(setup, COHORTS, rates, "wait"), rates)
    for clients in COHORTS[:4]:
        told = next(story)
        ours.round(clients)
        assert equal(ours.params, ours.network.params)
        assert all(np.abs(look(ours)[k] - v).max() < 1e-12 for k, v in told.kept.items())
    assert agree(ours, story, COHORTS[4:], look) == 5


@pytest.mark.parametrize("start", ["seen", "no_wait"])
def test_mifa_with_momentum(start: str) -> None:
    """GradMA calls it MIFAM."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    story = mifa(setup, COHORTS, [LR] * 9, start, beta=0.6)
    agree(setup.ours(f"mifa(start='{start}')+momentum(beta=0.6)", LR), story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["seen", "wait", "no_wait"])
def test_of_all_clients_it_is_fedavg(start: str) -> None:
    ours = play(f"mifa(start='{start}')", rounds=4)
    assert gap(ours, play("fedavg", rounds=4, weights="uniform")) < 1e-13


def test_the_first_round_without_waiting_is_a_shorter_one() -> None:
    """Two of four clients, so half as long; counting those that were there, as long."""

    def first(expression: str) -> dict:
        played = federation(expression, weights="uniform")
        played.round([1, 3])
        return played.params

    assert gap(first("mifa(start='no_wait')"), first("addition(lr=0.5)")) < 1e-14
    assert gap(first("mifa"), first("fedavg")) < 1e-14


def test_clients_count_equally_whatever_the_weights() -> None:
    ours = play("mifa", rounds=3, weights="examples")
    assert equal(ours, play("mifa", rounds=3, weights="uniform"))


@pytest.mark.parametrize(
    "start", ["seen", *(pytest.param(s, marks=pytest.mark.slow) for s in ("wait", "no_wait"))]
)
def test_it_stands_still_where_fedavg_with_all_clients_would(start: str) -> None:
    """One of three clients a round, in turn."""
    quadratics = Quadratics()
    there = quadratics.fixed_point(0.05, 0.0, np.ones(3))
    ended = quadratics.play(f"mifa(start='{start}')", 0.05, 0.0, 300, lambda t: [t % 3])
    assert np.linalg.norm(ended - there) < 1e-8
    fedavg = quadratics.play("fedavg", 0.05, 0.0, 300, lambda t: [t % 3])
    assert np.linalg.norm(fedavg - there) > 0.05
