"""FedAU, restated from Wang and Ji 2024, Algorithms 1 and 2, and compared with its authors' code.

The restatement counts every round for every client, as Algorithm 2 prints it; ours counts when a
client takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from fedkeel.config import Local
from harness import Federation, distance, oracle, tensors, toy_network
from method.players import equal, federation, gap, play
from method.test_oracles import clients_of, hp, rounds_of
from papers.numpy_net import Told, TrainingSetup, agree, descend

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 1], [0], [0, 2], [0, 2, 3], [1, 3], [0, 1, 2, 3], [4, 0]]


class Weights:
    """Algorithm 2 of one client, one call for each round."""

    def __init__(self, cutoff: int) -> None:
        self.cutoff, self.omega, self.M, self.S = cutoff, 1.0, 0, 0

    def next(self, took_part: bool) -> None:
        self.S += 1  # 4
        if took_part or self.cutoff == self.S:  # 5: in the round before, or too long ago
            mean = (self.M * self.omega + self.S) / (self.M + 1)
            self.omega = self.S if self.M == 0 else mean  # 7, 9
            self.M, self.S = self.M + 1, 0  # 10, 11


def fedau(
    setup: TrainingSetup, cohorts: Sequence[Sequence[int]], cutoff: int, weights: str = "uniform"
) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    clients = [Weights(cutoff) for _ in range(count)]
    for t, cohort in enumerate(cohorts):
        sent = {}
        for n in cohort:
            steps = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(n, t))
            sent[n] = descend(x, steps, LR) - x
        p = dict(zip(cohort, len(cohort) * setup.shares(weights, cohort, t), strict=True))
        x = x + sum(p[n] * clients[n].omega * sent[n] for n in cohort) / count  # 8 of Algorithm 1
        for n, client in enumerate(clients):
            client.next(n in cohort)
        yield Told(x, sent)


@pytest.mark.parametrize("cutoff", [50, 3, 2, 1])
def test_fedau(cutoff: int) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    story = fedau(setup, COHORTS, cutoff)
    assert agree(setup.ours(f"fedau(cutoff={cutoff})", LR), story, COHORTS) == len(COHORTS)


def test_fedau_weighted_by_examples() -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    story = fedau(setup, COHORTS, 50, "examples")
    agree(setup.ours("fedau", LR, weights="examples"), story, COHORTS)


@pytest.mark.parametrize(
    ("name", "expression"),
    [("fedau_a", "fedau(cutoff=100000)"), ("mifa_a", "mifa(start='no_wait')")],
)
def test_it_follows_its_authors_and_so_does_mifa_in_their_code(name: str, expression: str) -> None:
    o = oracle(name)
    clients, size, steps = clients_of(o), int(hp(o, "batch_size")), int(hp(o, "local_steps"))
    done = dict.fromkeys(range(len(clients)), 0)

    def batches(k: int, _: int) -> list[np.ndarray]:
        """Whole batches only, on from where the client's last round ended."""
        count = len(clients[k][1]) // size
        numbers = [(done[k] + s) % count for s in range(steps)]
        done[k] += steps
        return [np.arange(size * b, size * (b + 1)) for b in numbers]

    network, local = toy_network(tensors(o, "init.")), Local(lr=hp(o, "lr"), steps=steps)
    ours = Federation(expression, network, clients, local, batches)
    for t in range(1, rounds_of(o) + 1):
        selected = o[f"r{t}.selected"].tolist()
        played = ours.round(selected)
        for k in selected:
            assert distance(played.deltas[k], tensors(o, f"r{t}.client{k}.delta.")) < 1e-12
        if name == "fedau_a":
            mean = np.mean([o[f"r{t}.client{k}.weight"] for k in selected])
            assert played.diagnostics["fedau.weight"] == pytest.approx(mean, rel=1e-14)
        assert distance(ours.params, tensors(o, f"r{t}.")) < 1e-12


# --- laws ------------------------------------------------------------------------------------


def test_of_all_clients_it_is_fedavg() -> None:
    assert equal(play("fedau", rounds=4), play("fedavg", rounds=4, weights="uniform"))


def test_without_long_intervals_it_is_fedavg_in_shorter_steps() -> None:
    def end(expression: str) -> dict:
        played = federation(expression, weights="uniform")
        for clients in ([0, 1], [2, 3], [0, 3], [0, 1]):
            played.round(clients)
        return played.params

    assert gap(end("fedau(cutoff=1)"), end("addition(lr=0.5)")) < 1e-14
    assert gap(end("fedau"), end("addition(lr=0.5)")) > 1e-3


def test_who_comes_every_third_time_weighs_three() -> None:
    played = federation("fedau")
    for t in range(1, 10):
        done = played.round([0] if t % 3 else [3])
        if t > 3 and t % 3 == 0:
            assert done.diagnostics["fedau.weight"] == 3.0
