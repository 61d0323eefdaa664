"""What the vectors from FL-Simulator and its descendants share (tests/oracles/README.md).

All of them have the same loop: consecutive mini-batches, a uniform mean, gradients of which the
norm is below the bound at which they would be clipped, and weight decay.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.tree import Tree
from harness import EVERYTHING, Federation, Played, consecutive, distance, tensors, toy_network

ROUNDS = (1, 2, 3)
CLIENTS = (0, 1, 2)
Arrays = dict[str, np.ndarray]


def simulated(o: Arrays, expression: str) -> Federation:
    """A federation of ours with the data and the settings of a file."""
    clients = [(o[f"client{k}.x"], o[f"client{k}.y"]) for k in CLIENTS]
    size, epochs = int(o["hp.batch_size"]), int(o["hp.epochs"])
    assert float(o["hp.lr_decay"]) == float(o["hp.server_lr"]) == 1.0
    local = Local(
        lr=float(o["hp.lr"]),
        epochs=epochs,
        batch_size=size,
        weight_decay=float(o["hp.weight_decay"]),
        clip_norm=float(o["hp.max_norm"]),
    )
    return Federation(
        expression,
        toy_network(tensors(o, "init.")),
        clients,
        local,
        lambda k, _: consecutive(len(clients[k][1]), size, epochs),
        weights="uniform",
    )


def change_method(played: Federation, expression: str) -> None:
    """Go on with other hyper-parameters."""
    played.plan = parse(expression, EVERYTHING, "uniform")
    played.training = replace(played.training, plan=played.plan)


def model_before(o: Arrays, t: int) -> Tree:
    """The global model before round t."""
    return tensors(o, f"r{t - 1}." if t > 1 else "init.")


def compare(o: Arrays, t: int, done: Played, tol: float) -> None:
    """Compare every client's update and the global model."""
    for k in CLIENTS:
        assert distance(done.deltas[k], tensors(o, f"r{t}.client{k}.delta.")) < tol
    assert distance(done.server.params, model_before(o, t + 1)) < tol
