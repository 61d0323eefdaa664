"""FedTrip, restated from Li et al. 2023, with the weight 1 / (t - tau) of its public codes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from fedkeel import tree
from harness import Federation
from method.players import equal, federation, gap, play
from papers import personal
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
COHORTS = [*personal.COHORTS[:2], [], [], *personal.COHORTS[2:]]  # nobody comes in two rounds


def fedtrip(setup: TrainingSetup, mu: float, **local: float) -> Iterator[Told]:
    x, last = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            model, since = (last[i][0], t - last[i][1]) if i in last else (x, 1)

            def at(bx, by, model=model, since=since, x=x):
                return lambda w: setup.net.grad(w, bx, by) + mu * (w - x) + mu / since * (model - w)

            end = descend(x, (at(*batch) for batch in setup.examples(i, t)), LR, **local)
            last[i], sent[i] = (end, t), end - x
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent, {f"last{i}": model for i, (model, _) in last.items()})


def look(ours: Federation) -> dict[str, Vector]:
    states = ours.played.client_state.items()
    return {f"last{i}": flat(state["fedtrip"]["last"]) for i, state in states}


@pytest.mark.parametrize("mu", [0.4, 2.0])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedtrip(mu: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    agree(setup.ours(f"fedtrip(mu={mu})", LR, **ours), fedtrip(setup, mu, **local), COHORTS, look)


# --- laws and reductions ---------------------------------------------------------------------


def test_without_weight_and_in_the_first_round_it_is_fedavg() -> None:
    assert equal(play("fedtrip(mu=0.0)"), play("fedavg"))
    assert gap(play("fedtrip(mu=2.0)", rounds=1), play("fedavg", rounds=1)) < 1e-14
    assert gap(play("fedtrip(mu=2.0)", rounds=2), play("fedavg", rounds=2)) > 1e-3


def test_in_the_next_round_it_is_a_constant_force_to_the_received_model() -> None:
    """Of two clients that end apart, the force is the same in every step of a round."""
    played = federation("fedtrip(mu=0.5)")
    played.round()
    message = played.message([0])
    last = tree.leaves(played.played.client_state[0]["fedtrip"], "last")
    (part,) = played.plan.parts
    step = SimpleNamespace(
        start=message.params,
        broadcast=message.broadcast["fedtrip"],
        client_state=played.played.client_state[0]["fedtrip"],
    )
    expected = tree.scale(tree.sub(last, message.params), 0.5)
    for shift in (0.0, 1.0, -3.0):
        params = {k: v + shift for k, v in message.params.items()}
        assert gap(part.penalty_gradient(params, step), expected) < 1e-14


def test_the_push_gets_weaker_with_the_rounds() -> None:
    played = federation("fedtrip(mu=0.5)")
    for cohort in ([0], [1], [1], [1]):
        played.round(cohort)
    state = played.played.client_state[0]["fedtrip"]
    assert float(state["round"]) == 0.0
    assert float(played.message([0]).broadcast["fedtrip"]["round"]) == 4.0
    assert np.isclose(float(played.played.client_state[1]["fedtrip"]["round"]), 3.0)
