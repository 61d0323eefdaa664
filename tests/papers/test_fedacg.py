"""FedACG, restated from Kim, Kim and Han 2024, Algorithm 1.

The paper's new model is the mean of the clients' models, which is how it is written here; ours adds
the momentum. The other server step is that of GC-Fed's public code until August 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.task.network import Network
from harness import Federation
from method.players import LOCAL, equal, federation, gap, play
from method.test_theory import Line, Quadratics, squares
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def fedacg(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    lam: float,
    beta: float,
    step: str = "momentum",
    weights: str = "uniform",
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    m = np.zeros_like(x)
    for t, clients in enumerate(cohorts):
        ahead = x + lam * m  # what is sent
        y = {}
        for i in clients:

            def at(bx, by, ahead=ahead):  # the derivative of f + beta |y - ahead|^2
                return lambda w: setup.net.grad(w, bx, by) + 2 * beta * (w - ahead)

            steps = (at(*batch) for batch in setup.examples(i, t))
            y[i] = descend(ahead, steps, LR, **local)
        p = setup.shares(weights, clients, t)
        mean = sum(s * y[i] for s, i in zip(p, clients, strict=True))
        m = lam * m + (mean - ahead)
        x = mean if step == "momentum" else x + (mean - ahead)
        yield Told(x, {i: y[i] - ahead for i in clients}, {"m": m})


def look(ours: Federation) -> Mapping[str, Vector]:
    return {"m": flat(ours.played.server.memory["fedacg"]["m"])}


@each("step", ["momentum", "update"])
@each("given", [(0.85, 0.001), (0.5, 0.3)])
@each("local", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_fedacg(step: str, given: tuple[float, float], local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    theirs = dict(local)
    theirs["decay"] = theirs.pop("weight_decay", 0.0)
    story = fedacg(setup, COHORTS, *given, step, **theirs)
    expression = f"fedacg(lam={given[0]}, beta={given[1]}, step='{step}')"
    agree(setup.ours(expression, LR, **local), story, COHORTS, look)


def test_fedacg_weighted_by_examples() -> None:
    setup = TrainingSetup()
    cohorts = [[0, 1, 2], [1, 3], [0, 2, 3], [0, 1, 2, 3]]
    story = fedacg(setup, cohorts, 0.85, 0.01, weights="examples")
    agree(setup.ours("fedacg(beta=0.01)", LR, weights="examples"), story, cohorts, look)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_without_momentum_it_is_fedprox_and_without_both_fedavg(local: Local) -> None:
    options = {"local": local, "weights": "uniform", "rounds": 3}
    assert equal(play("fedacg(lam=0.0, beta=0.0)", **options), play("fedavg", **options))
    assert equal(play("fedacg(lam=0.0, beta=0.2)", **options), play("fedprox(mu=0.4)", **options))
    assert gap(play("fedacg(beta=0.0)", **options), play("fedavg", **options)) > 1e-3


def test_its_pull_is_twice_beta() -> None:
    assert parse("fedacg(beta=0.2)+fedprox(mu=0.1)+fednova").pull == pytest.approx(0.5)


def test_the_penalty_holds_clients_to_what_was_sent() -> None:
    """It is zero where they begin, which from the second round on is not the global model."""
    played = federation("fedacg(beta=50.0)", local=Local(lr=0.01, epochs=2, batch_size=4))
    played.round()
    ahead = played.message([0]).params
    assert gap(ahead, played.params) > 1e-4
    strong = max(float(d.abs().max()) for d in played.reply(0)[0].update.values())
    played.plan = parse("fedacg(beta=0.0)")
    played.training = federation("fedacg(beta=0.0)", local=played.training.local).training
    free = max(float(d.abs().max()) for d in played.reply(0)[0].update.values())
    assert strong < 0.7 * free


def quadratic(expression: str, lr: float) -> tuple[Quadratics, Federation]:
    """One full-batch step of every client in each round."""
    quadratics = Quadratics()
    network = Network(Line(), loss=squares, dtype=torch.float64)
    local = Local(lr=lr, steps=1)
    batches = lambda k, _: [np.arange(8)]  # noqa: E731
    played = Federation(expression, network, quadratics.data, local, batches, weights="uniform")
    return quadratics, played


def test_with_one_full_batch_step_it_is_nesterovs_gradient() -> None:
    lam, lr = 0.7, 0.1
    quadratics, played = quadratic(f"fedacg(lam={lam}, beta=0.0)", lr)
    H = sum(quadratics.H) / 3
    before = x = np.zeros(3)
    for _ in range(20):
        z = x + lam * (x - before)
        before, x = x, z - lr * H @ (z - quadratics.optimum)
        played.round()
        np.testing.assert_allclose(played.params["w"].numpy(), x, rtol=0, atol=1e-13)


def test_it_is_faster_than_fedavg_at_small_steps() -> None:
    def error(expression: str) -> float:
        quadratics, played = quadratic(expression, 0.02)
        for _ in range(60):
            played.round()
        return float(np.linalg.norm(played.params["w"].numpy() - quadratics.optimum))

    assert error("fedacg(lam=0.7, beta=0.0)") < 0.1 * error("fedavg")


def test_it_stands_still_where_fedavg_does() -> None:
    quadratics = Quadratics()
    ended = quadratics.play("fedacg(lam=0.5, beta=0.0)", 0.2, 0.0, 80)
    there = quadratics.fixed_point(0.2, 0.0, np.ones(3))
    np.testing.assert_allclose(ended, there, rtol=0, atol=1e-8)
