"""What is tried next: the points of a grid, or what Optuna suggests.

A suggester is asked for points and told what they came to. What it gives depends on its seed and on
what it was told, and on nothing else: a search that is made again from its finished runs asks for
the same points in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fedkeel.config import Range, Space, Value
from fedkeel.errors import ConfigError
from fedkeel.rng import generator
from fedkeel.study.search_space import Axis, Point

WAVE = 4
"""Points that Optuna suggests before it hears of them, whatever the number of processes."""

TRIALS = 16
"""Trials of a search that is no grid, where nothing is said."""

WORST = 0.0
"""Accuracy that a failed trial counts as."""

AGAIN = 50
"""Suggestions known already after which a new point is drawn."""

DIGITS = 4
"""Significant digits of a number from a range, so that it can be written down."""


class Suggester(Protocol):
    """Says what is tried."""

    @property
    def offered(self) -> int | None:
        """How many points there are; None where they are without number."""

    @property
    def trials(self) -> int:
        """How many points are tried, at most."""

    def ask(self) -> list[Point]:
        """Return the points to be tried now; none at the end."""

    def tell(self, point: Point, value: float | None) -> None:
        """Hear a point's accuracy, None for a trial that failed."""


def suggester(searched: Sequence[Axis], space: Space, seed: int) -> Suggester:
    """Return what suggests points for a method.

    Where there are no more points than trials, all are tried, whatever the sampler.

    Args:
        searched: the axes.
        space: says which sampler, and how many trials.
        seed: of what is drawn.

    Raises:
        ConfigError: a grid of numbers without number, or Optuna is needed and not installed.
    """
    endless = [axis.name for axis in searched if axis.size is None]
    sampler = sampler_of(space)
    if sampler == "grid" and endless:
        raise ConfigError(
            f"A grid needs lists, and '{endless[0]}' is a range.",
            do="give a list of values, or set sampler = 'tpe' or 'random'",
        )
    if sampler == "grid":
        return Grid(searched, space.trials, seed)
    trials = space.trials or TRIALS
    size = None if endless else _size(searched)
    if size is not None and (sampler == "random" or size <= trials):
        return Grid(searched, trials, seed)
    return Suggested(searched, trials, seed, tpe=sampler == "tpe")


def sampler_of(space: Space) -> str:
    """Return the sampler that is asked for, or that suits the choices of all methods."""
    tables = (space.space, *space.method.values())
    ranges = any(isinstance(choices, Range) for table in tables for choices in table.values())
    return space.sampler or ("tpe" if ranges else "grid")


def _size(searched: Sequence[Axis]) -> int:
    return math.prod(axis.size or 1 for axis in searched)


class Grid:
    """All combinations, the last axis fastest; or so many of them, drawn at random.

    Args:
        searched: the axes, each with a size.
        most: points at most, None for all.
        seed: of what is drawn.
    """

    def __init__(self, searched: Sequence[Axis], most: int | None, seed: int) -> None:
        self._axes = searched
        self.trials = min(self.offered, most or self.offered)
        self._left: Sequence[int] = range(self.offered)
        if self.trials < self.offered:
            drawn = generator(seed, "tune").choice(self.offered, self.trials, replace=False)
            self._left = sorted(int(index) for index in drawn)

    @property
    def offered(self) -> int:
        """How many points there are."""
        return _size(self._axes)

    def ask(self) -> list[Point]:
        """Return all points at once."""
        left, self._left = self._left, ()
        return [_point(self._axes, index) for index in left]

    def tell(self, point: Point, value: float | None) -> None:
        """Need not know."""


def _point(searched: Sequence[Axis], index: int) -> Point:
    """Return the point at a place in the order of the grid."""
    places = np.unravel_index(index, [axis.size or 1 for axis in searched]) if searched else ()
    return {axis.name: axis.at(int(i)) for axis, i in zip(searched, places, strict=True)}


class Suggested:
    """Points that Optuna suggests, in waves; each is suggested once.

    Args:
        searched: the axes.
        trials: how many points.
        seed: of what is drawn.
        tpe: whether what was heard is used (tree of Parzen estimators), or points are drawn.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, searched: Sequence[Axis], trials: int, seed: int, *, tpe: bool) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                f"sampler = '{'tpe' if tpe else 'random'}' needs Optuna, which is not installed.",
                do="pip install 'fedkeel[tune]', or give lists and set sampler = 'grid'",
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = (
            optuna.samplers.TPESampler(seed=seed, n_startup_trials=WAVE, constant_liar=True)
            if tpe
            else optuna.samplers.RandomSampler(seed=seed)
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._dropped = optuna.trial.TrialState.FAIL
        self._axes, self._seed = searched, seed
        self.trials = min(trials, self.offered or trials)
        self._tried: dict[tuple[Value, ...], Any] = {}

    @property
    def offered(self) -> int | None:
        """How many points there are; None where they are without number."""
        return None if any(axis.size is None for axis in self._axes) else _size(self._axes)

    def ask(self) -> list[Point]:
        """Return the next wave."""
        count = min(WAVE, self.trials - len(self._tried))
        return [point for _ in range(count) if (point := self._next()) is not None]

    def _next(self) -> Point | None:
        """Return a new point; None where none is found."""
        for _ in range(AGAIN):
            if (point := self._suggested()) is not None:
                return point
        if self.offered is None:
            return None  # a range so narrow that its rounded numbers are few
        random = generator(self._seed, "tune", len(self._tried))
        while True:
            index = int(random.integers(self.offered))
            if tuple(_point(self._axes, index).values()) not in self._tried:
                places = np.unravel_index(index, [axis.size or 1 for axis in self._axes])
                raw = zip(self._axes, places, strict=True)
                self._study.enqueue_trial({axis.name: _raw(axis, int(i)) for axis, i in raw})
                return self._suggested()

    def _suggested(self) -> Point | None:
        """Return what Optuna suggests, None where it is known."""
        trial = self._study.ask()
        point = {axis.name: _value(axis, trial) for axis in self._axes}
        key = tuple(point.values())
        if key in self._tried:
            self._study.tell(trial, state=self._dropped)
            return None
        self._tried[key] = trial
        return point

    def tell(self, point: Point, value: float | None) -> None:
        """Hear a point's accuracy."""
        trial = self._tried[tuple(point.values())]
        self._study.tell(trial, WORST if value is None else value)


def _raw(axis: Axis, index: int) -> Value:
    """Return what stands for the value at a place in Optuna's study."""
    return axis.at(index) if isinstance(axis.choices, Range) else index


def _value(axis: Axis, trial: Any) -> Value:  # noqa: ANN401 - Optuna's, which may not be installed
    """Return the value of an axis that a trial of Optuna's suggests."""
    choices = axis.choices
    if not isinstance(choices, Range):
        if axis.ordered:
            return axis.at(trial.suggest_int(axis.name, 0, len(choices) - 1))
        return axis.at(trial.suggest_categorical(axis.name, list(range(len(choices)))))
    if choices.whole:
        return int(trial.suggest_int(axis.name, choices.low, choices.high, log=choices.log))
    exact = float(trial.suggest_float(axis.name, choices.low, choices.high, log=choices.log))
    return min(max(float(f"{exact:.{DIGITS}g}"), choices.low), choices.high)
