"""Which node plays which client. Clients are stable indices; nodes come and go."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fedkeel.config import Flower
from fedkeel.errors import RunError
from fedkeel.flower.server.exchange import HELLO, Exchange
from fedkeel.flower.wire import FORMAT, HEAD, Head, WireError
from fedkeel.version import __version__

SAID = "nodes/said"
"""Name in a checkpoint: what each client's node has said of its data."""

LARGEST = 10**8
"""Examples of a client, and numbers in an input, that the server believes a node to have."""

Count = Annotated[int, Field(ge=0, le=LARGEST)]

AGAIN = 0.1
"""Share of a round's deadline after which a node that was turned away is asked again."""

STRAGGLERS = 20.0
"""Seconds without a new node after which a run begins with those that are there."""


class Presence(Head):
    """What a node says of itself.

    Args:
        clients: the clients that it plays.
        examples: number of training examples of each.
        held: number of examples that each keeps aside for evaluation.
        shape: shape of one input, for a node with data of its own.
        classes: number of classes it knows of.
        labels: names of the labels, empty where they are numbers.
        columns: names of a table's columns, in the order of the inputs; empty of anything else.
        tokens: whether inputs are whole numbers that the model looks up.
        digest: digest of its data.
        name: what the node is called, "" for nothing.
        version: its version of fedkeel.
        terms: what it has to agree on with the server, see `fedkeel.flower.node.node.terms`.
    """

    clients: tuple[Count, ...]
    examples: tuple[Count, ...]
    held: tuple[Count, ...]
    shape: tuple[Count, ...]
    classes: int = Field(ge=1, le=10**6)
    labels: tuple[str, ...]
    columns: tuple[str, ...] = Field(max_length=LARGEST)
    tokens: bool
    digest: str = Field(max_length=64)
    name: str = Field(max_length=200)
    version: str = Field(max_length=100)
    terms: str = Field(max_length=100)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if math.prod(self.shape) > LARGEST:
            raise ValueError(f"'shape' has more than {LARGEST} numbers")
        return self


def written(said: Mapping[int, Presence]) -> dict[str, NDArray[np.uint8]]:
    """Return what each client's node has said, for a checkpoint."""
    text = json.dumps({client: one.model_dump() for client, one in sorted(said.items())})
    return {SAID: np.frombuffer(text.encode(), dtype=np.uint8).copy()}


def remembered(arrays: Mapping[str, NDArray[Any]]) -> dict[int, Presence]:
    """Return what each client's node had said at a checkpoint, empty where it holds nothing of it.

    Raises:
        RunError: it cannot be read.
    """
    if SAID not in arrays:
        return {}
    try:
        found = json.loads(arrays[SAID].tobytes())
        return {int(k): Presence.model_validate_json(json.dumps(v)) for k, v in found.items()}
    except (ValueError, AttributeError) as error:
        raise RunError(
            "What the checkpoint says of the nodes' data cannot be read.",
            got=type(error).__name__,
            do="begin another run, in another folder",
        ) from None


class _Refused(NamedTuple):
    """When and why a node was turned away, and the clients that it plays, where it said which."""

    when: float
    why: str
    clients: tuple[int, ...]


class Roster:
    """Who is there.

    A client belongs to the first node that says it plays it, for as long as that node is connected:
    nobody takes over a client whose node is there. Who comes for such a client waits. Who was
    turned away is asked again after a while: its data may be those of the beginning by then.

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
        self._waiting: dict[int, Presence] = {}
        self._refused: dict[int, _Refused] = {}
        self._mute: dict[int, str] = {}  # why
        self._pinned: dict[int, tuple[int, str]] = {}
        self._terms = ""
        self.faults: list[str] = []

    def refresh(self, seconds: float, done: Callable[[dict[int, int]], bool]) -> None:
        """Forget nodes that are gone, and ask those that are new what they play.

        Args:
            seconds: how long new nodes may take to answer.
            done: whether the nodes that are there, by client, are enough.
        """
        online = self.look()
        self._refused = {node: one for node, one in self._refused.items() if node in online}
        before = time.monotonic() - AGAIN * self._settings.deadline_seconds
        resting = {node for node, one in self._refused.items() if one.when > before}
        waiting, self._waiting = self._waiting, {}
        for node, said in waiting.items():
            if node in online:
                self._admit(node, said)
        new = online - set(self._known) - set(self._waiting) - resting
        hello = RecordDict({HEAD: Head(format=FORMAT, run="", round=0).record()})
        orders = dict.fromkeys(sorted(new), hello)
        for reply in self._exchange.ask(orders, HELLO, lambda: done(self.where()), seconds):
            if reply.content is None:  # it is asked again the next time
                self._mute[reply.node] = (
                    f"node {reply.node} does not say what it plays: {reply.fault}"
                )
                self._note(self._mute[reply.node])
                continue
            self._mute.pop(reply.node, None)
            try:
                self._admit(reply.node, Presence.read(reply.content))
            except WireError as error:
                self._refuse(reply.node, error)

    def why_not(self, client: int) -> str:
        """Return, in words, why a client is not there: its node was turned away, or none came."""
        found = (one.why for one in self._refused.values() if client in one.clients)
        return next(found, "not connected")

    def look(self) -> set[int]:
        """Forget nodes that are gone, and return the ids of those that are connected."""
        online = set(self._exchange.online())
        self._known = {node: said for node, said in self._known.items() if node in online}
        self._mute = {node: words for node, words in self._mute.items() if node in online}
        return online

    def _note(self, words: str) -> None:
        if words not in self.faults:
            self.faults.append(words)

    def _refuse(self, node: int, error: WireError, clients: tuple[int, ...] = ()) -> None:
        why = f"turned away: {error.what}"
        before = self._refused.get(node)
        if before is None or before.why != why:  # else it has been said
            self._note(f"node {node} was {why}")
        self._refused[node] = _Refused(time.monotonic(), why, clients)

    def _admit(self, node: int, said: Presence) -> None:
        """Let a node in, or let it wait, or turn it away."""
        try:
            self._check(said)
        except WireError as error:
            self._refuse(node, error, said.clients[: self._clients])
            return
        taken = {client for one in self._known.values() for client in one.clients}
        if taken & set(said.clients):
            self._waiting[node] = said
        else:
            self._known[node] = said
            self._refused.pop(node, None)

    def _check(self, said: Presence) -> None:
        if said.version != __version__:
            raise WireError(f"it has version {said.version} of fedkeel, the server {__version__}")
        if self._terms and said.terms != self._terms:
            own = self._terms.partition("-")[0]
            if said.terms.partition("-")[0] == own:
                raise WireError(
                    "it makes another model than the server: its files, its attributes, or frozen "
                    "parameters or buffers differ; a constructor should draw with torch alone"
                )
            raise WireError("it runs another experiment than the server: its file or code differs")
        columns = (said.examples, said.held)
        if any(len(column) != len(said.clients) for column in columns):
            raise WireError("its columns differ in length")
        for client in said.clients:
            if not 0 <= client < self._clients:
                raise WireError(f"it plays client {client}, of {self._clients}")
        for client, examples in zip(said.clients, said.examples, strict=True):
            if self._pinned.get(client, (examples, said.digest)) != (examples, said.digest):
                raise WireError(f"its data are not those that client {client} began with")

    def pin(self, clients: Mapping[int, tuple[int, str]], terms: str = "") -> None:
        """Turn nodes away from now on whose data are others, or who train another thing.

        Args:
            clients: number of examples and digest of the data, by client.
            terms: what they have to agree on with the server, "" for anything.
        """
        self._pinned, self._terms = dict(clients), terms
        known, self._known = self._known, {}
        for node, said in known.items():
            self._admit(node, said)

    def gather(self, enough: Callable[[int], bool], what: str) -> None:
        """Wait until all clients are there, or enough of them and nobody else comes.

        Args:
            enough: whether so many are enough.
            what: what is needed, in words.

        Raises:
            RunError: they are not there by the deadline.
        """
        begin, last, told = time.monotonic(), 0, ""
        end = came = begin + self._settings.deadline_seconds
        while True:
            left = max(end - time.monotonic(), 1.0)
            self.refresh(min(left, STRAGGLERS), lambda where: len(where) == self._clients)
            count, now = len(self.where()), time.monotonic()
            came, last = (now, count) if count > last else (came, last)
            if count == self._clients or (enough(count) and now > min(came + STRAGGLERS, end)):
                for words in self._twice() if count < self._clients else ():
                    self._note(words)
                return
            words, cure = self._lacking()
            if now > end:
                raise RunError(
                    "The clients of the federation are not there.",
                    got=words,
                    expected=what,
                    do=f"{cure}, then go on with resume",
                )
            if words != told:  # Flower shows it to whoever has submitted the run
                print(f"waiting for nodes: {words}", flush=True)
                told = words
            time.sleep(self._settings.poll_seconds)

    def _lacking(self) -> tuple[str, str]:
        """Return, in words, who is not there and why, and what would help."""
        where, twice = self.where(), self._twice()
        refused = (f"node {node} was {one.why}" for node, one in self._refused.items())
        apart = [*refused, *self._mute.values()]
        away = [str(k) for k in range(self._clients) if k not in where]
        names = ", ".join(away[:8]) + (f" and {len(away) - 8} more" if len(away) > 8 else "")
        found = [
            f"{len(where)} of {self._clients} clients, without {names}",
            *twice[:2],
            *apart[:2],
        ]
        if len(apart) > 2:
            found.append(f"{len(apart) - 2} more nodes are connected and do not take part")
        if twice:
            cure = "give each SuperNode a partition-id of its own"
        elif apart:
            cure = "mend what is said of these nodes (node.log in a node's 'state' says more)"
        else:
            found.append("no other node is connected")
            cure = f"start the SuperNodes that play {names}"
        return "; ".join(found), cure

    def _twice(self) -> list[str]:
        """Return, in words, which nodes wait because another one plays their client."""
        where = self.where()
        found = []
        for node, said in sorted(self._waiting.items()):
            client = min(set(said.clients) & set(where), default=None)
            if client is not None:
                whose = f"nodes {where[client]} and {node} both"
                same = said.clients == self._known[where[client]].clients
                what = f"have partition-id {min(said.clients)}" if same else f"play client {client}"
                found.append(f"{whose} {what}")
        return found

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
