"""What a round costs and what goes wrong in it, written down as it happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedkeel.engine.base import Account
from fedkeel.tree import State, nbytes

EVALUATION = "evaluation"
"""What the model is sent for, where it is not to be trained."""

ASKED = "survey"
"""What clients are asked before they train."""


class Ledger:
    """The account of a round. It stays open until the next, for evaluations after it.

    What was sent before the first round counts for that.

    Args:
        order: parts in the order in which every engine's record has them.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._order = [*dict.fromkeys(order), EVALUATION]
        self._round: int | None = None
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}
        self.faults: dict[str, list[int]] = {}
        self._named: dict[str, set[int]] = {}

    def open(self, round: int) -> None:
        """Open the account of a round, where it is not open already."""
        if self._round is not None and self._round != round:
            self.down, self.up, self.faults, self._named = {}, {}, {}, {}
        self._round = round

    def sent(self, part: str, state: Mapping[str, State]) -> None:
        """Count tensors that were sent to a node."""
        self.down[part] = self.down.get(part, 0) + nbytes(dict(state))

    def came(self, part: str, state: Mapping[str, State]) -> None:
        """Count tensors that came from a client."""
        self.up[part] = self.up.get(part, 0) + nbytes(dict(state))

    def fault(self, words: str, clients: Iterable[int], stage: str = "") -> None:
        """Write down what went wrong, and for which clients; in a `stage` other than training."""
        clients = list(clients)
        found = self.faults.setdefault(f"{stage}: {words}" if stage else words, [])
        found.extend(c for c in clients if c not in found)
        found.sort()
        self._named.setdefault(stage, set()).update(clients)

    def named(self, stage: str = "") -> set[int]:
        """Return the clients for which something went wrong in training, or in another stage."""
        return self._named.get(stage, set())

    def account(self, lost: Sequence[int]) -> Account:
        """Return the account of the round, to which evaluations are still added."""
        self.down = {part: self.down[part] for part in self._order if part in self.down}
        self.up = {part: self.up[part] for part in self._order if part in self.up}
        return Account(self.down, self.up, self.faults, sorted(lost))
