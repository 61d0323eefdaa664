"""The trainings of nodes whose server does not wait: requests without a reply, and replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedkeel.config import Flower
from fedkeel.config.flower import smallest_count
from fedkeel.data.cohort import Selection
from fedkeel.engine.base import ClientJob
from fedkeel.engine.local import LocalResult
from fedkeel.errors import TrainingError
from fedkeel.features.time.trainings import Event
from fedkeel.flower.protocol import TRAIN, Request
from fedkeel.flower.server.connection import GRACE, NOT_TAKEN, NodeConnection, NodeReply
from fedkeel.flower.server.membership import RETRY_SHARE, Membership
from fedkeel.flower.server.replies import TakenReplies
from fedkeel.flower.server.requests import Requests
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.method.context import Ints, Message
from fedkeel.tree import Tree


@dataclass(frozen=True)
class _Asked:
    """A request to one client that has no reply yet.

    Args:
        node: the client's node.
        client: the client.
        request: what it was asked for.
        began: when it was sent the model.
        is_overdue: whether the deadline has passed, and another client may train in its place.
        is_void: whether its reply cannot be used any more.
    """

    node: int
    client: int
    request: Request
    began: float
    is_overdue: bool = False
    is_void: bool = False


class NodeTrainings:
    """Trainings that end when a node says so, or says nothing for too long.

    Each client is asked by a request of its own. A reply is used whenever it comes, also to an
    earlier model. After `flower.deadline_seconds` without one another client may train in the
    place of this one. After a minute more its message is gone and the client is lost. A client that
    was lost is asked again after a tenth of the deadline.

    Args:
        settings: deadline, quorum and time between polls.
        connection: how nodes are asked.
        membership: which nodes are connected.
        requests: makes the requests.
        taken: takes the replies.
        traffic: where faults are recorded.
        jobs: returns the jobs of clients, with their local steps so far.
        outlying: tells why a client's reply is an outlier, by the learning rate of the model that
            it was sent, and a model; None where it is not an outlier.
    """

    is_remade = False
    virtual_seconds = None

    def __init__(
        self,
        settings: Flower,
        connection: NodeConnection,
        membership: Membership,
        requests: Requests,
        taken: TakenReplies,
        traffic: TrafficRecord,
        jobs: Callable[[Ints], list[ClientJob]],
        outlying: Callable[[int, LocalResult, float, Tree], str | None],
    ) -> None:
        self._outlying = outlying
        self._settings, self._connection, self._membership = settings, connection, membership
        self._requests, self._taken, self._traffic, self._jobs = requests, taken, traffic, jobs
        self._asked: dict[str, _Asked] = {}  # by the number of the message
        self._events: deque[Event] = deque()
        self._resting: dict[int, float] = {}  # clients that were lost, until when
        self._last_reply = time.monotonic()

    @property
    def seconds(self) -> float:
        """What time it is, by a clock that goes on."""
        return time.monotonic()

    @property
    def count(self) -> int:
        """How many clients train, without those that are overdue."""
        return sum(not asked.is_overdue for asked in self._asked.values())

    @property
    def versions(self) -> set[int]:
        """The rounds to whose models replies may still come."""
        coming = {asked.request.round for asked in self._asked.values() if not asked.is_void}
        return coming | {event.version for event in self._events if not event.is_lost}

    def offer(self, message: Message) -> None:
        """Send this model from now on, and begin the record of its round."""
        self._message = message
        self._traffic.begin_round(message.round)
        self._last_reply = time.monotonic()  # an evaluation may have taken its time

    def present(self, clients: Ints) -> Ints:
        """Return those of the clients that are connected, and were not lost a moment ago."""
        now, wanted = time.monotonic(), set(clients.tolist())
        self._resting = {k: until for k, until in self._resting.items() if now < until}
        self._membership.forget_disconnected()  # a node that was restarted may have another id
        if wanted and not wanted <= set(self._membership.node_by_client()):
            self._membership.refresh(
                self._settings.poll_seconds, lambda by_client: wanted <= set(by_client)
            )
        connected = self._membership.node_by_client()
        is_here = [k in connected and k not in self._resting for k in clients.tolist()]
        return clients[np.array(is_here, dtype=np.bool_)]

    def begin(self, round: int, chosen: Selection, draw: int) -> None:
        """Ask clients for their training; those that drop out are lost at once."""
        now = time.monotonic()
        for client in chosen.dropped.tolist():
            self._events.append(Event(now, 0.0, client, round, is_lost=True, began=now))
        for job in self._jobs(chosen.clients):
            headers = self._requests.headers(self._message, {job.client: job})
            for node, content in self._requests.contents(TRAIN, self._message, headers).items():
                number = self._connection.send(node, content, TRAIN)
                if number:
                    self._asked[number] = _Asked(node, job.client, headers[node], now)
                else:
                    self._traffic.add_fault(NOT_TAKEN, [job.client])
                    self._lose(job.client, round, now)

    def ended(self, idle: Ints) -> Iterator[Event]:
        """Wait for replies, and yield those that have come; see `Trainings`."""
        places = self.count
        while not self._events:
            self._poll()
            has_place = self.count < places or len(self.present(idle)) > 0
            if self._events or has_place or self._is_over:
                break
            time.sleep(self._settings.poll_seconds)
        while self._events:
            yield self._events.popleft()

    def is_enough(self, replies: int, wanted: int, lost: int) -> bool:
        """Return whether no more replies are to be expected, and these make a quorum.

        Raises:
            TrainingError: no more are to be expected, and these make none.
        """
        if self._events or not self._is_over:
            return False
        needed = smallest_count(self._settings.quorum, wanted)
        if replies >= needed:
            return True
        seconds = self._settings.deadline_seconds
        raise TrainingError(
            f"Step {self._message.round + 1} of the server has no quorum.",
            got=f"{replies} of {wanted} updates{self._traffic.described_faults()}",
            expected=f"at least {needed}, the next one within {seconds:g} s",
            do="see that the nodes are up, then go on with resume; everything is saved",
        )

    @property
    def _is_over(self) -> bool:
        """Whether nobody trains, and no reply has come for as long as the deadline."""
        waited = time.monotonic() - self._last_reply
        return self.count == 0 and waited > self._settings.deadline_seconds

    def _poll(self) -> None:
        """Take what has come, and note who takes too long."""
        nodes = {number: asked.node for number, asked in self._asked.items()}
        for number, reply in self._connection.replies(nodes):
            self._receive(self._asked.pop(number), reply)
        now, deadline = time.monotonic(), self._settings.deadline_seconds
        for number, asked in list(self._asked.items()):
            if now > asked.began + deadline + GRACE:
                del self._asked[number]
                self._lose(asked.client, asked.request.round, asked.began)
            elif now > asked.began + deadline and not asked.is_overdue:
                self._asked[number] = replace(asked, is_overdue=True)
                self._traffic.add_fault("no reply before the deadline", [asked.client])

    def _receive(self, asked: _Asked, reply: NodeReply) -> None:
        client, version = asked.client, asked.request.round
        if asked.is_void:
            self._traffic.add_fault("began before a client lost its state: dropped", [client])
        else:
            self._taken.take(reply, asked.request)
        result = self._taken.results.get(client)
        if result is not None:  # a step may have no other update
            reason: str | None = "sent NaN or infinity"
            if result.reply.finite:
                lr, params = asked.request.lr, self._message.params
                reason = self._outlying(client, result, lr, params)
            if reason is not None:
                self._traffic.add_fault(reason, [client])
                self._taken.drop(client)
        if client not in self._taken.results:
            self._lose(client, version, asked.began)
            return
        self._last_reply = now = time.monotonic()
        self._events.append(Event(now, 0.0, client, version, is_lost=False, began=asked.began))

    def _lose(self, client: int, version: int, began: float) -> None:
        now = time.monotonic()
        self._resting[client] = now + RETRY_SHARE * self._settings.deadline_seconds
        self._events.append(Event(now, 0.0, client, version, is_lost=True, began=began))

    def drop_all(self) -> None:
        """Use no reply of the trainings that have begun: the method begins anew."""
        self._asked = {
            number: replace(asked, is_void=True) for number, asked in self._asked.items()
        }
        self._events = deque(replace(event, is_lost=True) for event in self._events)
        for event in self._events:
            self._taken.drop(event.client)
