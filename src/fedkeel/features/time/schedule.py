"""Who replies to which of the server's steps, and when, in virtual time.

A schedule is a pure function of settings, sizes and seed: nothing that is trained changes it. So it
is the same for every engine and on every machine, and a run that goes on makes it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.rng import generator, generators
from fedkeel.config import Cohort
from fedkeel.data.cohort import Select, Selection, select_by_seed, selectable
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import Floats
from fedkeel.errors import RunError
from fedkeel.features.time.availability import Availability, make_availability
from fedkeel.features.time.devices import Devices, jitter, make_devices
from fedkeel.features.time.settings import System
from fedkeel.features.time.work import ClientWork

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Due:
    """What the server waits for before one of its steps.

    Args:
        cohort: the clients whose updates it takes, and those that were lost or late since the step
            before.
        versions: [K] the rounds that were complete when each of them was sent the model.
        seconds: virtual time at which the server makes its step; None where no time is counted.
        ages: [K] seconds since each of them was sent the model, virtual ones where time is counted;
            None where the server waits for its cohort.
    """

    cohort: Selection
    versions: Ints
    seconds: float | None = None
    ages: Floats | None = None


@dataclass(frozen=True)
class Timing:
    """How long the clients' rounds take.

    Args:
        settings: of virtual time.
        work: what a round takes of each client.
        devices: how fast each is.
        availability: when each can be reached.
        seed: seed of the run.
    """

    settings: System
    work: ClientWork
    devices: Devices
    availability: Availability
    seed: int

    @classmethod
    def of(cls, settings: System, work: ClientWork, clients: int, seed: int) -> Timing:
        """Return the timing of a run.

        Raises:
            FedkeelError: a file that the settings name cannot be used.
        """
        devices = make_devices(settings, clients, seed)
        return cls(settings, work, devices, make_availability(settings, clients, seed), seed)

    def answers(self, round: int, clients: Ints) -> Floats:
        """Return [K] seconds until clients have answered a survey; zeros without one."""
        work = self.work.survey_seconds[clients]
        return work * jitter(self.settings, self.seed, round, clients) / self.devices.speed[clients]

    def losses(self, clients: Ints) -> Floats:
        """Return [K] seconds from sending the model to having the client's loss with it."""
        return np.asarray(
            self.work.down / self.devices.down[clients]
            + self.work.loss_seconds[clients] / self.devices.speed[clients]
        )

    def replies(self, round: int, clients: Ints) -> Floats:
        """Return [K] seconds from sending the model to having a client's reply."""
        computing = self.work.seconds[clients] / self.devices.speed[clients]
        computing = computing * jitter(self.settings, self.seed, round, clients)
        down = self.work.down / self.devices.down[clients]
        return np.asarray(down + computing + self.work.up / self.devices.up[clients])

    def share_until_lost(self, round: int, clients: Ints) -> Floats:
        """Return [K] the share of its round after which a client that drops out is lost."""
        streams = generators(self.seed, "lost", round, clients.tolist())
        return np.array([random.random() for random in streams])

    def leaves(self, clients: Ints, time: float) -> Floats:
        """Return [K] when clients that are there at a time leave."""
        return np.array([self.availability.interval(k, time)[1] for k in clients.tolist()])

    def order(self, round: int, count: int, draw: int = 0) -> Floats:
        """Return [K] random numbers that decide who of several at the same time is first."""
        return generator(self.seed, "arrival", round, draw).random(count)


class Synchronous:
    """Rounds in which the server waits: for all, for enough of them, or until a deadline.

    Attributes:
        now: virtual time at the end of the round before.
    """

    def __init__(
        self, timing: Timing, cohort: Cohort, sizes: Ints, select: Select | None = None
    ) -> None:
        self._timing, self._cohort = timing, cohort
        self._select = select or select_by_seed(cohort, sizes, timing.seed)
        self._selectable = selectable(cohort, sizes, timing.seed)
        self.now = 0.0

    @property
    def seconds(self) -> Floats:
        """[C] how long a round takes each client, as far as it does not vary."""
        timing = self._timing
        computing = timing.work.seconds / timing.devices.speed
        down, up = timing.work.down / timing.devices.down, timing.work.up / timing.devices.up
        return np.asarray(down + computing + up)

    @property
    def longest(self) -> float:
        """Seconds after which all clients of any round have replied; infinity if these vary."""
        timing, clients = self._timing, self._selectable
        if timing.settings.jitter:
            return math.inf
        replies = timing.replies(0, clients)
        if self._cohort.sampling == "power_of_choice":  # clients have the model already, see _ends
            down = timing.work.down / timing.devices.down[clients]
            replies = replies - down + timing.losses(clients).max(initial=0.0)
        return float(timing.answers(0, clients).max(initial=0.0) + replies.max(initial=0.0))

    def due(self, round: int) -> Due:
        """Return who replies in time, and when the round ends."""
        timing, settings = self._timing, self._timing.settings
        start = reached_at(timing.availability, self._selectable, self.now)
        among = None
        if settings.availability != "always":
            among = timing.availability.present(self._selectable, start)
        chosen = self._select(round, among)
        clients = np.union1d(chosen.clients, chosen.dropped)
        needed = math.ceil(round_off(settings.enough * len(clients)))
        ends, is_lost = self._ends(start, round, clients, chosen)
        deadline = math.inf if settings.deadline_seconds is None else settings.deadline_seconds
        in_time = np.flatnonzero(~is_lost & (ends <= start + deadline))
        order = np.lexsort((timing.order(round, len(clients))[in_time], ends[in_time]))
        taken = in_time[order[:needed]]
        if len(taken) == needed or deadline == math.inf:
            last = taken if len(taken) == needed else np.arange(len(clients))
            self.now = float(ends[last].max(initial=start))
        else:
            self.now = start + deadline
        taken = np.sort(taken)
        late = np.setdiff1d(clients, clients[taken])
        cohort = Selection(clients[taken], late, chosen.candidates)
        return Due(cohort, np.full(len(taken), round), self.now)

    def _ends(
        self, start: float, round: int, clients: Ints, chosen: Selection
    ) -> tuple[Floats, Bools]:
        """Return [K] when each replies or is lost, and whether it is lost."""
        timing, drops = self._timing, np.isin(clients, chosen.dropped)
        answers = timing.answers(round, clients)
        trained = answers[~drops].max(initial=0.0)  # the server waits for all answers
        ends = start + trained + timing.replies(round, clients)
        if chosen.candidates is not None:  # who are all waited for, and have the model then
            down = timing.work.down / timing.devices.down[clients]
            ends = ends - down + timing.losses(chosen.candidates).max(initial=0.0)
        if drops.any():
            shares = timing.share_until_lost(round, clients)
            ends = np.where(drops, start + shares * (ends - start), ends)
        leaves = timing.leaves(clients, start)
        return np.minimum(ends, leaves), drops | (leaves < ends)


def round_off(value: float) -> float:
    """Return a product without the rounding of its factors, before it is rounded up."""
    return round(value, 9)


def reached_at(availability: Availability, clients: Ints, time: float) -> float:
    """Return the first time, not before `time`, at which one of the clients can be reached.

    Raises:
        RunError: nobody ever can.
    """
    start = availability.next_start(clients, time)
    if start == math.inf:
        raise RunError(
            "No client can be reached any more.",
            got=f"virtual time {time / 3600:.4g} h",
            do="give clients more rows in system.trace",
        )
    return start
