"""FedSpeed, restated from Sun et al. 2023, Algorithm 1, with a step uphill of a fixed length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from harness import Federation, distance, oracle, tensors
from method.players import LOCAL, federation, gap, play
from method.test_theory import Quadratics
from papers.fl_simulator import CLIENTS, ROUNDS, compare, simulated
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def fedspeed(
    setup: TrainingSetup, rho: float, alpha: float, lam: float, **local: float
) -> Iterator[Told]:
    x = setup.start
    hat = {i: np.zeros_like(x) for i in range(len(setup.sizes))}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:

            def at(bx, by, x=x, h=hat[i]):
                def quasi(y: Vector) -> Vector:
                    g1 = setup.net.grad(y, bx, by)
                    g2 = setup.net.grad(y + rho * g1 / np.sqrt(np.sum(g1**2)), bx, by)
                    return (1 - alpha) * g1 + alpha * g2 - h + (y - x) / lam

                return quasi

            steps = [at(*batch) for batch in setup.examples(i, t)]
            end = descend(x, iter(steps), LR, **local)
            hat[i] = hat[i] - (end - x) / lam
            sent[i] = end - lam * hat[i] - x
        p = setup.shares("uniform", clients)
        x = sum(s * (sent[i] + x) for s, i in zip(p, clients, strict=True))
        yield Told(x, sent, {f"h{i}": hat[i] for i in clients})


def look(ours: Federation) -> dict[str, Vector]:
    return {f"h{i}": flat(state["fedspeed"]["h"]) for i, state in ours.played.client_state.items()}


@each(("rho", "alpha"), [(0.1, 1.0), (0.5, 0.75), (0.3, 0.0)])
@each("lam", [10.0, 1.0])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedspeed(rho: float, alpha: float, lam: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fedspeed(rho={rho}, alpha={alpha}, lam={lam})"
    story = fedspeed(setup, rho, alpha, lam, **local)
    agree(setup.ours(expression, LR, **ours), story, COHORTS, look)


# --- the authors' code -----------------------------------------------------------------------


def test_fedspeed_follows_its_authors() -> None:
    """They add 1e-7 to a norm of about 1, which is seen in the eighth digit."""
    o = oracle("fedspeed_a")
    lam = 1 / float(o["hp.lamb"])
    played = simulated(o, f"fedspeed(rho={float(o['hp.rho'])!r}, lam={lam!r})")
    for t in ROUNDS:
        done = played.round()
        for k in CLIENTS:  # theirs sends the local model, and the server knows the corrections
            state = done.client_state[k]["fedspeed"]
            own = tree.scale(tree.leaves(state, "h"), -lam)
            done.deltas[k] = tree.sub(done.deltas[k], own)
            assert distance(own, tensors(o, f"r{t}.client{k}.h.")) < 1e-7
        compare(o, t, done, 1e-7)


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
@pytest.mark.parametrize("nothing", ["rho=0.0", "alpha=0.0"])
def test_without_a_step_uphill_it_is_feddyn_of_all_clients(local: Local, nothing: str) -> None:
    ours = play(f"fedspeed({nothing}, lam=4.0)", local=local, rounds=3)
    assert gap(ours, play("feddyn(alpha=0.25)", local=local, rounds=3)) < 1e-12
    assert gap(play("fedspeed(lam=4.0)", local=local, rounds=3), ours) > 1e-3


def test_of_some_clients_it_counts_the_corrections_of_those() -> None:
    """FedDyn divides by the number of all clients."""
    ours, theirs = federation("fedspeed(rho=0.0, lam=4.0)"), federation("feddyn(alpha=0.25)")
    start = ours.params
    for played in (ours, theirs):
        played.round([0, 2])
    moved, less = tree.sub(ours.params, start), tree.sub(theirs.params, start)
    assert gap(tree.scale(moved, (1 + 2 / 4) / (1 + 1)), less) < 1e-12


def test_a_clients_first_round_is_a_proximal_one_and_what_it_sends_twice_as_long() -> None:
    ours = federation("fedspeed(rho=0.0, lam=2.0)").round()
    theirs = federation("fedprox(mu=0.5)").round()
    for k, update in ours.deltas.items():
        assert gap(update, tree.scale(theirs.deltas[k], 2.0)) < 1e-13


@pytest.mark.slow
def test_it_ends_on_the_optimum_where_work_is_unequal() -> None:
    quadratics = Quadratics()
    ended = quadratics.play("fedspeed(rho=0.0, lam=2.0)", 0.2, 0.0, 400)
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8


def test_the_quadratic_term_pulls() -> None:
    assert parse("fedspeed(lam=4.0)").pull == 0.25
    assert parse("fedprox(mu=0.5)+fedspeed(lam=4.0)").pull == 0.75
