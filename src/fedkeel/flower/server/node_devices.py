"""What nodes say of how they train, as the record and the terminals have it."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.errors import printable
from fedkeel.flower.protocol import NodeTraining

MOST = 20
"""Different reasons, and different ways to train, that are named, at most: nodes send the texts."""


class NodeDevices:
    """How the clients of a run are trained, by what their nodes say.

    Attributes:
        reasons: why clients are trained in a plainer way than they could.
        warnings: a sentence that says how, where one has not the bits of a simulation.
    """

    def __init__(self) -> None:
        self._last: dict[int, NodeTraining] = {}
        self._clients_by_reason: dict[str, set[int]] = {}
        self._have_differed = False
        self.reasons: list[str] = []
        self.warnings: list[str] = []

    def note(self, clients: Sequence[int], training: NodeTraining) -> None:
        """Take what a node says of some clients; the last word counts."""
        self._last |= dict.fromkeys(clients, training)
        for text in training.reasons:
            if text in self._clients_by_reason or len(self._clients_by_reason) < MOST:
                self._clients_by_reason.setdefault(text, set()).update(clients)
        self.reasons[:] = [
            printable(f"clients {_listed(sorted(who))}: {text}")
            for text, who in self._clients_by_reason.items()
        ]
        self._have_differed |= not training.is_plain
        if self._have_differed:
            self.warnings[:] = [self._sentence()]

    @property
    def names(self) -> list[str]:
        """What trains, each name once; empty where all have the bits of a simulation."""
        names = sorted({printable(_device(training)) for training in self._last.values()})
        return names[:MOST] if self._have_differed else []

    def _sentence(self) -> str:
        groups: dict[str, list[int]] = {}
        for client, training in sorted(self._last.items()):
            groups.setdefault(_description(training), []).append(client)
        parts = [f"clients {_listed(clients)}: {text}" for text, clients in groups.items()]
        parts[MOST:] = [f"{len(parts) - MOST} other ways"] * (len(parts) > MOST)
        return (
            f"how nodes train: {'; '.join(parts)}. So the result is that of a simulation up to "
            "rounding, and has not the bits of a simulation"
        )


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
