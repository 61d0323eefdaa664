"""What nodes say of how they train, as the record and the terminals have it."""

from __future__ import annotations

from collections.abc import Iterable

from fedkeel.errors import printable
from fedkeel.flower.protocol import NodeTraining


class NodeDevices:
    """How the clients of a run are trained, by what their nodes say."""

    def __init__(self) -> None:
        self._last: dict[int, NodeTraining] = {}
        self.reasons: list[str] = []
        self._have_differed = False

    def note(self, clients: Iterable[int], training: NodeTraining) -> None:
        """Take what a node says of some clients; the last word counts."""
        for client in clients:
            self._last[client] = training
            for text in training.reasons:
                reason = printable(f"client {client}: {text}")
                if reason not in self.reasons:
                    self.reasons.append(reason)
        self._have_differed |= not training.is_plain

    @property
    def names(self) -> list[str]:
        """What trains, each name once; empty where all have the bits of a simulation."""
        names = sorted({printable(_device(training)) for training in self._last.values()})
        return names if self._have_differed else []

    @property
    def warnings(self) -> list[str]:
        """A sentence that says where clients train, where that is not as in a simulation."""
        if not self._have_differed:
            return []
        groups: dict[str, list[int]] = {}
        for client, training in sorted(self._last.items()):
            groups.setdefault(_description(training), []).append(client)
        parts = [f"clients {_listed(clients)}: {text}" for text, clients in groups.items()]
        return [
            f"the nodes train by {'; '.join(parts)}. So the result has not the bits of a "
            "simulation; it is the same up to rounding"
        ]


def _device(training: NodeTraining) -> str:
    return training.name or training.device or "not told"


def _description(training: NodeTraining) -> str:
    """Return how a client is trained, in words."""
    if not training.engine:
        return "a device that the site does not tell"
    if training.is_plain:
        return "sequential on the processor"
    where = "the processor" if training.device.startswith("cpu") else training.device
    name = f" ({training.name})" if training.name else ""
    precision = f" in {training.precision}" if training.precision else ""
    return printable(f"{training.engine} on {where}{name}{precision}")


def _listed(clients: list[int]) -> str:
    """Return numbers in words, of many only the first ones.

    >>> _listed([0, 2, 5])
    '0, 2, 5'
    """
    more = f" and {len(clients) - 8} more" if len(clients) > 8 else ""
    return ", ".join(map(str, clients[:8])) + more
