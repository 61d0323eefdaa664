"""The schedule of a server that does not wait: who trains, and which replies make a step."""

from __future__ import annotations

import time

import numpy as np

from fedkeel.config import Cohort
from fedkeel.data.cohort import Selection, select, selectable
from fedkeel.data.dataset import Ints
from fedkeel.engine.process.interrupts import is_end_requested
from fedkeel.errors import ConfigError, counted
from fedkeel.features.time.schedule import Due
from fedkeel.features.time.trainings import Event, Trainings

PATIENCE_SECONDS = 3.0
"""Time that a step may take to find in virtual time, beyond which an interrupt ends it."""


class Asynchronous:
    """K clients train at any time, and the server makes a step with every `buffer` updates.

    The cohort's size is K. When a reply comes, or a client is lost, another client is drawn for it
    at once, among those that can be reached, do not train, and have no update in the buffer: so no
    client is sent a model twice, and a step has one update of a client at most. All that happens
    at one time is taken in before new clients are drawn, and a step of the server comes first.

    Args:
        trainings: simulated ones, or those of nodes.
        cohort: how many clients train at a time, and how they are drawn.
        sizes: [C] number of examples of each client.
        seed: seed of the run.
        buffer: updates in a step.

    Raises:
        ConfigError: the buffer never gets full, or cohorts are drawn in a way that needs rounds.
    """

    def __init__(
        self, trainings: Trainings, cohort: Cohort, sizes: Ints, seed: int, buffer: int
    ) -> None:
        self.trainings = trainings
        self._cohort, self._sizes, self._seed, self._size = cohort, sizes, seed, buffer
        clients = check_buffer(cohort, sizes, seed, buffer)
        self._is_idle = np.isin(np.arange(len(sizes)), clients)  # and may train
        self._draws = 0

    def resume(self, round: int) -> None:
        """Make the schedule again up to a round; or forget what nodes were asked."""
        if self.trainings.is_remade:
            for before in range(round):
                self.due(before)

    def due(self, round: int) -> Due:
        """Return whose updates make the server's step, and when it is made."""
        self._draws = 0
        buffer: list[Event] = []
        lost: list[int] = []
        until = time.monotonic() + PATIENCE_SECONDS
        self._send(round)
        while not self.trainings.is_enough(len(buffer), self._size, len(lost)):
            if self.trainings.is_remade and time.monotonic() > until and is_end_requested():
                raise KeyboardInterrupt  # the run would end after a step that may never be made
            idle = np.flatnonzero(self._is_idle & (self._free > 0))
            for event in self.trainings.ended(idle):
                if not event.is_lost:
                    buffer.append(event)
                    if len(buffer) == self._size:
                        return self._step(buffer, lost)
                else:
                    lost.append(event.client)
                    self._is_idle[event.client] = True
            self._send(round)
        return self._step(buffer, lost)

    def _step(self, buffer: list[Event], lost: list[int]) -> Due:
        buffer = sorted(buffer, key=lambda event: event.client)
        clients = np.array([event.client for event in buffer], dtype=np.int64)
        self._is_idle[clients] = True
        dropped = np.array(sorted(set(lost) - set(clients.tolist())), dtype=np.int64)
        versions = np.array([event.version for event in buffer], dtype=np.int64)
        ages = self.trainings.seconds - np.array([event.began for event in buffer])
        return Due(Selection(clients, dropped), versions, self.trainings.virtual_seconds, ages)

    @property
    def _free(self) -> int:
        """How many more clients may train now."""
        return self._cohort.size(len(self._sizes)) - self.trainings.count

    def _send(self, round: int) -> None:
        """Send the model to as many clients as may train beside those that do."""
        if self._free <= 0:
            return
        idle = self.trainings.present(np.flatnonzero(self._is_idle))
        if not len(idle):
            return
        draw, self._draws = self._draws, self._draws + 1
        chosen = select(
            self._cohort, self._sizes, self._seed, round, among=idle, count=self._free, draw=draw
        )
        self.trainings.begin(round, chosen, draw)
        self._is_idle[np.union1d(chosen.clients, chosen.dropped)] = False


def check_buffer(cohort: Cohort, sizes: Ints, seed: int, buffer: int) -> Ints:
    """Return the clients that may train for a server that does not wait.

    Raises:
        ConfigError: the buffer never gets full, or cohorts are drawn in a way that needs rounds.
    """
    clients = selectable(cohort, sizes, seed)
    if buffer > len(clients):
        raise ConfigError(
            "The server waits for more updates than there are clients.",
            got=f"a buffer of {buffer}, and {counted(len(clients), 'client')} that may train",
            expected=f"at most {len(clients)}",
            why="each client has one update in the buffer at most",
        )
    if cohort.sampling in ("poisson", "in_turn") or cohort.by_losses:
        raise ConfigError(
            f"cohort.sampling = {cohort.sampling!r} draws cohorts, and the server waits for none.",
            do="set cohort.sampling = 'uniform'",
        )
    return clients
