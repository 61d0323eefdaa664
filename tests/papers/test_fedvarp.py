"""FedVARP, restated from Jhunjhunwala et al. 2022, Algorithm 1.

The table of all clients is kept whole, and y is its mean, worked out anew in every round; ours
moves y by what changed. Vectors are those of the paper: d = x - y_k, uphill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from each import each
from fedkeel import tree
from harness import Federation, distance, oracle, tensors
from method.players import equal, federation, gap, play
from method.test_oracles import follow, hp
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, paced

LR = 0.2
# client 1 returns after three rounds with a stale memory, client 4 never takes part
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]
FALLING = [0.2, 0.15, 0.15, 0.1, 0.05, 0.02]


def fedvarp(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    rates: Sequence[float],
    memory: str = "gradient",
    server_lr: float = 1.0,
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    table = [np.zeros_like(x) for _ in setup.sizes]
    for t, clients in enumerate(cohorts):
        lr = rates[t]
        d = {}
        for i in clients:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            end = descend(x, steps, lr, **local)
            d[i] = (x - end) / lr if memory == "gradient" else x - end
        y = sum(table) / len(table)
        v = y + sum(d[i] - table[i] for i in clients) / len(clients)
        size = lr if memory == "gradient" else 1.0
        sent = {i: -size * d[i] for i in clients}
        x = x - server_lr * size * v
        for i in clients:
            table[i] = d[i]
        rows = {f"y{i}": -table[i] for i in clients}
        yield Told(x, sent, {"y": -sum(table) / len(table), **rows})


def look(ours: Federation) -> Mapping[str, Vector]:
    rows = {f"y{i}": flat(row["fedvarp"]["y"]) for i, row in ours.rows.items()}
    return {"y": flat(ours.played.server.memory["fedvarp"]["y"]), **rows}


@each("memory", ["gradient", "update"])
@each("rates", [[LR] * 6, FALLING])
@each("local", [{}, {"momentum": 0.9}])
def test_fedvarp(memory: str, rates: list[float], local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    ours = setup.ours(f"fedvarp(memory='{memory}')", LR, **local)
    story = fedvarp(setup, COHORTS, rates, memory, **local)
    assert agree(ours, paced(ours, story, rates), COHORTS, look) == 6


def test_the_servers_step_size() -> None:
    setup = TrainingSetup()
    cohorts = [[0, 1], [2, 3], [0, 2], [1, 3]]
    story = fedvarp(setup, cohorts, [LR] * 4, server_lr=0.6)
    agree(setup.ours("fedvarp+addition(lr=0.6)", LR), story, cohorts, look)


def test_clients_count_equally_whatever_the_weights() -> None:
    ours = play("fedvarp", rounds=3, weights="examples")
    assert equal(ours, play("fedvarp", rounds=3, weights="uniform"))


@pytest.mark.parametrize("memory", ["gradient", "update"])
@pytest.mark.parametrize("case", ["a", "partial"])
def test_fedvarp_follows_the_gcfed_repository(case: str, memory: str) -> None:
    name = f"gcfed_fedvarp_{case}"
    size = hp(oracle(name), "lr") if memory == "gradient" else 1.0

    def check(o: dict[str, np.ndarray], t: int, played: object) -> None:
        y = tree.leaves(played.server.memory["fedvarp"], "y")
        assert distance(tree.scale(y, -size), tensors(o, f"r{t}.y.")) < 1e-12

    follow(name, f"fedvarp(memory='{memory}')", check)


# --- laws ------------------------------------------------------------------------------------


def test_of_all_clients_it_is_fedavg() -> None:
    assert gap(play("fedvarp", rounds=4), play("fedavg", rounds=4, weights="uniform")) < 1e-13


def test_the_first_round_is_fedavgs_and_the_second_is_not() -> None:
    ours, plain = federation("fedvarp"), federation("fedavg", weights="uniform")
    ours.round([0, 2])
    plain.round([0, 2])
    assert gap(ours.params, plain.params) < 1e-14
    ours.round([1, 3])
    plain.round([1, 3])
    assert gap(ours.params, plain.params) > 1e-3


@pytest.mark.slow
def test_it_stands_still_where_fedavg_with_all_clients_would() -> None:
    """Two of three clients a round, in turn; FedAvg goes round in circles instead."""
    quadratics = Quadratics()
    there = quadratics.fixed_point(0.1, 0.0, np.ones(3))

    def errors(expression: str) -> list[float]:
        ends = [
            quadratics.play(expression, 0.1, 0.0, rounds, lambda t: [t % 3, (t + 1) % 3])
            for rounds in (120, 121, 122)
        ]
        return [float(np.linalg.norm(end - there)) for end in ends]

    assert max(errors("fedvarp")) < 1e-8
    assert min(errors("fedavg")) > 0.05
