"""FedALA, restated from Zhang et al. 2023, Algorithm 1, and compared with PFLlib."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel.runner.start import start
from harness import Federation, distance, oracle
from method.players import equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat
from papers.personal import COHORTS, HEAD, NAMES, collected, follow, mask, tensors
from toys import Net, prepared, same

LR = 0.2


def fedala(
    setup: TrainingSetup,
    names: tuple[str, ...],
    eta: float,
    passes: int,
    first: int,
    **local: float,
) -> Iterator[Told]:
    adapted, x = mask(setup.net, names), setup.start
    ends: dict[int, Vector] = {}
    W, rounds = {}, dict.fromkeys(range(len(setup.sizes)), 0)
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            W.setdefault(i, np.ones_like(x))
            begin = x.copy()
            if rounds[i]:
                bx, by = setup.data[i]
                count = -(-len(by) // setup.batch)
                change = np.where(adapted, x - ends[i], 0.0)
                begin = np.where(adapted, ends[i] + W[i] * change, x)
                for _ in range(first if rounds[i] == 1 else passes):
                    for b in range(count):
                        g = setup.net.grad(begin, bx[b::count], by[b::count])
                        W[i] = np.clip(W[i] - eta * g * change, 0.0, 1.0)
                        begin = np.where(adapted, ends[i] + W[i] * change, x)
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            ends[i] = descend(begin, steps, LR, **local)
            rounds[i], sent[i] = rounds[i] + 1, ends[i] - x
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent, {f"W{i}": W[i] for i in clients})


def look(ours: Federation) -> dict[str, Vector]:
    states = ours.played.client_state.items()
    return {f"W{i}": flat(state["fedala"]["W"]) for i, state in states}


@pytest.mark.parametrize(
    ("adapt", "names", "eta", "passes", "first"),
    [("", HEAD, 1.0, 1, 11), ("*", NAMES, 4.0, 2, 3), ("fc2.weight", HEAD[:1], 20.0, 3, 0)],
)
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}])
def test_fedala(
    adapt: str, names: tuple[str, ...], eta: float, passes: int, first: int, local: dict
) -> None:
    """The weights stay from round to round; they began at 1 in each."""
    setup = TrainingSetup(epochs=2)
    method = f"fedala(adapt='{adapt}', lr={eta}, passes={passes}, first={first})"
    ours = setup.ours(method, LR, **local)
    agree(ours, fedala(setup, names, eta, passes, first, **local), COHORTS, look)
    ends = list(look(ours).values())
    assert min(W.min() for W in ends) < 0.9
    assert all(W.max() == 1.0 for W in ends)


def test_it_follows_pfllib() -> None:
    """There mini-batches are consecutive: ours take every n-th example, so they lie that way."""
    o = oracle("pfllib_fedala_a")
    size, given = int(o["hp.batch_size"]), dict(o)
    place: dict[int, np.ndarray] = {}
    for k in range(3):
        n = len(o[f"client{k}.y"])
        count = n // size
        assert n == count * size
        place[k] = np.argsort(np.concatenate([np.arange(n)[b::count] for b in range(count)]))
        given |= {f"client{k}.{name}": o[f"client{k}.{name}"][place[k]] for name in "xy"}

    def batches(k: int, _: int) -> list[np.ndarray]:
        where = np.argsort(place[k])
        return [where[i : i + size] for _ in range(2) for i in range(0, len(where), size)]

    played = collected(given, "fedala", 2, batches)

    def kept(t: int, k: int) -> dict[str, float]:
        if t == 1:
            return {}
        W = played.played.client_state[k]["fedala"]["W"]
        theirs = tensors(o, f"r{t}.client{k}.mix.", HEAD)
        return {"W": distance({n: W[n] for n in HEAD}, theirs)}

    follow(o, played, kept)


# --- laws and reductions ---------------------------------------------------------------------


def test_without_passes_and_in_the_first_round_it_is_fedavg() -> None:
    assert equal(play("fedala(passes=0, first=0)", rounds=3), play("fedavg", rounds=3))
    assert equal(play("fedala", rounds=1), play("fedavg", rounds=1))
    assert gap(play("fedala", rounds=2), play("fedavg", rounds=2)) > 1e-3


def test_the_weights_go_on_from_round_to_round() -> None:
    """Without passes in later rounds they are those of the second one, and still act."""
    played = federation("fedala(passes=0, first=20)")
    played.round()
    second = played.round().client_state[0]["fedala"]["W"]
    third = played.round().client_state[0]["fedala"]["W"]
    assert equal(second, third)
    assert min(float(w.min()) for w in third.values()) < 1.0


def test_an_evaluation_draws_its_masks_by_the_seed() -> None:
    """Dropout in the steps of W came from the process's own generator when models were measured."""
    kind = {"model": partial(Net, dropout=0.5), "per_round": 6}
    every = fk.Evaluation(batch_size=16, clients_every=1)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(start(prepared("fedala(adapt='fc2', lr=9.0)", evaluation=every, **kind)))
    assert same(*runs)
