"""Messages of a secure sum: headers sent to nodes, and the headers of their replies, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import RecordDict

from fedkeel.errors import TrainingError
from fedkeel.flower.server.asking import round_error
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.flower.wire import HEADER, Header, WireError

H = TypeVar("H", bound=Header)

SECURE_SUM = "secure sum"
"""Name of what a secure sum costs beside the tensors, among the bytes of a round."""


class SkippedRoundError(TrainingError):
    """A round of secure sums that cannot be made or repeated: it counts as one without replies."""


@dataclass(frozen=True)
class SecureExchange:
    """Asks the nodes of a round.

    Args:
        connection: how nodes are asked.
        traffic: where bytes and faults are recorded.
        clients: the clients that each node was asked for.
    """

    connection: NodeConnection
    traffic: TrafficRecord
    clients: Mapping[int, Sequence[int]]

    def ask(
        self,
        kind: str,
        requests: Mapping[int, Header],
        reply_type: type[H],
        stage: str = "",
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, H]]:
        """Send headers, and yield each node with the header of its reply; the others get a fault.

        Args:
            kind: type of the message.
            requests: what each node is sent.
            reply_type: what it replies.
            stage: of the round, for faults.
            is_enough: whether no more replies are needed.
        """
        contents = {}
        for node, request in requests.items():
            contents[node] = RecordDict({HEADER: request.record()})
            self.traffic.add_sent_bytes(SECURE_SUM, len(request.model_dump_json()))
        silent = set(requests)
        for reply in self.connection.ask(contents, kind, is_enough):
            silent.discard(reply.node)
            try:
                header = reply_type.read(reply.checked())
                expected = requests[reply.node]
                if (header.run, header.round) != (expected.run, expected.round):
                    raise WireError("A reply belongs to another round or run.")
            except WireError as error:
                self.fault(reply.node, error.short(), stage)
                continue
            self.traffic.add_received_bytes(SECURE_SUM, len(header.model_dump_json()))
            yield reply.node, header
        for node in () if is_enough() else silent:
            self.fault(node, "no reply before the deadline", stage)

    def fault(self, node: int, reason: str, stage: str = "") -> None:
        """Record what went wrong with a node, for the clients that it was asked for."""
        self.traffic.add_fault(reason, self.clients[node], stage)

    def check_nodes(self, count: int, asked: int, minimum: int) -> None:
        """Refuse to go on with too few nodes.

        Raises:
            TrainingError: they are too few.
        """
        if count >= minimum:
            return
        raise round_error(
            "A secure sum has too few nodes.",
            f"{count} of {asked} nodes{self.traffic.described_faults()}",
            f"at least {minimum}",
        )
