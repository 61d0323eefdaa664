"""Scaffnew, restated from Mishchenko et al. 2022, Algorithm 2, and its authors' quadratics.

The restatement moves every h_k at the end of the round, as the paper prints it; our clients move
theirs when they receive the next model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from fedkeel.config import Local
from fedkeel.method.parts.scaffnew import _variate
from fedkeel.task.network import Network
from harness import Federation, oracle
from method.players import LOCAL, federation, gap, play
from method.test_theory import STEPS, Line, Quadratics, squares
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2


def scaffnew(setup: TrainingSetup, rounds: int, p: float, momentum: float = 0.0) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    h = {k: np.zeros_like(x) for k in range(count)}
    for t in range(rounds):
        ends, lengths = {}, {}
        for i in range(count):

            def at(bx, by, h_i=h[i]):  # 6: x^ <- x - gamma (g - h)
                return lambda w: setup.net.grad(w, bx, by) - h_i

            steps = [at(*batch) for batch in setup.examples(i, t)]
            ends[i] = descend(x, iter(steps), LR, momentum)
            unit = [(1 - momentum ** (s + 1)) / (1 - momentum) for s in range(len(steps))]
            lengths[i] = sum(unit) / len(steps)  # 1 without momentum
        sent = {i: y - x for i, y in ends.items()}
        x = np.mean(list(ends.values()), axis=0)  # 8: the mean, as the sum of the h is 0
        h = {i: h[i] + p / (LR * lengths[i]) * (x - ends[i]) for i in h}  # 10
        yield Told(x, sent, {f"h{i}": v for i, v in h.items()})


def look(ours: Federation) -> Mapping[str, Vector]:
    return {
        f"h{i}": flat(_variate(state["scaffnew"], ours.params))
        for i, state in ours.played.client_state.items()
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffnew(momentum: float) -> None:
    """Steps of unequal number too: the harness gives the batches."""
    setup = TrainingSetup(epochs=2)
    ours = setup.ours("scaffnew(p=0.25)", LR, momentum=momentum)
    assert agree(ours, scaffnew(setup, 4, 0.25, momentum), look=look) == 4


def test_scaffnew_follows_public_code_on_quadratics() -> None:
    """A coin ends each round; the losses are x'Ax/2 - b'x, as squares of five examples."""
    o = oracle("scaffnew_a")
    p, gamma = float(o["hp.p"]), float(o["hp.gamma"])
    data = []
    for A, b in zip(o["A"], o["b"], strict=True):
        lower = np.linalg.cholesky(A)
        data.append((np.sqrt(5) * lower.T, np.sqrt(5) * np.linalg.solve(lower, b)))
    ends = np.flatnonzero(o["coins"])
    counts = np.diff(np.concatenate([[-1], ends]))
    network = Network(Line(5), loss=squares, dtype=torch.float64)
    local = Local(lr=gamma, steps=1, batch_size="all")
    ours = Federation(
        f"scaffnew(p={p!r})", network, data, local, lambda k, t: [np.arange(5)] * counts[t]
    )
    rounds = sum(key.endswith(".x") for key in o)
    assert rounds >= 5
    for t in range(1, rounds + 1):
        ours.round()
        assert np.abs(flat(ours.params) - o[f"comm{t}.x"]).max() < 1e-12
        for name, h in look(ours).items():
            assert np.abs(h - o[f"comm{t}.client_h"][int(name[1:])]).max() < 1e-12
    assert set(counts) > {1}


# --- laws ------------------------------------------------------------------------------------


def test_of_one_step_it_is_synchronous_gradient_descent() -> None:
    """h_k is then nothing but what the mean step leaves: it cancels in the mean."""

    def one(k: int, t: int) -> list[np.ndarray]:
        return [np.arange(4)]

    ours = play("scaffnew(p=1.0)", batches=one, rounds=5)
    assert gap(ours, play("fedavg", batches=one, rounds=5, weights="uniform")) < 1e-13


def test_a_round_has_as_many_steps_as_the_paper_has_in_the_mean() -> None:
    work = federation("scaffnew(p=0.15)").plan.work(LOCAL)
    assert (work.steps, work.epochs) == (7, None)


def test_the_first_round_is_fedavgs_and_the_sum_of_the_variates_stays_0() -> None:
    ours = federation("scaffnew")
    ours.round()
    assert gap(ours.params, play("fedavg", rounds=1, weights="uniform")) < 1e-15
    ours.round()
    total = sum(look(ours).values())
    assert np.abs(total).max() < 1e-14 < 1e-3 < np.abs(look(ours)["h0"]).max()
    assert gap(ours.params, play("fedavg", rounds=2, weights="uniform")) > 1e-3


def test_it_ends_on_the_optimum_where_fedavg_does_not() -> None:
    """With unequal numbers of full-batch steps too."""
    quadratics = Quadratics()
    ended = quadratics.play(f"scaffnew(p={1 / max(STEPS)})", 0.2, 0.0, 150)
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8
    drifted = quadratics.fixed_point(0.2, 0.0, np.ones(3))
    assert np.linalg.norm(drifted - quadratics.optimum) > 0.1
