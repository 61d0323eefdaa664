"""FedRoD, restated from Chen and Chao 2022, Eq. (5) to (7), with a linear personal head."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from harness import distance, oracle
from method.players import equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, flat, softmax
from papers.personal import COHORTS, HEAD, collected, follow, kept, mask, tensors

LR = 0.2


def balanced(
    setup: TrainingSetup, w: Vector, x: np.ndarray, y: np.ndarray, counts: np.ndarray, gamma: float
) -> Vector:
    """The gradient of the balanced softmax loss."""
    _, z = setup.net.outputs(w, x)
    with np.errstate(divide="ignore"):
        shifted = z + (gamma * np.log(counts) if gamma else np.where(counts > 0, 0.0, -np.inf))
    return setup.net.pull_back(w, x, (softmax(shifted) - np.eye(3)[y]) / len(y))


def fedrod(setup: TrainingSetup, gamma: float) -> Iterator[Told]:
    w, own, head = setup.start, {}, mask(setup.net, HEAD)
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            counts = np.bincount(setup.data[i][1], minlength=3).astype(float)
            h, local = own.get(i, w[head]), w
            for bx, by in setup.examples(i, t):
                both = local.copy()
                both[head] += h
                h = h - LR * setup.net.grad(both, bx, by)[head]
                local = local - LR * balanced(setup, local, bx, by, counts, gamma)
            own[i], sent[i] = h, local - w
        p = setup.shares("examples", clients)
        w = w + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(w, sent, {f"local_model{i}": h for i, h in own.items()})


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("labels", [None, [[0, 1], [1, 2], [0, 2], [0, 1, 2]]])
def test_fedrod(gamma: float, labels: list[list[int]] | None) -> None:
    setup = TrainingSetup(epochs=2, seed=4, labels=labels)  # some have one class, some two
    ours = setup.ours(f"fedrod(gamma={gamma})", LR)
    agree(ours, fedrod(setup, gamma), COHORTS, lambda f: kept(f, "local_model"))


def test_fedrod_follows_pfllib() -> None:
    o = oracle("pfllib_fedrod_a")
    played = collected(o, "fedrod", int(o["hp.epochs"]))

    def look(t: int, k: int) -> dict[str, float]:
        ours = played.played.client_state[k]["local_model"]
        theirs = tensors(o, f"r{t}.client{k}.personal_head.", ("weight", "bias"))
        return {"head": distance({n.removeprefix("fc2."): v for n, v in ours.items()}, theirs)}

    follow(o, played, look)


# --- laws and reductions ---------------------------------------------------------------------


def test_of_all_classes_and_without_an_exponent_the_global_model_is_fedavgs() -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 8)), np.arange(n) % 3) for n in (12, 7, 18, 10)]
    assert equal(play("fedrod(gamma=0.0)", data), play("fedavg", data))
    assert gap(play("fedrod", data), play("fedavg", data)) > 1e-4


def test_of_balanced_classes_the_global_model_is_fedavgs() -> None:
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(n, 8)), np.arange(n) % 3) for n in (12, 9, 6)]
    assert gap(play("fedrod", data), play("fedavg", data)) < 1e-13


def test_the_personal_head_does_not_move_the_global_model() -> None:
    """Two clients of the same examples and other heads send the same update."""
    played = federation("fedrod")
    first = played.round([0])
    head = first.client_state[0]["local_model"]
    before = {k: v.clone() for k, v in head.items()}
    plain = played.reply(0)[0].update
    for value in head.values():
        value.add_(1.0)
    assert equal(played.reply(0)[0].update, plain)
    assert flat(before).shape == (21,)
