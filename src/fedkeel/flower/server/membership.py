"""Which node plays which client. Clients are stable indices; nodes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fedkeel.config import Flower
from fedkeel.errors import RunError, printable
from fedkeel.flower.protocol import DESCRIBE, DESCRIBE_DATA, Agreement, NodeDescription
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.wire import HEADER, Header, WireError
from fedkeel.version import __version__

DESCRIPTIONS = "nodes/descriptions"
"""Name in a checkpoint of what each client's node has said of its data."""

_DESCRIPTIONS = TypeAdapter(dict[int, NodeDescription])

RETRY_SHARE = 0.1
"""Share of a round's deadline after which a refused node is asked again."""

STRAGGLER_SECONDS = 20.0
"""Time without a new node after which a run begins with those that are connected."""


def pack_descriptions(descriptions: Mapping[int, NodeDescription]) -> dict[str, NDArray[np.uint8]]:
    """Return the description of each client's node as an array of a checkpoint."""
    text = _DESCRIPTIONS.dump_json(dict(sorted(descriptions.items())))
    return {DESCRIPTIONS: np.frombuffer(text, dtype=np.uint8).copy()}


def unpack_descriptions(arrays: Mapping[str, NDArray[Any]]) -> dict[int, NodeDescription]:
    """Return the description of each client's node from a checkpoint, empty where it has none.

    Raises:
        RunError: it cannot be read.
    """
    if DESCRIPTIONS not in arrays:
        return {}
    try:
        return _DESCRIPTIONS.validate_json(arrays[DESCRIPTIONS].tobytes())
    except ValidationError as error:
        raise RunError(
            "The checkpoint's descriptions of the nodes' data cannot be read.",
            got=type(error).__name__,
            do="begin another run, in another folder",
        ) from None


@dataclass(frozen=True)
class ClientData:
    """A client's data when the run began: number of training examples, and digest."""

    examples: int
    digest: str


ROOM = 300
"""Characters for what is wrong with all nodes together, so that it fits into an error."""


@dataclass(frozen=True)
class _Refusal:
    """When and why a node was refused, and the clients that it plays, as far as it said so."""

    time: float
    reason: str
    clients: Sequence[int]


class Membership:
    """Knows which nodes are connected and which clients they play.

    A client belongs to the first node that says it plays it, for as long as that node is connected.
    A second node for the same client waits. A refused node is asked again after a while: its data
    may be those of the beginning by then.

    Args:
        connection: how nodes are asked.
        settings: deadline and time between polls.
        clients: C, the number of clients.
        kind: type of the message that asks a node to describe itself: for statistics, there is no
            run to resume, and an error says what is wrong with every node.
    """

    def __init__(
        self, connection: NodeConnection, settings: Flower, clients: int, kind: str = DESCRIBE
    ) -> None:
        self._connection = connection
        self._kind = kind
        self._settings = settings
        self._clients = clients
        self._members: dict[int, NodeDescription] = {}
        self._waiting: dict[int, NodeDescription] = {}
        self._refused: dict[int, _Refusal] = {}
        self._silent: dict[int, str] = {}  # node -> why it has not described itself
        self._data: dict[int, ClientData] = {}
        self._agreement: Agreement | None = None
        self.faults: list[str] = []

    def refresh(self, seconds: float, is_enough: Callable[[dict[int, int]], bool]) -> None:
        """Forget nodes that are gone, and ask new ones which clients they play.

        Args:
            seconds: how long new nodes may take to answer.
            is_enough: whether the connected nodes, by client, are enough.
        """
        connected = self.forget_disconnected()
        self._refused = {
            node: refusal for node, refusal in self._refused.items() if node in connected
        }
        retry = time.monotonic() - RETRY_SHARE * self._settings.deadline_seconds
        resting = {node for node, refusal in self._refused.items() if refusal.time > retry}
        waiting, self._waiting = self._waiting, {}
        for node, description in waiting.items():
            if node in connected:
                self._admit(node, description)
        new = connected - set(self._members) - set(self._waiting) - resting
        content = RecordDict({HEADER: Header().record()})
        requests = dict.fromkeys(sorted(new), content)
        for reply in self._connection.ask(
            requests, self._kind, lambda: is_enough(self.node_by_client()), seconds
        ):
            if reply.content is None:  # it is asked again the next time
                reason = f"node {reply.node} does not say what it plays: {reply.fault}"
                if self._asks_all:  # a refusal has the name of the site
                    reason = f"{reply.fault} (node {reply.node})"
                self._silent[reply.node] = reason
                self._add_fault(reason)
                continue
            self._silent.pop(reply.node, None)
            try:
                self._admit(reply.node, NodeDescription.read(reply.content))
            except WireError as error:
                self._refuse(reply.node, error)

    def forget_disconnected(self) -> set[int]:
        """Forget nodes that are gone, and return the ids of those that are connected."""
        connected = set(self._connection.connected_nodes())
        self._members = {
            node: member for node, member in self._members.items() if node in connected
        }
        self._silent = {node: reason for node, reason in self._silent.items() if node in connected}
        return connected

    def absence_reason(self, client: int) -> str:
        """Return why a client is absent: its node was refused, or is not connected."""
        reasons = (item.reason for item in self._refused.values() if client in item.clients)
        return next(reasons, "not connected")

    def _add_fault(self, reason: str) -> None:
        if reason not in self.faults:
            self.faults.append(reason)

    def _refuse(self, node: int, error: WireError, clients: Sequence[int] = ()) -> None:
        reason = f"turned away: {error.what}" + (f" {error.why}." if error.why else "")
        before = self._refused.get(node)
        if before is None or before.reason != reason:  # else it has been reported
            self._add_fault(f"node {node} was {reason}")
        self._refused[node] = _Refusal(time.monotonic(), reason, clients)

    def _admit(self, node: int, description: NodeDescription) -> None:
        """Admit a node, let it wait, or refuse it."""
        try:
            self._check(description)
        except WireError as error:
            self._refuse(node, error, description.client_ids[: self._clients])
            return
        if set(description.client_ids) & set(self.node_by_client()):
            self._waiting[node] = description
        else:
            self._members[node] = description
            self._refused.pop(node, None)

    def _check(self, description: NodeDescription) -> None:
        version = description.version
        if version != __version__:
            raise WireError(f"it has version {version} of fedkeel, the server {__version__}")
        agreement = self._agreement or description.agreement
        if description.agreement.experiment != agreement.experiment:
            raise WireError("it runs another experiment than the server: its file or code differs")
        if description.agreement.model != agreement.model:
            raise WireError(
                "it makes another model than the server: its files, its attributes, or frozen "
                "parameters or buffers differ; a constructor should draw only with torch"
            )
        for item in description.clients:
            if item.client >= self._clients:
                raise WireError(f"it plays client {item.client}, of {self._clients}")
        for item in description.clients:
            data = ClientData(item.train_examples, description.data_digest)
            if self._data.get(item.client, data) != data:
                raise WireError(f"its data are not those that client {item.client} began with")

    def require(self, data: Mapping[int, ClientData], agreement: Agreement | None = None) -> None:
        """Refuse from now on nodes with other data, or with another experiment or model.

        Args:
            data: the data of each client.
            agreement: what they have to agree on with the server, None for anything.
        """
        self._data, self._agreement = dict(data), agreement
        members, self._members = self._members, {}
        for node, description in members.items():
            self._admit(node, description)

    def wait_for_clients(self, is_enough: Callable[[int], bool], needed: str) -> None:
        """Wait until all clients are connected, or enough of them and no new one comes.

        Args:
            is_enough: whether this number of clients is enough.
            needed: what is needed, in words.

        Raises:
            RunError: there are too few at the deadline.
        """
        last_count, last_shown = 0, ""
        last_change = time.monotonic()
        deadline = last_change + self._settings.deadline_seconds
        last_change = deadline  # until the first node has come
        while True:
            seconds = min(max(deadline - time.monotonic(), 1.0), STRAGGLER_SECONDS)
            self.refresh(seconds, lambda by_client: len(by_client) == self._clients)
            count, now = len(self.node_by_client()), time.monotonic()
            if count > last_count:
                last_change, last_count = now, count
            if count == self._clients:
                return
            if is_enough(count) and now > min(last_change + STRAGGLER_SECONDS, deadline):
                for conflict in self._conflicts():
                    self._add_fault(conflict)
                return
            missing, remedy = self._missing()
            if now > deadline:
                raise RunError(
                    "The clients of the federation are not there.",
                    got=missing,
                    expected=needed,
                    do=f"{remedy}, then {'ask again' if self._asks_all else 'go on with resume'}",
                )
            if missing != last_shown:  # Flower shows it to the user who submitted the run
                print(printable(f"waiting for nodes: {missing}"), flush=True)
                last_shown = missing
            time.sleep(self._settings.poll_seconds)

    @property
    def _asks_all(self) -> bool:
        """Whether the nodes are asked for statistics."""
        return self._kind == DESCRIBE_DATA

    def _missing(self) -> tuple[str, str]:
        """Return which clients are absent and why, and what would help."""
        nodes, conflicts = self.node_by_client(), self._conflicts()
        refused = [f"node {node} was {item.reason}" for node, item in self._refused.items()]
        idle = [*refused, *self._silent.values()]
        absent = [str(k) for k in range(self._clients) if k not in nodes]
        names = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        facts = [f"{len(nodes)} of {self._clients} clients, without {names}"]
        shown = 2
        if self._asks_all:
            shown, room = len(idle), ROOM // max(len(idle), 1)
            idle = [text[:room] for text in idle]
        facts += [*conflicts[:2], *idle[:shown]]
        if len(idle) > shown:
            facts.append(f"{len(idle) - shown} more nodes are connected and do not take part")
        if conflicts:
            remedy = "give each SuperNode a partition-id of its own"
        elif idle:
            remedy = (
                "fix the problems of these nodes (node.log in a node's 'state' folder says more)"
            )
        else:
            facts.append("no other node is connected")
            remedy = f"start the SuperNodes that play {names}"
        return "; ".join(facts), remedy

    def _conflicts(self) -> list[str]:
        """Return which nodes wait because another one plays their client."""
        nodes = self.node_by_client()
        conflicts = []
        for node, description in sorted(self._waiting.items()):
            client = min(set(description.client_ids) & set(nodes), default=None)
            if client is not None:
                both = f"nodes {nodes[client]} and {node} both"
                is_same = description.client_ids == self._members[nodes[client]].client_ids
                number = min(description.client_ids)
                what = f"have partition-id {number}" if is_same else f"play client {client}"
                conflicts.append(f"{both} {what}")
        return conflicts

    def node_by_client(self) -> dict[int, int]:
        """Return the node of each client that is connected."""
        return {k: node for node, member in self._members.items() for k in member.client_ids}

    def clients_by_node(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Return which of the clients each node plays, without those that are not connected."""
        node_by_client = self.node_by_client()
        nodes: dict[int, list[int]] = {}
        for client in clients:
            if client in node_by_client:
                nodes.setdefault(node_by_client[client], []).append(int(client))
        return nodes

    def descriptions(self) -> dict[int, NodeDescription]:
        """Return the description of each connected node, by client."""
        return {k: member for member in self._members.values() for k in member.client_ids}
