"""When clients can be reached: intervals of virtual time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from fedkeel.base.named_files import expanded
from fedkeel.base.rng import generator
from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError, RunError
from fedkeel.features.time.devices import number, read_csv
from fedkeel.features.time.settings import System

HOUR, DAY = 3600.0, 86400.0
"""Seconds."""

MOST_SESSIONS = 1_000_000
"""Sessions of a client between two times at which a run asks for them: seconds of work."""

Session = tuple[float, float]
"""Start and end of a time that a client is there, in seconds."""


class Availability(ABC):
    """When each of C clients can be reached. All times are in virtual seconds."""

    @abstractmethod
    def interval(self, client: int, time: float) -> Session:
        """Return the first interval of a client that ends after a time."""

    def present(self, clients: Ints, time: float) -> Ints:
        """Return those of the clients that are there at a time."""
        is_there = [self.interval(k, time)[0] <= time for k in clients.tolist()]
        return clients[np.array(is_there, dtype=np.bool_)]

    def next_start(self, clients: Ints, time: float) -> float:
        """Return the first time, not before `time`, at which one of the clients is there."""
        starts = (self.interval(k, time)[0] for k in clients.tolist())
        return max(time, min(starts, default=math.inf))


class Always(Availability):
    """Everybody is there at all times."""

    def interval(self, client: int, time: float) -> Session:
        """Return all times."""
        return -math.inf, math.inf

    def present(self, clients: Ints, time: float) -> Ints:
        """Return the clients."""
        return clients

    def next_start(self, clients: Ints, time: float) -> float:
        """Return the time itself."""
        return time


class Diurnal(Availability):
    """Each client is there for some hours a day, from a time of the day of its own.

    The time of the day is uniform, from the stream (seed, "diurnal").
    """

    def __init__(self, clients: int, seconds: float, seed: int) -> None:
        self._seconds = seconds
        self._begin = DAY * generator(seed, "diurnal").random(clients)

    def interval(self, client: int, time: float) -> Session:
        """Return today's hours, or tomorrow's."""
        begin = float(self._begin[client])
        start = begin + DAY * math.floor((time - begin) / DAY)
        if start + self._seconds <= time:
            start += DAY
        return start, start + self._seconds


class Sessions(Availability):
    """Each client comes and goes: exponential times there and away.

    A client draws from the stream (seed, "sessions", 0, client), whether it is there at time 0
    first of all. Sessions of a client are drawn one after the other as they are needed. None is so
    short that its end is no other number than its start.
    """

    def __init__(self, seconds_on: float, seconds_off: float, seed: int) -> None:
        self._on, self._off, self._seed = seconds_on, seconds_off, seed
        self._streams: dict[int, np.random.Generator] = {}
        self._sessions: dict[int, list[Session]] = defaultdict(list)

    def interval(self, client: int, time: float) -> Session:
        """Return the session at a time, or the next one."""
        sessions = self._sessions[client]
        first = len(sessions)
        while not sessions or sessions[-1][1] <= time:
            if len(sessions) > first + MOST_SESSIONS:
                raise RunError(
                    "Clients come and go too often for the times of this run.",
                    got=f"more than {MOST_SESSIONS:,} sessions of client {client} until virtual "
                    f"time {time / HOUR:.4g} h",
                    do="raise system.hours_on and system.hours_off",
                )
            sessions.append(self._next(client, sessions))
        return sessions[bisect_right(sessions, time, key=itemgetter(1))]

    def _next(self, client: int, sessions: list[Session]) -> Session:
        if not sessions:
            random = self._streams[client] = generator(self._seed, "sessions", 0, client)
            is_there = random.random() < self._on / (self._on + self._off)
            start = 0.0 if is_there else random.exponential(self._off)
        else:
            random = self._streams[client]
            start = sessions[-1][1] + random.exponential(self._off)
        return start, max(start + random.exponential(self._on), math.nextafter(start, math.inf))


class Trace(Availability):
    """Intervals from a file, repeated from its last end on.

    Args:
        intervals: by client, ascending and apart; who has none is never there.
        period: the last end.
    """

    def __init__(self, intervals: Mapping[int, Sequence[Session]], period: float) -> None:
        self._intervals, self._period = intervals, period

    def interval(self, client: int, time: float) -> Session:
        """Return the interval at a time, or the next one."""
        known = self._intervals.get(client, ())
        if not known:
            return math.inf, math.inf
        turn = math.floor(time / self._period)
        shift = self._period * turn
        place = bisect_right(known, time, key=lambda interval: interval[1] + shift)
        if place == len(known):
            place, shift = 0, self._period * (turn + 1)
        start, end = known[place]
        return start + shift, end + shift


def make_availability(settings: System, clients: int, seed: int) -> Availability:
    """Return when the clients of a run are there.

    Raises:
        DataError: the trace cannot be used.
    """
    if settings.availability == "diurnal":
        return Diurnal(clients, settings.hours_on * HOUR, seed)
    if settings.availability == "sessions":
        return Sessions(settings.hours_on * HOUR, settings.hours_off * HOUR, seed)
    if settings.trace is not None:
        return read_trace(expanded(settings.trace), clients)
    return Always()


def read_trace(path: Path, clients: int) -> Trace:
    """Read when clients are there: columns ``client``, ``start`` and ``end``, in seconds."""
    intervals: dict[int, list[Session]] = defaultdict(list)
    for line, row in read_csv(path, "system.trace"):
        client, start, end = (number(row, name, path, line) for name in ("client", "start", "end"))
        if client != int(client) or not 0 <= client < clients or not 0.0 <= start < end:
            raise DataError(
                f"{path}, line {line} cannot be used.",
                got=f"client {row['client']} from {row['start']} to {row['end']}",
                expected=f"a client from 0 to {clients - 1}, and 0 <= start < end",
            )
        intervals[int(client)].append((start, end))
    if not intervals:
        raise DataError(f"{path} has no row, so that nobody is ever there.")
    for client, times in intervals.items():
        times.sort()
        for (_, end), (start, _) in pairwise(times):
            if start < end:
                got = f"one begins at {start:g}, the one before ends at {end:g}"
                raise DataError(f"{path}: the times of client {client} overlap.", got=got)
    return Trace(intervals, max(times[-1][1] for times in intervals.values()))
