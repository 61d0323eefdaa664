"""Flower's messages within one process: every message becomes bytes and is read from them again.

`test_processes` and `test_faults` test what real processes do beyond that.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedkeel.config import Flower
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import FedkeelError
from fedkeel.flower.node.log import public_reason
from fedkeel.flower.node.node import Node
from fedkeel.flower.server.connection import NodeConnection
from fedkeel.flower.server.engine import NodeClients
from fedkeel.flower.server.kept_sums import KeptSums
from fedkeel.flower.server.membership import Membership
from fedkeel.flower.wire import FORMAT, HEADER
from fedkeel.runner.result import Result
from fedkeel.runner.start import start

Edit = Callable[[str, RecordDict], RecordDict | None]
"""(message type, reply) -> what is sent in its place; None for no reply at all."""

Ask = Callable[[int, str, RecordDict], RecordDict]
"""(node, message type, request) -> what a server that lies asks in its place."""


def across(content: RecordDict) -> RecordDict:
    """Return a content as a receiver sees it, after a way through bytes."""
    objects = {key: one.deflate() for key, one in get_all_nested_objects(content).items()}
    found = inflate_object_from_contents(content.object_id, objects)
    assert isinstance(found, RecordDict)
    return found


def header_of(content: RecordDict) -> dict[str, Any]:
    """Return the values of a message's header."""
    return json.loads(str(content[HEADER]["values"]))


def with_header(content: RecordDict, values: dict[str, Any]) -> RecordDict:
    """Return a message with another header."""
    record = ConfigRecord({"format": FORMAT, "values": json.dumps(values)})
    return RecordDict({**content, HEADER: record})


def changed(content: RecordDict, **values: object) -> RecordDict:
    """Return a message with other values in its header."""
    return with_header(content, {**header_of(content), **values})


@dataclass
class InProcessGrid(Grid):
    """Nodes in this process. Replies come at once."""

    nodes: dict[int, Node]
    edits: dict[int, Edit] = field(default_factory=dict)
    sizes: list[tuple[str, str, int]] = field(default_factory=list)
    ask: Ask = lambda node, kind, content: content
    refused: list[str] = field(default_factory=list)  # why nodes did not answer

    def __post_init__(self) -> None:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, 1, 1
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> object:
        return None

    def create_message(self, *args: object, **more: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[object]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self._replies[number] = self._reply(message)
        return numbers

    def _reply(self, message: Message) -> list[Message]:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node not in self.nodes:
            return []
        try:
            content = across(self.ask(node, kind, message.content))
            reply = self.nodes[node].reply(kind, content)
            edited = self.edits.get(node, lambda kind, reply: reply)(kind, reply)
        except FedkeelError as error:
            self.refused.append(str(error))
            return [Message(Error(1, public_reason(error)), reply_to=message)]
        return [] if edited is None else [Message(across(edited), reply_to=message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [m for number in message_ids for m in self._replies.pop(number, [])]

    def send_and_receive(self, messages: Iterable[Message], **more: object) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def make_nodes(prepared: Prepared, root: Path, nodes: int = 2) -> dict[int, Node]:
    """Return nodes that share the clients of a run."""
    clients = range(prepared.population.clients)
    return {
        10**9 + 7 * i: Node(prepared, frozenset(clients[i::nodes]), root / str(i))
        for i in range(nodes)
    }


def node_clients(
    prepared: Prepared, grid: Grid, settings: Flower | None = None, sums: KeptSums | None = None
) -> NodeClients:
    """Return the engine of a run on a grid, once all clients are connected."""
    settings = settings or Flower(deadline_seconds=0.2, poll_seconds=0.01)
    connection = NodeConnection(grid, settings)
    membership = Membership(connection, settings, prepared.population.clients)
    membership.wait_for_clients(lambda count: count == prepared.population.clients, "all")
    return NodeClients(prepared, connection, membership, sums=sums)


def run_on_nodes(
    prepared: Prepared, grid: Grid, out: Path | None = None, resume: bool = False
) -> Result:
    """Return the result of a whole run on the nodes of a grid."""
    engine = node_clients(prepared, grid, prepared.settings.flower, KeptSums(out, resume))
    return start(prepared, out, resume, engine=engine)
