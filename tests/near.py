"""Flower's messages within one process: every message becomes bytes and is read from them again.

What real processes do beside that is in `test_processes` and `test_faults`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedkeel.config import Flower
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import FedkeelError
from fedkeel.flower.node.node import Site
from fedkeel.flower.server.engine import Nodes
from fedkeel.flower.server.exchange import Exchange
from fedkeel.flower.server.membership import Roster
from fedkeel.runner.loop import Result
from fedkeel.runner.start import start

HANDLERS: dict[str, Callable[[Site, RecordDict], RecordDict]] = {
    "query.hello": lambda site, content: site.hello(),
    "train": Site.train,
    "train.survey": Site.survey,
    "evaluate": Site.evaluate,
}

Bend = Callable[[str, RecordDict], RecordDict | None]
"""(message type, reply) -> what is sent in its place; None for no reply at all."""


def across(content: RecordDict) -> RecordDict:
    """What a receiver sees of a content: through bytes, in Flower's own form."""
    objects = {key: one.deflate() for key, one in get_all_nested_objects(content).items()}
    found = inflate_object_from_contents(content.object_id, objects)
    assert isinstance(found, RecordDict)
    return found


@dataclass
class Near(Grid):
    """Nodes in this process. Replies come at once."""

    sites: dict[int, Site]
    bends: dict[int, Bend] = field(default_factory=dict)
    sizes: list[tuple[str, str, int]] = field(default_factory=list)

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
        return list(self.sites)

    def get_nodes(self) -> Iterable[object]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            self._replies[number] = self._played(message)
        return numbers

    def _played(self, message: Message) -> list[Message]:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node not in self.sites:
            return []
        try:
            reply = HANDLERS[kind](self.sites[node], across(message.content))
        except FedkeelError as error:
            return [Message(Error(1, str(error)), reply_to=message)]
        bent = self.bends.get(node, lambda kind, reply: reply)(kind, reply)
        return [] if bent is None else [Message(across(bent), reply_to=message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [m for number in message_ids for m in self._replies.pop(number, [])]

    def send_and_receive(self, messages: Iterable[Message], **more: object) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def sites(prepared: Prepared, root: Path, nodes: int = 2) -> dict[int, Site]:
    """Nodes that share the clients of a run; their ids say nothing about them."""
    every = range(prepared.population.clients)
    return {
        10**9 + 7 * i: Site(prepared, frozenset(every[i::nodes]), root / str(i))
        for i in range(nodes)
    }


def engine(prepared: Prepared, grid: Grid, settings: Flower | None = None) -> Nodes:
    """The engine of a run on a grid, after everybody has said hello."""
    settings = settings or Flower(deadline_seconds=0.2, poll_seconds=0.01)
    exchange = Exchange(grid, settings)
    roster = Roster(exchange, settings, prepared.population.clients)
    roster.gather(lambda count: count == prepared.population.clients, "all")
    return Nodes(prepared, exchange, roster)


def played(prepared: Prepared, grid: Grid, out: Path | None = None, resume: bool = False) -> Result:
    """A whole run."""
    return start(prepared, out, resume, engine=engine(prepared, grid, prepared.settings.flower))
