"""FedAvg, FedSGD, Minibatch SGD, FedProx and server momentum, restated.

McMahan et al. 2017, Algorithm 1; Woodworth et al. 2020, section 3; Li et al. 2020, Algorithm 2;
Hsu et al. 2019, section 4.3; FedGH's slides repeat FedProx as their "Algorithm 2".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from each import each
from papers.numpy_net import Told, TrainingSetup, agree, descend

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def fedavg(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    weights: str = "examples",
    mu: float = 0.0,
    server_lr: float = 1.0,
    beta: float = 0.0,
    damping: float = 0.0,
    ahead: bool = False,
    **local: object,
) -> Iterator[Told]:
    theta, v = setup.start, np.zeros_like(setup.start)
    for t, clients in enumerate(cohorts):
        sent = {}
        for k in clients:  # mcmahan2017, ClientUpdate(k, w)

            def at(x, y, theta=theta):  # li2020fedprox: grad of F_k(w) + mu/2 |w - w^t|^2
                return lambda w: setup.net.grad(w, x, y) + mu * (w - theta)

            steps = (at(x, y) for x, y in setup.examples(k, t))
            sent[k] = descend(theta, steps, LR, **local) - theta
        p = setup.shares(weights, clients, t)
        mean = sum(share * sent[k] for share, k in zip(p, clients, strict=True))
        # hsu2019: v <- beta v + mean, w <- w + v, with what public codes add to it
        entering = (1 - damping) * mean
        v = beta * v + entering
        theta = theta + server_lr * (entering + beta * v if ahead else v)
        yield Told(theta, sent)


@each("weights", ["examples", "uniform", "processed"])
@each(
    "local",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.8, "nesterov": True},
        {"weight_decay": 0.05},
        {"momentum": 0.7, "nesterov": True, "weight_decay": 0.02},
    ],
)
def test_fedavg(weights: str, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    theirs = {**local, "decay": local.get("weight_decay", 0.0)}
    theirs.pop("weight_decay", None)
    story = fedavg(setup, COHORTS, weights, **theirs)
    agree(setup.ours("fedavg", LR, weights=weights, **local), story, COHORTS)


def test_fedavg_counts_processed_examples_where_passes_differ() -> None:
    """Clients make 1, 2, 3 and 4 mini-batches of unequal size, as FedGC's n_k allows."""
    setup = TrainingSetup()
    setup.batches = lambda k, t: [np.arange(t % 2 + 2 + s) for s in range(k + 1)]  # type: ignore
    assert len(set(setup.shares("processed", range(4)))) == 4
    agree(
        setup.ours("fedavg", LR, weights="processed"),
        fedavg(setup, [range(4)] * 3, "processed"),
    )


def test_fedsgd_is_one_step_on_everything() -> None:
    """theta <- theta - eta sum_k p_k grad F_k(theta), mcmahan2017 section 2."""
    setup = TrainingSetup(batch=1000)
    ours = setup.ours("fedsgd", LR, epochs=5, batch_size=3)
    assert (ours.training.local.steps, ours.training.local.epochs) == (1, None)
    assert ours.training.local.batch_size == "all"

    def story() -> Iterator[Told]:
        theta = setup.start
        for clients in COHORTS:
            p = setup.shares("examples", clients)
            full = [setup.net.grad(theta, *setup.data[k]) for k in clients]
            theta = theta - LR * sum(s * g for s, g in zip(p, full, strict=True))
            yield Told(theta)

    agree(ours, story(), COHORTS)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_minibatch_sgd_takes_every_gradient_at_the_received_model(weights: str) -> None:
    """woodworth2020 section 3; fedgc.txt line 62: (1/B) sum_b g_{k,b} at theta_{k,0}."""
    setup = TrainingSetup(epochs=2)

    def story() -> Iterator[Told]:
        theta = setup.start
        for t, clients in enumerate(COHORTS):
            sent = {
                k: -LR * np.mean([setup.net.grad(theta, x, y) for x, y in setup.examples(k, t)], 0)
                for k in clients
            }
            p = setup.shares(weights, clients)
            theta = theta + sum(s * sent[k] for s, k in zip(p, clients, strict=True))
            yield Told(theta, sent)

    agree(setup.ours("minibatch_sgd", LR, weights=weights), story(), COHORTS)


@pytest.mark.parametrize(
    "local", [{}, {"momentum": 0.9, "decay": 0.03}, {"momentum": 0.6, "nesterov": True}]
)
def test_fedprox(local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    agree(
        setup.ours("fedprox(mu=0.7)", LR, **ours), fedavg(setup, COHORTS, mu=0.7, **local), COHORTS
    )


@pytest.mark.parametrize(
    ("expression", "server"),
    [
        ("momentum(beta=0.9)", {"beta": 0.9}),
        ("momentum(beta=0.6, lr=0.5)", {"beta": 0.6, "server_lr": 0.5}),
        ("momentum(beta=0.6, damping=True)", {"beta": 0.6, "damping": 0.6}),
        ("momentum(beta=0.6, nesterov=True)", {"beta": 0.6, "ahead": True}),
        ("fedprox(mu=0.4)+momentum(beta=0.5)", {"mu": 0.4, "beta": 0.5}),
        ("fedavg+addition(lr=0.4)", {"server_lr": 0.4}),
    ],
)
def test_server_momentum(expression: str, server: dict) -> None:
    setup = TrainingSetup()
    agree(setup.ours(expression, LR), fedavg(setup, COHORTS, **server), COHORTS)
