"""A small federation for every entry of the registry, and comparisons of what it does."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.method.registry import REGISTRY
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree
from harness import Federation, consecutive, toy_network

ENTRIES = list(REGISTRY)
SIZE, EPOCHS = 4, 2
LOCAL = Local(lr=0.1, epochs=EPOCHS, batch_size=SIZE)
Data = list[tuple[np.ndarray, np.ndarray]]


def skewed(sizes: tuple[int, ...] = (12, 7, 18, 10), seed: int = 0) -> Data:
    """Clients of unequal size that see one or two of three classes: their updates conflict."""
    rng, out = np.random.default_rng(seed), []
    centres = rng.normal(size=(3, 8))
    for k, n in enumerate(sizes):
        y = rng.choice([k % 3, (k * k + 1) % 3], size=n)
        out.append((centres[y] + 0.5 * rng.normal(size=(n, 8)), y))
    return out


def alike(clients: int = 3, n: int = 8) -> Data:
    """Clients with the same examples in another order: their updates agree."""
    x, y = skewed((n,))[0][0], np.arange(n) % 3
    orders = [np.random.default_rng(k).permutation(n) for k in range(clients)]
    return [(x[order], y[order]) for order in orders]


def contrary(clients: int = 7, n: int = 12, seed: int = 0) -> Data:
    """All but the last agree on the classes of the same examples: the mean conflicts with it."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, 8)), np.arange(n) % 3
    return [(x, (y + (k == clients - 1)) % 3) for k in range(clients)]


def federation(expression: str, data: Data | None = None, **options: object) -> Federation:
    """The method on skewed clients, unless others are given; batches are consecutive."""
    clients = skewed() if data is None else data
    given = {"local": LOCAL, "network": toy_network(), **options}
    sizes = [len(y) for _, y in clients]
    given.setdefault("batches", lambda k, _: consecutive(sizes[k], SIZE, EPOCHS))
    network, local, batches = (given.pop(name) for name in ("network", "local", "batches"))
    return Federation(expression, network, clients, local, batches, **given)


def play(expression: str, data: Data | None = None, rounds: int = 2, **options: object) -> Tree:
    """The global model after some rounds."""
    played = federation(expression, data, **options)
    for _ in range(rounds):
        played.round()
    return played.params


class Normed(nn.Module):
    """The toy network with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


def normed() -> Network:
    torch.manual_seed(0)
    return Network(Normed(), head="fc2", dtype=torch.float64)


def equal(a: Tree | State, b: Tree | State) -> bool:
    """Whether two states have the same names in the same order, and the same bits."""
    one, other = dict(tree.walk(a)), dict(tree.walk(b))
    return list(one) == list(other) and all(torch.equal(one[k], other[k]) for k in one)


def gap(a: Tree | State, b: Tree | State) -> float:
    """Largest difference, relative to the largest entry."""
    one, other = dict(tree.walk(a)), dict(tree.walk(b))
    assert list(one) == list(other)
    size = max((float(v.abs().max()) for v in other.values() if v.numel()), default=1.0)
    apart = [float((one[k] - v).abs().max()) for k, v in other.items() if v.numel()]
    return max(apart, default=0.0) / max(size, 1e-300)


def copied(state: State) -> State:
    """The same values in other memory."""
    return tree.map_tensors(torch.clone, state)


def entries_with(role: type) -> list[str]:
    """The entries of the registry of which a part plays a role."""
    return [e for e in ENTRIES if any(isinstance(p, role) for p in parse(e).parts)]
