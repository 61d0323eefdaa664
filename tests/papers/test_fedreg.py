"""FedReg, restated from Eq. (2)-(12) and Algorithm D.1; numbers are the lines of fedreg.txt.

"D.4" is line 4 of Algorithm D.1. theta^(t-1) is the model a client receives. Inner products are of
whole models. A step of the algorithm is one mini-batch, as the experiments have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.context import ClientInfo
from fedkeel.method.local_loop import client_finish, client_start, client_step
from fedkeel.method.round_values import Reply
from fedkeel.method.server_round import server_message
from fedkeel.task.batch import Batch
from harness import Federation
from papers.numpy_net import Told, TrainingSetup, Vector, agree

LR = 0.4
COHORTS = [[0, 1, 2, 3], [1, 3], [0, 2, 3]]
CLASSES = 3


def world_of_four() -> TrainingSetup:
    labels = [[0, 1], [1], [2, 0], [2]]
    return TrainingSetup(sizes=(9, 6, 11, 4), labels=labels, epochs=2, batch=4, seed=6)


def ascend(setup: TrainingSetup, theta: Vector, x: np.ndarray, y: np.ndarray, size: float, E: int):
    """190-200: x^j = x^(j-1) + eta sign(grad_x L(x^(j-1), y)), with the true label throughout."""
    for _ in range(E):
        x = x + size * np.sign(setup.net.input_grad(theta, x, y))
    return x


def weight(theta: Vector, received: Vector, g: Vector) -> float:
    """231-234: max(0, (theta - theta^(t-1))^T g / g^T g)."""
    return max(0.0, (theta - received) @ g / (g @ g)) if np.any(g) else 0.0


def fedreg(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    seen: Counter,
    gamma: float = 0.5,
    eta_s: float = 0.1,
    ratio: float = 0.01,
    E: int = 10,
    mg: bool = False,
    pairing: str = "example",
    weights: str = "uniform",
) -> Iterator[Told]:
    net, received = setup.net, setup.start
    for t, clients in enumerate(cohorts):  # D.1-D.2
        sent = {}
        for i in clients:  # D.3
            theta, (x, y) = received, setup.data[i]  # D.4
            pseudo_x = ascend(setup, received, x, y, eta_s, E)  # Eq. (2)
            pseudo_y = net.predict(received, pseudo_x)  # 191: y_s = f_theta^(t-1) (x_s)
            perturbed_x = ascend(setup, received, x, y, ratio * eta_s, E)  # Eq. (3), y_p = y
            batches = setup.batches(i, t)
            first = batches[: len(batches) // setup.epochs]
            for s, rows in enumerate(batches):  # D.5
                twin = rows if pairing == "example" else first[s % len(first)]
                slow = gamma * theta + (1 - gamma) * received  # 241
                g = net.grad(slow, x[rows], y[rows])
                if mg:  # Eq. (12): the pseudo data with uniform labels
                    flat_y = np.full((len(rows), CLASSES), 1 / CLASSES)
                    g_ = net.grad(slow, pseudo_x[rows], flat_y)
                    g = g - (g @ g_) / (g_ @ g_) * g_
                theta = theta - LR * g  # D.6, Eq. (11)
                middle = 0.5 * (theta + received)
                g_s = net.grad(middle, pseudo_x[twin], pseudo_y[twin])  # D.7
                g_p = net.grad(middle, perturbed_x[twin], y[twin])
                w_s = weight(theta, received, g_s)
                w_p = weight(theta - w_s * g_s, received, g_p)
                theta = theta - w_s * g_s - w_p * g_p
                seen["steps"] += 1
                seen["w_s"] += w_s > 0
                seen["w_p"] += w_p > 0
            sent[i] = theta - received  # D.9
        p = setup.shares(weights, clients, t)
        received = sum(q * (received + sent[i]) for q, i in zip(p, clients, strict=True))  # D.11
        yield Told(received, sent)


class WithFirstPass(Federation):
    """The federation of the harness, with the batch of the first pass that a step goes with."""

    passes: int

    def reply(self, k: int, padded: int = 0) -> tuple[Reply, int, int]:
        server, (x, y) = self.played.server, self.data[k]
        message = server_message(self.plan, server, self.training.local.lr)
        batches = [torch.as_tensor(rows) for rows in self.batches(k, server.round)]
        first = batches[: len(batches) // self.passes]
        with torch.no_grad():
            client_info = ClientInfo(k, len(y))
            client, progress = client_start(
                self.training, message, None, client_info, lambda: Batch(x, y)
            )
            for s, rows in enumerate(batches):
                batch = Batch(x[rows], y[rows])
                progress = client_step(client, progress, batch, rows, first[s % len(first)])
            return client_finish(client, progress, len(batches)), len(batches), 0


@each("mg", [False, True])
@each(
    "options",
    [
        {},
        {"gamma": 0.4, "eta_s": 0.2},
        {"gamma": 1.0, "eta_s": 0.05, "ratio": 0.5, "E": 3},
        {"gamma": 0.0, "eta_s": 0.3, "ratio": 1.0, "E": 1},
    ],
)
@each("weights", ["uniform", "examples"])
def test_fedreg(options: dict, mg: bool, weights: str) -> None:
    setup, seen = world_of_four(), Counter()
    story = fedreg(setup, COHORTS, seen, **options, mg=mg, weights=weights)
    named = {("ascent" if k == "E" else k): v for k, v in options.items()} | {"mg": mg}
    inside = ", ".join(f"{k}={v}" for k, v in named.items())
    chosen = {} if weights == "uniform" else {"weights": weights}  # Algorithm D.1 has 1/K
    ours = setup.ours(f"fedreg({inside})", LR, **chosen)
    agree(ours, story, COHORTS)
    assert 0 < seen["w_s"] <= seen["steps"]


def test_both_weights_are_tested() -> None:
    """w_p is nearly always 0; here it is not, and w_s is 0 at times too."""
    setup, seen = world_of_four(), Counter()
    list(fedreg(setup, COHORTS, seen, eta_s=0.3, ratio=0.5))
    assert 0 < seen["w_p"] < seen["steps"]


@pytest.mark.parametrize("mg", [False, True])
def test_by_position_a_later_epoch_meets_the_pseudo_data_of_the_first(mg: bool) -> None:
    """The public code keeps the pseudo batches in the order of the first pass and cycles them.

    Its modified gradient makes new pseudo data of the step's own examples.
    """
    setup, seen = world_of_four(), Counter()
    own = list(fedreg(setup, COHORTS, Counter(), mg=mg))[-1].model
    story = list(fedreg(setup, COHORTS, seen, mg=mg, pairing="position"))
    assert np.abs(own - story[-1].model).max() > 1e-3
    expression = f"fedreg(mg={mg}, pairing='position')"
    plain = setup.ours("fedavg", LR)
    ours = WithFirstPass(
        expression,
        setup.network(),
        setup.data,
        plain.training.local,
        setup.batches,
        weights="uniform",
    )
    ours.passes = setup.epochs
    agree(ours, iter(story), COHORTS)
