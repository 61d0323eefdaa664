"""What restatements of personalised methods share, and the vectors of PFLlib and FL-bench.

In both collections the files hold weights, of the clients after local training and of the server,
and mini-batches are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedkeel.config import Local
from fedkeel.tree import Tree, add
from harness import Federation, consecutive, distance, toy_network
from harness import tensors as four_tensors
from papers.numpy_net import Net, Vector, flat

COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]
CLIENTS = (0, 1, 2)
ROUNDS = (1, 2, 3)
Arrays = dict[str, np.ndarray]
NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
BASE, HEAD = NAMES[:2], NAMES[2:]


def mask(net: Net, names: Sequence[str]) -> np.ndarray:
    """Which entries of a vector belong to these parameters."""
    chosen = np.zeros(sum(int(np.prod(shape)) for shape in net.shapes.values()), dtype=bool)
    for name in names:
        chosen[net.spans[name]] = True
    return chosen


def descend_some(
    theta: Vector,
    steps: Sequence[tuple[Callable[[Vector], Vector], np.ndarray]],
    lr: float,
    momentum: float = 0.0,
    decay: float = 0.0,
) -> Vector:
    """SGD whose steps move some entries only; the momentum of the others rests."""
    buffer = np.zeros_like(theta)
    for gradient, chosen in steps:
        g = gradient(theta) + decay * theta
        buffer = np.where(chosen, momentum * buffer + g, buffer)
        theta = np.where(chosen, theta - lr * buffer, theta)
    return theta


def kept(ours: Federation, what: str) -> dict[str, Vector]:
    """What each client keeps beside the states of the parts, as vectors."""
    states = ours.played.client_state.items()
    return {f"{what}{i}": flat(state[what]) for i, state in states}


def collected(
    o: Arrays, expression: str, epochs: int, batches: Callable | None = None, **options: object
) -> Federation:
    """A federation of ours with the data and the settings of a file."""
    clients = [(o[f"client{k}.x"], o[f"client{k}.y"]) for k in CLIENTS]
    size = int(o["hp.batch_size"])
    local = Local(lr=float(options.pop("lr", o["hp.lr"])), epochs=epochs, batch_size=size)
    return Federation(
        expression,
        toy_network(four_tensors(o, "init.")),
        clients,
        local,
        batches or (lambda k, _: consecutive(len(clients[k][1]), size, epochs)),
        **{"weights": "examples", **options},
    )


def tensors(o: Arrays, prefix: str, names: Sequence[str]) -> Tree:
    """Some arrays under a prefix, named as parameters."""
    return {n: torch.from_numpy(o[prefix + n]) for n in names}


def follow(o: Arrays, played: Federation, look: Callable[[int, int], dict[str, float]]) -> None:
    """Play all rounds of a file and compare the shared parameters.

    Args:
        o: the file.
        played: our federation.
        look: (round, client) -> further differences, by name.
    """
    for t in ROUNDS:
        received = played.params
        done = played.round()
        names = list(received)
        for k in CLIENTS:
            end = add(received, done.deltas[k])
            assert distance(end, tensors(o, f"r{t}.client{k}.", names)) < 1e-12, (t, k)
            for name, worst in look(t, k).items():
                assert worst < 1e-12, (t, k, name)
        assert distance(played.params, tensors(o, f"r{t}.", names)) < 1e-12, t
