"""What a round costs in bytes and what goes wrong in it, recorded as it happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedkeel.engine.base import RemoteReport
from fedkeel.errors import printable
from fedkeel.flower.protocol import LOST, OK, RESTARTED, ClientResult
from fedkeel.tree import State, nbytes

EVALUATION = "evaluation"
"""Stage of a round, and name of what the model is sent for in it."""

SURVEY_STAGE = "survey"
"""Stage of a round before training."""

_STATUS_FAULTS = {
    LOST: "lost its client state; the method begins anew",
    RESTARTED: "lost its client state, and began anew",
}


class TrafficRecord:
    """The traffic and the faults of a round.

    It stays open until the next round begins, for evaluations after the round. What was sent before
    the first round counts for that.

    Args:
        order: parts in the order in which every engine's record has them.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._order = [*dict.fromkeys(order), EVALUATION]
        self._round: int | None = None
        self._clear()

    def _clear(self) -> None:
        self.down: dict[str, int] = {}
        self.up: dict[str, int] = {}
        self.faults: dict[str, list[int]] = {}
        self._clients: dict[str, set[int]] = {}

    def begin_round(self, round: int) -> None:
        """Begin the record of a round, where it has not begun."""
        if self._round is not None and self._round != round:
            self._clear()
        self._round = round

    def add_sent(self, part: str, state: Mapping[str, State]) -> None:
        """Count tensors that were sent to a node."""
        self.down[part] = self.down.get(part, 0) + nbytes(dict(state))

    def add_received(self, part: str, state: Mapping[str, State]) -> None:
        """Count tensors that a client has sent."""
        self.add_received_bytes(part, nbytes(dict(state)))

    def add_received_bytes(self, part: str, count: int) -> None:
        """Count bytes that a node has sent."""
        self.up[part] = self.up.get(part, 0) + count

    def add_sent_bytes(self, part: str, count: int) -> None:
        """Count bytes that were sent to a node."""
        self.down[part] = self.down.get(part, 0) + count

    def add_fault(self, reason: str, clients: Iterable[int], stage: str = "") -> None:
        """Record what went wrong for which clients; in training, or in another stage.

        The reason may be a node's own words, and is shown on terminals.
        """
        clients = set(clients)
        key = printable(f"{stage}: {reason}" if stage else reason)
        self.faults[key] = sorted({*self.faults.get(key, []), *clients})
        self._clients.setdefault(stage, set()).update(clients)

    def add_status(self, result: ClientResult) -> None:
        """Record what a client says went wrong for it."""
        if result.status != OK:
            reason = _STATUS_FAULTS.get(result.status, f"failed: {result.status:.200}")
            self.add_fault(reason, [result.client])

    def described_faults(self) -> str:
        """Return the faults of the round as the end of a sentence, "" where there are none."""
        faults = "; ".join(f"{reason}: {clients}" for reason, clients in self.faults.items())
        return f" ({faults:.300})" if faults else ""

    def restore(
        self, faults: Mapping[str, Sequence[int]], down: Mapping[str, int], up: Mapping[str, int]
    ) -> None:
        """Go on from what another process has recorded of the round."""
        self.down, self.up = dict(down), dict(up)
        self.faults = {reason: list(clients) for reason, clients in faults.items()}
        self._clients = {"": {client for clients in faults.values() for client in clients}}

    def clients_with_faults(self, stage: str = "") -> set[int]:
        """Return the clients for which something went wrong in training, or in another stage."""
        return self._clients.get(stage, set())

    def account(self, lost: Sequence[int]) -> RemoteReport:
        """Return the account of the round, to which evaluations are still added."""
        self.down = {part: self.down[part] for part in self._order if part in self.down}
        self.up = {part: self.up[part] for part in self._order if part in self.up}
        return RemoteReport(self.down, self.up, self.faults, sorted(lost))
