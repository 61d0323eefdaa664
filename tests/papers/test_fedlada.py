"""FedLADA, restated from Sun et al. 2023, section 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from harness import Federation
from method.players import LOCAL, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, flat

LR = 0.02
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def fedlada(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    alpha: float,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    decay: float = 0.0,
) -> Iterator[Told]:
    x = setup.start
    v_mean, g_a = np.full_like(x, eps**2), np.zeros_like(x)
    for t, clients in enumerate(cohorts):
        sent, largest, counts = {}, {}, []
        for i in clients:
            y, m, v, v_hat = x, np.zeros_like(x), v_mean, v_mean
            for batch in setup.examples(i, t):
                g = setup.net.grad(y, *batch)
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                v_hat = np.maximum(v_hat, v)
                along = alpha * m / np.sqrt(v_hat) + (1 - alpha) * g_a
                y = y - LR * (along + decay * y)
            sent[i], largest[i] = y - x, v_hat
            counts.append(len(setup.batches(i, t)))
        mean = np.mean(list(sent.values()), axis=0)
        x, g_a = x + mean, -mean / (LR * np.mean(counts))
        v_mean = np.mean(list(largest.values()), axis=0)
        yield Told(x, sent, {"v": v_mean, "direction": g_a})


def look(ours: Federation) -> Mapping[str, Vector]:
    memory = ours.played.server.memory["fedlada"]
    return {name: flat(memory[name]) for name in ("v", "direction")}


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("", {"alpha": 0.1}),
        (
            "alpha=0.6, beta1=0.5, beta2=0.9, eps=0.1",
            {"alpha": 0.6, "b1": 0.5, "b2": 0.9, "eps": 0.1},
        ),
        ("alpha=1.0", {"alpha": 1.0, "decay": 0.1}),
    ],
)
def test_fedlada(options: str, values: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedlada({options})", LR, weight_decay=values.get("decay", 0.0))
    assert agree(ours, fedlada(setup, COHORTS, **values), COHORTS, look, 1e-10) == len(COHORTS)


# --- laws ------------------------------------------------------------------------------------


def test_the_first_round_is_that_of_a_smaller_learning_rate() -> None:
    small = LOCAL.model_copy(update={"lr": 0.25 * LOCAL.lr})
    ours = play("fedlada(alpha=0.25)", rounds=1)
    assert gap(ours, play("fedlada(alpha=1.0)", rounds=1, local=small)) < 1e-14


def test_above_all_gradients_it_is_fedavg() -> None:
    """v-hat is then its first value: nothing adapts, and steps are alpha / eps times as long."""
    fast = LOCAL.model_copy(update={"lr": 1e4 * LOCAL.lr})
    ours = play("fedlada(alpha=1.0, beta1=0.0, eps=1e4)", rounds=3, local=fast)
    assert gap(ours, play("fedavg", rounds=3, weights="uniform")) < 1e-12
