"""Networks that some clients have in place of the task's own, and which client has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedkeel.base.rng import generator
from fedkeel.errors import ConfigError, ModelError, did_you_mean


@dataclass(frozen=True)
class ClientNetwork:
    """A network that some clients have in place of the task's own.

    Args:
        model: as that of `Task`.
        clients: which clients have it, by their numbers or names.
        share: share of all clients that have it, in (0, 1), drawn by the run's seed among those
            that no list names; in place of `clients`.
        head: as that of `Task`.

    Raises:
        ModelError: the model is not a module and makes none, or both or none of `clients` and
            `share` are given.

    >>> ClientNetwork(nn.Linear(2, 3), clients=["north", 4]).share is None
    True
    """

    model: nn.Module | Callable[[], nn.Module]
    clients: Sequence[int | str] = ()
    share: float | None = None
    head: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise ModelError(
                "The network of some clients is neither a module nor a function that makes one.",
                got=repr(self.model),
                do="give a torch.nn.Module, its class, or a function without arguments",
            )
        if isinstance(self.clients, str) or not isinstance(self.clients, Sequence):
            raise ModelError(
                "The clients of a network are not a list.",
                got=repr(self.clients),
                expected="numbers or names, such as [0, 1] or ['north']",
            )
        if bool(self.clients) == (self.share is not None):
            raise ModelError(
                "A network of some clients needs the clients that have it.",
                got="both clients and share" if self.clients else "neither clients nor share",
                do="give a list (clients=[0, 1]), or their share of all clients (share=0.5)",
            )
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise ModelError(
                "The share of the clients that have a network is not a share of them.",
                got=self.share,
                expected="a number in (0, 1)",
            )


def networks_of_clients(
    others: Mapping[str, ClientNetwork], names: Sequence[str], count: int, seed: int
) -> NDArray[np.int64]:
    """Return [C] which network each client has: 0 is the task's own, i the i-th of the others.

    Lists count first. Then each share, in its order, is drawn among the clients that are left.

    Args:
        others: the networks beside the task's own, by name.
        names: [C] names of the clients, empty where they are just numbers.
        count: C.
        seed: seed of the run.

    Raises:
        ConfigError: a client does not exist or is in two lists, or too few are left for a share.

    >>> others = {"small": ClientNetwork(nn.Linear, clients=["b", 2])}
    >>> networks_of_clients(others, ("a", "b", "c"), 3, seed=0).tolist()
    [0, 1, 1]
    """
    place = {name: k for k, name in enumerate(names or map(str, range(count)))}
    found = np.zeros(count, dtype=np.int64)
    for number, (network, settings) in enumerate(others.items(), start=1):
        for client in settings.clients:
            k = client if isinstance(client, int) else place.get(client, -1)
            if not 0 <= k < count:
                raise ConfigError(
                    f"The network {network!r} names a client {client!r} that does not exist.",
                    do=did_you_mean(str(client), list(place)),
                )
            if found[k]:
                raise ConfigError(
                    f"Client {client!r} is named twice in the lists of networks.",
                    got=f"{list(others)[found[k] - 1]!r} and {network!r}",
                    expected="one network for each client",
                )
            found[k] = number
    stream = generator(seed, "networks")
    for number, (network, settings) in enumerate(others.items(), start=1):
        if settings.share is None:
            continue
        left, wanted = np.flatnonzero(found == 0), max(1, round(settings.share * count))
        if wanted > len(left):
            raise ConfigError(
                f"Too few clients are left for the network {network!r}.",
                got=f"{wanted} of {count} are its share, {len(left)} have no other network",
                do="lower the shares, so that they add up to 1 at most",
            )
        found[stream.choice(left, wanted, replace=False)] = number
    return found
