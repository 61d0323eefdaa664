"""FedAMS, restated from Wang, Lin and Chen 2022, Algorithm 1, without compression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from each import each
from fedkeel.method.grammar import parse
from harness import Federation
from method.players import federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]


def fedams(
    setup: TrainingSetup,
    *,
    eta: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    option: int = 1,
    start: float | None = None,
    correction: bool = False,
) -> Iterator[Told]:
    x = setup.start
    m, v = np.zeros_like(x), np.zeros_like(x)
    hat = np.full_like(x, eps if start is None else start)
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = [lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR) - x
        update = np.mean([sent[i] for i in clients], axis=0)
        m = beta1 * m + (1 - beta1) * update
        v = beta2 * v + (1 - beta2) * update**2
        hat = np.array([max(a, b) for a, b in zip(hat, v, strict=True)])
        if option == 1:
            hat = np.array([max(a, eps) for a in hat])
        moment, under = m, np.sqrt(hat)
        if correction:  # public code: m / (1 - beta1^t), sqrt(v^) / sqrt(1 - beta2^t) + eps
            moment = m / (1 - beta1 ** (t + 1))
            under = np.sqrt(hat) / np.sqrt(1 - beta2 ** (t + 1))
        x = x + eta * moment / (under if option == 1 else under + eps)
        yield Told(x, sent, {"m": m, "v": v, "hat": hat})


def look(ours: Federation) -> Mapping[str, Vector]:
    state = ours.played.server.memory["fedams"]
    return {"m": flat(state["m"]), "v": flat(state["v"]), "hat": flat(state["largest"])}


@each("option", [1, 2])
@each("correction", [False, True])
@each(
    "given",
    [
        {},
        {"start": 0.0, "eps": 1e-5},
        {"start": 2e-4, "eps": 1e-4, "beta2": 0.5, "beta1": 0.6, "eta": 0.05},
    ],
)
def test_fedams(option: int, correction: bool, given: dict) -> None:
    setup = TrainingSetup(epochs=2)
    story = fedams(setup, option=option, correction=correction, **given)
    text = "".join(f", {'lr' if k == 'eta' else k}={v!r}" for k, v in given.items())
    ours = setup.ours(
        f"fedams(option={option}, correction={correction}{text})", LR, weights="uniform"
    )
    agree(ours, story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


def test_the_largest_moment_never_falls() -> None:
    played = federation("fedams(beta2=0.0, eps=1e-12)")
    seen = [look(played)["hat"]]
    above = False
    for selected in ([0, 1, 2, 3], [0], [2], [1, 3]):
        played.round(selected)
        now = look(played)
        seen.append(now["hat"])
        assert np.all(seen[-1] >= seen[-2])
        assert np.all(seen[-1] >= now["v"])
        above = above or bool(np.any(now["hat"] > now["v"]))
    assert above  # it did hold some moments up


def test_a_large_epsilon_is_server_momentum() -> None:
    """No moment reaches it, so that every entry is divided by its root."""
    ours = play("fedams(eps=1e4, lr=50.0)", rounds=4)
    assert gap(ours, play("momentum(beta=0.9, lr=0.5, damping=True)", rounds=4)) < 1e-12


def test_option_2_is_fedadam_until_a_moment_falls() -> None:
    """In the first round none has; with a short memory some do in the second."""
    for rounds, apart in ((1, False), (3, True)):
        ours = play("fedams(option=2, start=0.0, beta2=0.1)", rounds=rounds)
        theirs = play("fedadam(v0='zero', beta2=0.1)", rounds=rounds)
        assert (gap(ours, theirs) > 1e-4) == apart
        assert apart or gap(ours, theirs) < 1e-14


def test_the_defaults_are_the_papers() -> None:
    part = parse("fedams").server_optimiser
    assert (part.beta1, part.beta2, part.eps, part.option) == (0.9, 0.99, 1e-3, 1)  # type: ignore
    assert not part.correction  # type: ignore[attr-defined]
