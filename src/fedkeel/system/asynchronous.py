"""The schedule of a server that does not wait: events in the order of their virtual time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from fedkeel.config import Cohort
from fedkeel.data.cohort import Selection, select, selectable
from fedkeel.data.dataset import Ints
from fedkeel.errors import ConfigError, RunError, counted
from fedkeel.system.schedule import Due, Timing, reached_at

MOST_LOST = 100
"""Local trainings that may be lost for one step of the server, for each client."""


@dataclass(frozen=True, order=True)
class Event:
    """A client's reply comes, or the client is lost.

    Args:
        seconds: virtual time.
        order: a random number, which decides among events at the same time.
        client: the client.
        version: rounds that were complete when it was sent the model.
        is_lost: whether no reply comes.
    """

    seconds: float
    order: float
    client: int
    version: int = field(compare=False)
    is_lost: bool = field(compare=False)


class Asynchronous:
    """K clients train at any time, and the server makes a step with every `buffer` updates.

    The cohort's size is K. When a reply comes, or a client is lost, another client is drawn for it
    at once, among those that can be reached, do not train, and have no update in the buffer: so no
    client is sent a model twice, and a step has one update of a client at most. All that happens
    at one time is taken in before new clients are drawn, and a step of the server comes first.

    Args:
        timing: how long the clients' rounds take.
        cohort: how many clients train at a time, and how they are drawn.
        sizes: [C] number of examples of each client.
        buffer: updates in a step.

    Raises:
        ConfigError: the buffer never gets full, or cohorts are drawn in a way that needs rounds.
    """

    def __init__(self, timing: Timing, cohort: Cohort, sizes: Ints, buffer: int) -> None:
        self._timing, self._cohort, self._sizes, self._size = timing, cohort, sizes, buffer
        clients = selectable(cohort, sizes, timing.seed)
        if buffer > len(clients):
            raise ConfigError(
                "The server waits for more updates than there are clients.",
                got=f"a buffer of {buffer}, and {counted(len(clients), 'client')} that may train",
                expected=f"at most {len(clients)}",
                why="each client has one update in the buffer at most",
            )
        if cohort.sampling == "poisson":
            raise ConfigError(
                "cohort.sampling = 'poisson' draws cohorts, and the server does not wait for any.",
                do="set cohort.sampling = 'uniform'",
            )
        self._is_idle = np.isin(np.arange(len(sizes)), clients)  # and may train
        self._events: list[Event] = []  # a heap
        self._now, self._draws = 0.0, 0

    @property
    def versions_in_flight(self) -> set[int]:
        """The rounds whose models clients train from now."""
        return {event.version for event in self._events}

    def resume(self, round: int, seconds: float | None) -> None:
        """Make the schedule again up to a round."""
        for before in range(round):
            self.due(before)

    def due(self, round: int) -> Due:
        """Return whose updates make the server's step, and when it is made."""
        self._draws = 0
        buffer: list[Event] = []
        lost: list[int] = []
        self._send(round)
        while True:
            while not self._events:  # nobody could be reached
                idle = np.flatnonzero(self._is_idle)
                self._now = reached_at(self._timing.availability, idle, self._now)
                self._send(round)
            self._now = self._events[0].seconds
            while self._events and self._events[0].seconds == self._now:
                event = heapq.heappop(self._events)
                if not event.is_lost:
                    buffer.append(event)
                    if len(buffer) == self._size:
                        return self._step(buffer, lost)
                else:
                    lost.append(event.client)
                    self._is_idle[event.client] = True
            self._check_progress(len(lost), round)
            self._send(round)

    def _check_progress(self, lost: int, round: int) -> None:
        if lost > MOST_LOST * len(self._sizes):
            raise RunError(
                f"No client finishes the work of step {round + 1}.",
                got=f"{lost} local trainings were lost, up to {self._now / 3600:.4g} virtual hours",
                do="let clients stay longer (system.hours_on, or the trace), or make them faster",
            )

    def _step(self, buffer: list[Event], lost: list[int]) -> Due:
        buffer = sorted(buffer, key=lambda event: event.client)
        clients = np.array([event.client for event in buffer], dtype=np.int64)
        self._is_idle[clients] = True
        dropped = np.array(sorted(set(lost) - set(clients.tolist())), dtype=np.int64)
        versions = np.array([event.version for event in buffer], dtype=np.int64)
        return Due(Selection(clients, dropped), versions, self._now)

    def _send(self, round: int) -> None:
        """Send the model to as many clients as may train beside those that do."""
        timing = self._timing
        free = self._cohort.size(len(self._sizes)) - len(self._events)
        idle = timing.availability.present(np.flatnonzero(self._is_idle), self._now)
        if not free or not len(idle):
            return
        draw, self._draws = self._draws, self._draws + 1
        chosen = select(
            self._cohort, self._sizes, timing.seed, round, among=idle, count=free, draw=draw
        )
        self._begin(round, chosen, draw)

    def _begin(self, round: int, chosen: Selection, draw: int) -> None:
        timing, now = self._timing, self._now
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
            heapq.heappush(self._events, Event(end, place, client, round, lost))
        self._is_idle[clients] = False
