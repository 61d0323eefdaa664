"""Local trainings that go on while the server makes its steps: where and when they end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedkeel.data.cohort import Selection
from fedkeel.data.dataset import Ints
from fedkeel.errors import RunError
from fedkeel.features.time.schedule import Timing, reached_at
from fedkeel.method.context import Message

MOST_LOST = 100
"""Local trainings that may be lost for one step of the server, for each client."""


@dataclass(frozen=True, order=True)
class Event:
    """A client's reply comes, or the client is lost.

    Args:
        seconds: when.
        order: a random number, which decides among events at the same time.
        client: the client.
        version: rounds that were complete when it was sent the model.
        is_lost: whether no reply comes.
        began: when it was sent the model.
    """

    seconds: float
    order: float
    client: int
    version: int = field(compare=False)
    is_lost: bool = field(compare=False)
    began: float = field(compare=False)


class Trainings(Protocol):
    """Local trainings that have begun and not ended: simulated ones, or those of nodes."""

    @property
    def is_remade(self) -> bool:
        """Whether a run that goes on makes the same trainings again; else they are forgotten."""

    @property
    def seconds(self) -> float:
        """What time it is."""

    @property
    def virtual_seconds(self) -> float | None:
        """The same where time is virtual, else None."""

    @property
    def count(self) -> int:
        """How many clients train."""

    @property
    def versions(self) -> set[int]:
        """The rounds whose models have not come back from all clients that were sent them."""

    def offer(self, message: Message) -> None:
        """Send this model from now on."""

    def present(self, clients: Ints) -> Ints:
        """Return those of the clients that can be sent a model now."""

    def begin(self, round: int, chosen: Selection, draw: int) -> None:
        """Send the model of a round to clients, some of which are going to drop out.

        Args:
            round: rounds that are complete.
            chosen: the clients.
            draw: number of the draw within the round.
        """

    def ended(self, idle: Ints) -> Iterator[Event]:
        """Wait for something to happen, and yield what ends at that time, one after the other.

        Nothing ends where one of the clients `idle` can be sent a model first, or where another
        one may train in the place of one that takes too long.

        Args:
            idle: clients that may be sent a model; nobody where enough train.
        """

    def is_enough(self, replies: int, wanted: int, lost: int) -> bool:
        """Return whether to make a step with fewer replies than are wanted.

        Args:
            replies: that have come for the step.
            wanted: that make a step.
            lost: trainings that were lost since the last step.

        Raises:
            RunError: no more are to be expected, and these are too few.
        """


class VirtualTrainings:
    """Trainings that end when virtual time says so.

    Args:
        timing: how long the clients' rounds take.
    """

    is_remade = True

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._events: list[Event] = []  # a heap
        self.seconds = 0.0

    @property
    def virtual_seconds(self) -> float | None:
        """What time it is."""
        return self.seconds

    @property
    def count(self) -> int:
        """How many clients train."""
        return len(self._events)

    @property
    def versions(self) -> set[int]:
        """The rounds whose models clients train from now."""
        return {event.version for event in self._events}

    def offer(self, message: Message) -> None:
        """Do nothing: the model is used when the client is trained, at the end."""

    def present(self, clients: Ints) -> Ints:
        """Return those of the clients that are there."""
        return self._timing.availability.present(clients, self.seconds)

    def begin(self, round: int, chosen: Selection, draw: int) -> None:
        """Work out when the clients are going to reply, or are lost."""
        timing, now = self._timing, self.seconds
        clients: Ints = np.union1d(chosen.clients, chosen.dropped)
        drops = np.isin(clients, chosen.dropped)
        ends = now + timing.replies(round, clients)
        if drops.any():
            until_lost = timing.share_until_lost(round, clients) * (ends - now)
            ends = np.where(drops, now + until_lost, ends)
        leaves = timing.leaves(clients, now)
        is_lost, ends = drops | (leaves < ends), np.minimum(ends, leaves)
        order = timing.order(round, len(clients), draw)
        columns = ends.tolist(), order.tolist(), clients.tolist(), is_lost.tolist()
        for end, place, client, lost in zip(*columns, strict=True):
            heapq.heappush(self._events, Event(end, place, client, round, lost, now))

    def ended(self, idle: Ints) -> Iterator[Event]:
        """Go on to the next event, and yield all of that time; see `Trainings`."""
        if not self._events:  # nobody could be reached
            self.seconds = reached_at(self._timing.availability, idle, self.seconds)
            return
        self.seconds = self._events[0].seconds
        while self._events and self._events[0].seconds == self.seconds:
            yield heapq.heappop(self._events)

    def is_enough(self, replies: int, wanted: int, lost: int) -> bool:
        """Return False: whoever is lost is followed by another client."""
        if lost > MOST_LOST * len(self._timing.work.seconds):
            raise RunError(
                "No client finishes the work of a step.",
                got=f"{lost} local trainings were lost, up to {self.seconds / 3600:.4g} "
                "virtual hours",
                do="let clients stay longer (system.hours_on, or the trace), or make them faster",
            )
        return False
