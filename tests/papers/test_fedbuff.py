"""FedBuff and FedAsync, restated from Nguyen et al. 2022 and Xie et al. 2019, Algorithm 1 of each.

The restatement has its own clock: clients train at any time, and what each was sent stays with it
until it replies. Least squares with two local steps on all examples of the client.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback, GlobalModel

RNG = np.random.default_rng(5)
SPEEDS = (1.0, 1.7, 0.4, 3.3, 7.1)
X = [RNG.normal(size=(n, 3)) for n in (4, 7, 5, 9, 6)]
Y = [x @ RNG.normal(size=3) + RNG.normal(size=len(x)) for x in X]
LR, STEPS, ROUNDS, MU = 0.1, 2, 25, 0.5

Array = np.ndarray
Rule = Callable[[Array, list[tuple[Array, Array, int]]], Array]
"""(the server's model, (model sent, model received, staleness) of each reply) -> its next model"""


def local(k: int, sent: Array, mu: float) -> Array:
    w = sent
    for _ in range(STEPS):
        w = w - LR * (X[k].T @ (X[k] @ w - Y[k]) / len(Y[k]) + mu * (w - sent))
    return w


def server(rule: Rule, size: int, mu: float = 0.0) -> list[Array]:
    """Return the server's model after each of its steps."""
    x, t, models, buffer = np.zeros(3), 0, [], []
    events = [(STEPS / speed, k, 0, x) for k, speed in enumerate(SPEEDS)]  # all begin at x^0
    heapq.heapify(events)
    while len(models) < ROUNDS:
        now, k, version, sent = heapq.heappop(events)
        buffer.append((k, sent, local(k, sent, mu), t - version))
        if len(buffer) < size:
            continue
        x, t = rule(x, [reply for _, *reply in buffer]), t + 1
        models.append(x)
        for k, *_ in buffer:
            heapq.heappush(events, (now + STEPS / SPEEDS[k], k, t, x))
        buffer.clear()
    return models


def fedbuff(x: Array, replies: list[tuple[Array, Array, int]]) -> Array:
    """Lines 9 to 13: the sum of s(tau) Delta, divided by K, at a server learning rate of 1."""
    return x + sum((y - sent) / np.sqrt(1 + tau) for sent, y, tau in replies) / len(replies)


def fedasync(x: Array, replies: list[tuple[Array, Array, int]]) -> Array:
    """The server's mixing, with s(t - tau) = (1 + t - tau)^-0.5."""
    ((_, y, tau),) = replies
    alpha = 0.6 * (1 + tau) ** -0.5
    return (1 - alpha) * x + alpha * y


def half_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * (output - target).square().flatten(1).sum(1)


@pytest.mark.parametrize(
    ("method", "rule", "size", "mu"),
    [
        ("fedbuff(buffer=3)", fedbuff, 3, 0.0),
        (f"fedprox(mu={MU})+fedbuff(buffer=2)", fedbuff, 2, MU),
        ("fedasync", fedasync, 1, 0.0),
        (f"fedprox(mu={MU})+fedasync", fedasync, 1, MU),
    ],
)
def test_the_servers_steps(method: str, rule: Rule, size: int, mu: float, tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,speed\n" + "".join(f"{k},{v}\n" for k, v in enumerate(SPEEDS)))
    layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    models: list[Array] = []

    class Keep(Callback):
        def on_round_end(self, row: RoundRecord, model: GlobalModel) -> None:
            models.append(model.params["weight"][0].numpy().copy())

    result = fk.run(
        method,
        task=fk.Task(layer, loss=half_square),
        clients=fk.from_clients([(x, y[:, None]) for x, y in zip(X, Y, strict=True)]),
        test=(X[0], Y[0][:, None]),
        rounds=ROUNDS,
        local=fk.Local(lr=LR, steps=STEPS, batch_size="all"),
        system=fk.System(step_seconds=1.0, devices=str(file)),
        evaluation=fk.Evaluation(every=100),
        engine=fk.Engine(kind="sequential", dtype="float64"),
        callbacks=[Keep()],
        progress=False,
    )
    assert max(age for row in result.rows for age in row.staleness) >= 4
    np.testing.assert_allclose(models, server(rule, size, mu), rtol=0, atol=1e-12)
