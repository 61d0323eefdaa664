"""MOON, restated from Li et al. 2021, Eq. (3) and Algorithm 1: two angles for each example."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel import tree
from harness import Federation
from method.players import LOCAL, equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, flat, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 2]]
"""Clients 0 and 1 stay away between rounds in which they take part."""


def angle(z: np.ndarray, other: np.ndarray) -> tuple[float, np.ndarray]:
    """The cosine, and its derivative by z; a vector of zeros has neither."""
    a, b = np.linalg.norm(z), np.linalg.norm(other)
    if a == 0 or b == 0:
        return 0.0, np.zeros_like(z)
    cosine = z @ other / (a * b)
    return cosine, other / (a * b) - cosine * z / a**2


def moon(setup: TrainingSetup, mu: float, tau: float, **local: object) -> Iterator[Told]:
    last: dict[int, Vector] = {}

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        hidden, scores = setup.net.outputs(w, bx)
        received, past = (setup.net.outputs(v, bx)[0] for v in (x, last.get(i, x)))
        pulls = np.zeros_like(hidden)
        for row, z in enumerate(hidden):
            near, by_near = angle(z, received[row])
            far, by_far = angle(z, past[row])
            share = np.exp(far / tau) / (np.exp(near / tau) + np.exp(far / tau))
            pulls[row] = mu * share * (by_far - by_near) / tau
        slopes = (softmax(scores) - np.eye(3)[by]) / len(bx)
        return setup.net.pull_back(w, bx, slopes, pulls / len(bx))

    def ended(i: int, end: Vector) -> None:
        ends[i] = end

    ends: dict[int, Vector] = {}
    for told in averaged(setup, COHORTS, gradient, LR, ended, **local):
        last.update(ends)
        yield Told(told.model, told.sent, {f"last{i}": v for i, v in last.items()})


def look(ours: Federation) -> dict[str, Vector]:
    return {
        f"last{i}": flat(client_state["moon"]["last"])
        for i, client_state in ours.played.client_state.items()
    }


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.2)])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_moon(mu: float, tau: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = moon(setup, mu, tau, **local)
    agree(setup.ours(f"moon(mu={mu}, tau={tau})", LR, **ours), story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_is_fedavg_bit_for_bit(local: object) -> None:
    assert equal(play("moon(mu=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("moon", local=local), play("fedavg", local=local)) > 1e-4


def test_a_clients_first_round_is_fedavgs() -> None:
    """Its last model is the received one, and nothing can be nearer to one than to the other."""
    assert gap(play("moon(mu=50.0)", rounds=1), play("fedavg", rounds=1)) < 1e-12
    assert gap(play("moon(mu=50.0)", rounds=2), play("fedavg", rounds=2)) > 1e-2


def test_a_client_keeps_its_own_last_model_while_it_is_away() -> None:
    played = federation("moon")
    first = played.round([0, 1]).client_state[0]
    kept = tree.leaves(first["moon"], "last")
    assert gap(kept, tree.add(played.network.params, played.played.deltas[0])) < 1e-15
    assert played.round([2, 3]).client_state[0] is first
    played.round([0, 2])
    assert not equal(tree.leaves(played.played.client_state[0]["moon"], "last"), kept)


def test_dead_features_give_no_nan() -> None:
    """With a bias of -100 no hidden unit is active."""
    played = federation("moon")
    played.params["fc1.bias"].fill_(-100.0)
    for _ in range(2):
        done = played.round()
    assert all(bool(torch.isfinite(v).all()) for v in played.params.values())
    assert not done.deltas[0]["fc1.weight"].any()
