"""FedCM, restated from Xu et al. 2021, Algorithm 2.

The paper's clients make K steps each. Where they do not, the mean length of their paths takes the
place of K; under local momentum the length is that of a unit gradient's path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from each import each
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.method.server_round import server_message, server_round
from harness import Federation, consecutive, stack
from method.players import LOCAL, SIZE, equal, federation, gap, play, skewed
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=SIZE, momentum=0.9, weight_decay=0.01)


def fedcm(
    setup: TrainingSetup,
    alpha: float,
    server_lr: float = 1.0,
    weights: str = "uniform",
    **local: float,
) -> Iterator[Told]:
    x, past = setup.start, np.zeros_like(setup.start)
    rho = local.get("momentum", 0.0)
    for t, clients in enumerate(COHORTS):
        sent, lengths = {}, []
        for i in clients:

            def at(bx, by, past=past):  # v = alpha g + (1 - alpha) Delta
                return lambda w: alpha * setup.net.grad(w, bx, by) + (1 - alpha) * past

            steps = [at(*batch) for batch in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR, **local) - x
            lengths.append(sum((1 - rho ** (s + 1)) / (1 - rho) for s in range(len(steps))))
        p = setup.shares(weights, clients, t)
        update = sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        K = sum(s * length for s, length in zip(p, lengths, strict=True))
        past = -update / (K * LR)  # -1 / (eta_l K |S|) sum over S
        x = x - server_lr * K * LR * past  # x - eta_g Delta, with the paper's eta_g = K eta_l
        yield Told(x, sent, {"mean": past})


def look(ours: Federation) -> Mapping[str, Vector]:
    return {"mean": flat(ours.played.server.memory["fedcm"]["mean"])}


@each("alpha", [0.1, 0.6])
@each("local", [{}, {"momentum": 0.9}, {"momentum": 0.5, "decay": 0.05}])
@each("weights", ["uniform", "examples"])
def test_fedcm(alpha: float, local: dict, weights: str) -> None:
    """Clients of 3, 2, 3 and 2 mini-batches: their paths are unequal."""
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = fedcm(setup, alpha, weights=weights, **local)
    agree(setup.ours(f"fedcm(alpha={alpha})", LR, weights=weights, **ours), story, COHORTS, look)


def test_fedcm_with_a_server_learning_rate() -> None:
    setup = TrainingSetup()
    story = fedcm(setup, 0.3, server_lr=0.5)
    agree(setup.ours("fedcm(alpha=0.3, lr=0.5)", LR), story, COHORTS, look)


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_past_is_fedavg_bit_for_bit(local: Local) -> None:
    plain = play("fedavg", weights="uniform", local=local, rounds=3)
    assert equal(play("fedcm(alpha=1.0)", local=local, rounds=3), plain)
    slow = play("addition(lr=0.5)", weights="uniform", local=local, rounds=3)
    assert equal(play("fedcm(alpha=1.0, lr=0.5)", local=local, rounds=3), slow)
    assert gap(play("fedcm(alpha=0.9)", local=local, rounds=3), plain) > 1e-3


def test_the_first_round_is_fedavgs_with_a_smaller_learning_rate() -> None:
    """The past is 0: steps are alpha times as long."""
    small = Local(lr=LOCAL.lr * 0.25, epochs=2, batch_size=SIZE)
    ours = play("fedcm(alpha=0.25)", rounds=1)
    assert gap(ours, play("fedavg", weights="uniform", local=small, rounds=1)) < 1e-14


def test_the_model_moves_by_the_mean_gradient_times_the_path() -> None:
    """theta' - theta = -eta K g-bar, also where clients make 6, 4, 10 and 6 steps."""
    played = federation("fedcm")
    for _ in range(3):
        start = played.params
        done = played.round()
        mean = done.server.memory["fedcm"]["mean"]
        moved = {k: -LOCAL.lr * (6 + 4 + 10 + 6) / 4 * mean[k] for k in start}  # type: ignore
        assert gap({k: v - start[k] for k, v in played.params.items()}, moved) < 1e-12


def test_the_rate_divided_by_is_that_of_the_round() -> None:
    """The same replies of a round at half the rate mean gradients that are twice as large."""
    played = federation("fedcm")
    found = {k: played.reply(k) for k in range(4)}
    replies = stack(list(found), found, [len(y) for _, y in skewed()])
    server, means = played.played.server, []
    for lr in (0.1, 0.05):
        message = server_message(played.plan, server, lr)
        done = server_round(played.plan, server, message, replies, played.population, 0)
        means.append(done.server.memory["fedcm"])
    assert gap({k: 2.0 * v for k, v in means[0]["mean"].items()}, means[1]["mean"]) < 1e-15  # type: ignore


def test_with_fednova_the_mean_gradient_is_a_mean_of_clients_gradients() -> None:
    """Updates arrive divided by their paths and leave times the mean path."""
    played = federation("fedcm+fednova")
    played.round()
    start = played.params
    before = played.played.server.memory["fedcm"]["mean"]
    done = played.round()
    after = done.server.memory["fedcm"]["mean"]
    per_step = {
        k: sum(update[k] for update in done.deltas.values()) / (4 * -LOCAL.lr) for k in start
    }
    assert gap(after, per_step) < 1e-12  # type: ignore[arg-type]
    assert gap(after, before) > 1e-2  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_ends_where_fedavg_with_a_smaller_learning_rate_ends() -> None:
    """At rest the aggregate is 0 and so is the past: alpha then only shortens the steps."""
    quadratics = Quadratics()
    ended = quadratics.play("fedcm(alpha=0.3)", 0.2, 0.0, 400)
    assert np.linalg.norm(ended - quadratics.fixed_point(0.06, 0.0, np.ones(3))) < 1e-8
    assert np.linalg.norm(ended - quadratics.fixed_point(0.2, 0.0, np.ones(3))) > 0.01
    assert np.linalg.norm(ended - quadratics.optimum) > 0.1  # it does not cure unequal local work


def test_what_is_sent_is_one_model_down_and_one_number_up() -> None:
    played = federation("fedcm", batches=lambda k, _: consecutive(len(skewed()[k][1]), SIZE, 2))
    done = played.round()
    for reply, steps in zip(done.replies.values(), (6, 4, 10, 6), strict=True):
        assert float(reply.uploads["fedcm"]["path"]) == steps
    assert parse("fedprox(mu=0.5)+fedcm").pull == 0.0  # alpha weighs the term too
