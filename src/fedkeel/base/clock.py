"""Where time goes: seconds by phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import perf_counter

Lap = Callable[[str], None]
"""Called with the name of a phase that has just ended."""


class _LeftOut(threading.local):
    """Seconds of a thread that its clocks do not count."""

    seconds = 0.0


_left_out = _LeftOut()


def leave_out(seconds: float) -> None:
    """Let no clock of this thread count so many seconds that have just passed.

    In that time the thread has waited for work that is not its own.
    """
    _left_out.seconds += seconds


def _now() -> float:
    return perf_counter() - _left_out.seconds


class Clock:
    """Seconds by phase: the time between two laps counts for the phase that the later one names.

    >>> clock = Clock()
    >>> clock.lap("data"), clock.lap("steps"), clock.lap("data")
    (None, None, None)
    >>> list(clock.seconds)
    ['data', 'steps']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = _now()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap for `phase`."""
        now = _now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def restart(self) -> dict[str, float]:
        """Return the seconds by phase so far, and count from zero. No time is lost between."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def shares(phase: str, seconds: float, parts: Mapping[str, float]) -> dict[str, float]:
    """Divide the seconds of a phase among its parts, in their proportions.

    Args:
        phase: name of the phase.
        seconds: how long it took.
        parts: seconds by part, on any scale: of several processes at once, say.

    >>> shares("train", 2.0, {"data": 1.0, "steps": 3.0})
    {'train.data': 0.5, 'train.steps': 1.5}
    >>> shares("train", 2.0, {})
    {'train': 2.0}
    """
    total = sum(parts.values())
    if total <= 0.0:
        return {phase: seconds}
    return {f"{phase}.{name}": seconds * part / total for name, part in parts.items()}
