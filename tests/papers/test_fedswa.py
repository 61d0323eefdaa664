"""FedSWA and FedMoSWA, restated from Liu et al. 2025, Algorithms 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from fedkeel.config import Local
from fedkeel.config.local import Schedule
from harness import Federation
from method.players import equal, play
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, flat

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def fedswa(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    rho: float,
    alpha: float = 1.0,
    gamma: float | None = None,
) -> Iterator[Told]:
    """Without gamma there are no variates, and clients count by their examples."""
    x = setup.start
    c, own = np.zeros_like(x), {k: np.zeros_like(x) for k in range(len(setup.sizes))}
    for t, clients in enumerate(cohorts):
        sent, new = {}, {}
        for i in clients:
            y, batches = x, list(setup.examples(i, t))
            K = len(batches)
            rates = [(1 - k / K) * LR + k / K * rho * LR for k in range(K)]
            for eta, batch in zip(rates, batches, strict=True):
                y = y - eta * (setup.net.grad(y, *batch) - own[i] + c)
            new[i] = own[i] - c + (x - y) / sum(rates)
            sent[i] = y - x
        p = setup.shares("examples" if gamma is None else "uniform", clients)
        x = x + alpha * sum(a * sent[i] for a, i in zip(p, clients, strict=True))
        if gamma is not None:
            own.update(new)
            c = (1 - gamma) * c + gamma * np.mean(list(new.values()), axis=0)
        yield Told(x, sent, {} if gamma is None else {"c": c, **{f"c{i}": new[i] for i in new}})


def look(ours: Federation) -> Mapping[str, Vector]:
    states = ours.played.client_state.items()
    c = flat(ours.played.server.memory["fedmoswa.variates"]["c"])
    return {"c": c, **{f"c{i}": flat(state["fedmoswa.variates"]["c"]) for i, state in states}}


@pytest.mark.parametrize(("rho", "alpha"), [(0.1, 1.0), (0.0, 1.5)])
def test_fedswa(rho: float, alpha: float) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedswa(rho={rho}, alpha={alpha})", LR)
    assert agree(ours, fedswa(setup, COHORTS, rho, alpha), COHORTS) == len(COHORTS)


@pytest.mark.parametrize("gamma", [0.4, 1.0])
def test_fedmoswa(gamma: float) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedmoswa(rho=0.1, gamma={gamma})", LR)
    story = fedswa(setup, COHORTS, 0.1, gamma=gamma)
    assert agree(ours, story, COHORTS, look) == len(COHORTS)


# --- laws ------------------------------------------------------------------------------------


def test_a_constant_rate_and_the_whole_way_is_fedavg_bit_for_bit() -> None:
    assert equal(play("fedswa(rho=1.0)", rounds=3), play("fedavg", rounds=3))
    assert not equal(play("fedswa", rounds=3), play("fedavg", rounds=3))
    farther = play("fedswa(rho=1.0, alpha=0.5)", rounds=3)
    assert equal(farther, play("addition(lr=0.5)", rounds=3))


def test_fedmoswas_first_round_is_fedswas() -> None:
    ours = play("fedmoswa", rounds=1)
    assert equal(ours, play("fedswa", rounds=1, weights="uniform"))


def test_fedmoswa_ends_on_the_optimum() -> None:
    """At rest every c_k is the client's gradient and c their mean, which is 0."""
    quadratics = Quadratics()
    ended = quadratics.play("fedmoswa", 0.2, 0.0, 150)
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8
    fedswa = quadratics.play("fedswa", 0.2, 0.0, 150)
    assert np.linalg.norm(fedswa - quadratics.optimum) > 0.05


def test_a_cycle_acts_beside_a_schedule_over_steps() -> None:
    exponential = {"kind": "exponential", "decay": 0.5}
    over_steps = Schedule(**exponential, over="steps", cycle=0.5).step_factors(2, 4, 10)
    falling = (1.0, 0.875, 0.75, 0.625)
    assert over_steps == pytest.approx([f * 0.5 ** (s / 4) for s, f in enumerate(falling)])
    assert Schedule(**exponential, cycle=0.5).step_factors(2, 4, 10) == falling
    assert Schedule(**exponential).step_factors(2, 4, 10) == ()
    assert Local(lr=0.1, steps=4, schedule=Schedule(cycle=0.5)).schedule.factor(3, 10) == 1.0
