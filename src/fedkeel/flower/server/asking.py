"""Asking the nodes of a round, and recording whose reply is absent, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord

from fedkeel.config import Flower
from fedkeel.config.flower import smallest_count
from fedkeel.engine.base import ClientJob
from fedkeel.errors import TrainingError
from fedkeel.flower.protocol import Request
from fedkeel.flower.server.connection import NodeConnection, NodeReply
from fedkeel.flower.server.membership import Membership
from fedkeel.flower.server.requests import Requests
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.method.context import Message
from fedkeel.records.rows import NOT_NEEDED


@dataclass(frozen=True)
class Asking:
    """Asks the nodes that play the clients of a round.

    Args:
        settings: deadline and quorum.
        connection: how nodes are asked.
        membership: which nodes are connected.
        requests: makes the requests.
        traffic: where bytes and faults are recorded.
    """

    settings: Flower
    connection: NodeConnection
    membership: Membership
    requests: Requests
    traffic: TrafficRecord

    def ask(
        self,
        kind: str,
        message: Message,
        jobs: Mapping[int, ClientJob],
        replied: Collection[int],
        stage: str = "",
        is_enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[NodeReply, Request]]:
        """Send a message to clients, and yield each node's reply with its request as it comes.

        At the end the clients that are absent from `replied` get a fault.
        """
        return self.send(
            kind, message, self.requests_of(message, jobs), jobs, replied, stage, is_enough
        )

    def send(
        self,
        kind: str,
        message: Message,
        requests: Mapping[int, Request],
        jobs: Iterable[int],
        replied: Collection[int],
        stage: str,
        is_enough: Callable[[], bool],
        further: Mapping[int, Mapping[str, ConfigRecord]] | None = None,
    ) -> Iterator[tuple[NodeReply, Request]]:
        """Send a message with its requests, and with further records for each node; see `ask`."""
        contents = self.requests.contents(kind, message, requests, further)
        started = time.monotonic()
        for reply in self.connection.ask(contents, kind, is_enough):
            yield reply, requests[reply.node]
        self.record_absent(list(jobs), replied, time.monotonic() - started, stage)

    def requests_of(self, message: Message, jobs: Mapping[int, ClientJob]) -> dict[int, Request]:
        """Return the header of the request to each node that plays one of the clients."""
        wanted = set(jobs)
        self.membership.forget_disconnected()  # a node that was restarted may have another id
        if not wanted <= set(self.membership.node_by_client()):  # a node may have come back
            seconds = self.settings.deadline_seconds / 4
            self.membership.refresh(seconds, lambda by_client: wanted <= set(by_client))
        return self.requests.headers(message, jobs)

    def check_quorum(self, message: Message, selected: int, replied: int) -> None:
        """Refuse a round with too few replies; that of a client with lost state is one of them.

        Raises:
            TrainingError: they are too few.
        """
        needed = smallest_count(self.settings.quorum, selected)
        if replied >= needed:
            return
        raise round_error(
            f"Round {message.round + 1} has no quorum.",
            f"{replied} of {selected} clients answered{self.traffic.described_faults()}",
            f"at least {needed} within {self.settings.deadline_seconds:g} s",
        )

    def record_absent(
        self, clients: Iterable[int], replied: Collection[int], seconds: float, stage: str
    ) -> None:
        """Record clients that have not replied after some seconds and have no fault yet."""
        with_faults = self.traffic.clients_with_faults(stage)
        nodes = self.membership.node_by_client()
        for client in clients:
            if client in replied or client in with_faults:
                continue
            if client not in nodes:
                reason = self.membership.absence_reason(client)
            elif seconds >= self.settings.deadline_seconds:
                reason = "no reply before the deadline"
            else:
                reason = NOT_NEEDED
            self.traffic.add_fault(reason, [client], stage)

    def record_node_faults(self) -> None:
        """Record replies that have come late, and nodes that were refused, since the last round."""
        nodes = self.membership.node_by_client()
        for late in self.connection.late_nodes():
            clients = [client for client, node in nodes.items() if node == late]
            self.traffic.add_fault("a reply to an earlier round came late and was dropped", clients)
        for reason in self.membership.faults:
            self.traffic.add_fault(reason, [])
        self.membership.faults.clear()


def round_error(what: str, got: object, expected: object) -> TrainingError:
    """Return the error of a round that cannot go on as it is."""
    return TrainingError(
        what,
        got=got,
        expected=expected,
        do="see that the nodes are up, then go on with resume; everything is saved",
    )
