"""Which node plays which client. Clients are stable indices; nodes come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import RecordDict

from fedkeel.config import Flower
from fedkeel.errors import RunError
from fedkeel.flower.exchange import Exchange
from fedkeel.flower.wire import FORMAT, HEAD, Head, WireError

HELLO = "query.hello"


class Presence(Head):
    """What a node says of itself.

    Args:
        clients: the clients that it plays.
        examples: number of training examples of each.
        held: number of examples that each keeps aside for evaluation.
        shape: shape of one input, for a node with data of its own.
        classes: number of classes it knows of.
        labels: names of the labels, empty where they are numbers.
        tokens: whether inputs are whole numbers that the model looks up.
        digest: digest of its data.
        name: what the node is called, "" for nothing.
    """

    clients: tuple[int, ...]
    examples: tuple[int, ...]
    held: tuple[int, ...]
    shape: tuple[int, ...]
    classes: int
    labels: tuple[str, ...]
    tokens: bool
    digest: str
    name: str


class Roster:
    """Who is there.

    A client belongs to the first node that says it plays it, for as long as that node is connected:
    nobody takes over a client whose node is there.

    Args:
        exchange: how nodes are asked.
        settings: deadline and polls.
        clients: C.
    """

    def __init__(self, exchange: Exchange, settings: Flower, clients: int) -> None:
        self._exchange = exchange
        self._settings = settings
        self._clients = clients
        self._known: dict[int, Presence] = {}
        self._refused: set[int] = set()
        self._pinned: dict[int, tuple[int, str]] = {}
        self.faults: list[str] = []

    def refresh(self, seconds: float | None = None) -> None:
        """Forget nodes that are gone, and ask those that are new what they play."""
        online = self._exchange.online()
        self._known = {node: said for node, said in self._known.items() if node in online}
        self._refused &= set(online)
        new = [n for n in online if n not in self._known and n not in self._refused]
        hello = RecordDict({HEAD: Head(format=FORMAT, run="", round=0).record()})
        for reply in self._exchange.ask(dict.fromkeys(new, hello), HELLO, seconds=seconds):
            try:
                if reply.content is None:
                    raise WireError(reply.fault)
                said = Presence.read(reply.content)
                self._check(said)
                self._known[reply.node] = said
            except WireError as error:
                self._refused.add(reply.node)
                self.faults.append(f"node {reply.node} was turned away: {error.what}")

    def _check(self, said: Presence) -> None:
        columns = (said.examples, said.held)
        if any(len(column) != len(said.clients) for column in columns):
            raise WireError("its columns differ in length")
        taken = {client for one in self._known.values() for client in one.clients}
        for client in said.clients:
            if not 0 <= client < self._clients:
                raise WireError(f"it plays client {client}, of {self._clients}")
            if client in taken:
                raise WireError(f"it plays client {client}, whose node is connected")
        for client, examples in zip(said.clients, said.examples, strict=True):
            if self._pinned.get(client, (examples, said.digest)) != (examples, said.digest):
                raise WireError(f"its data are not those that client {client} began with")

    def pin(self, clients: Mapping[int, tuple[int, str]]) -> None:
        """Turn nodes away from now on whose data are others.

        Args:
            clients: number of examples and digest of the data, by client.
        """
        self._pinned = dict(clients)
        for node, said in list(self._known.items()):
            try:
                del self._known[node]
                self._check(said)
                self._known[node] = said
            except WireError as error:
                self._refused.add(node)
                self.faults.append(f"node {node} was turned away: {error.what}")

    def gather(self, enough: Callable[[int], bool], what: str) -> None:
        """Wait until enough clients are there.

        Args:
            enough: whether so many are enough.
            what: what is needed, in words.

        Raises:
            RunError: they are not there by the deadline.
        """
        end = time.monotonic() + self._settings.deadline_seconds
        while True:
            self.refresh(max(end - time.monotonic(), 1.0))
            count = len(self.where())
            if enough(count):
                return
            if time.monotonic() > end:
                raise RunError(
                    "The nodes of the federation are not there.",
                    got=f"{count} of {self._clients} clients"
                    + (f"; {self.faults[-1]}" if self.faults else ""),
                    expected=what,
                    do="start the SuperNodes, then go on with resume",
                )
            time.sleep(self._settings.poll_seconds)

    def where(self) -> dict[int, int]:
        """Return the node of each client that is there."""
        return {c: node for node, said in self._known.items() for c in said.clients}

    def route(self, clients: Iterable[int]) -> dict[int, list[int]]:
        """Return which of the clients each node plays; those that are not there are left out."""
        where = self.where()
        nodes: dict[int, list[int]] = {}
        for client in clients:
            if client in where:
                nodes.setdefault(where[client], []).append(int(client))
        return nodes

    def said(self) -> dict[int, Presence]:
        """Return what each connected node has said, by client."""
        return {c: said for said in self._known.values() for c in said.clients}
