"""Samplers: which points a search tries next, from a grid or from Optuna.

A sampler returns points and receives their scores. Its points depend only on its seed and on these
scores, so a search that is repeated from its finished runs asks for the same points in the
same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fedkeel.base.rng import generator
from fedkeel.config import Range, Space, Value
from fedkeel.errors import ConfigError
from fedkeel.study.search_space import Axis, Point

WAVE = 4
"""Points that Optuna suggests before it learns their scores, whatever the number of processes."""

DEFAULT_TRIALS = 16
"""Trials of a search that is not a grid, where the settings name no number."""

FAILED_SCORE = -1e300
"""Score of a trial that failed: worse than any other."""

MAX_REPEATS = 50
"""Known suggestions in a row after which a new point is drawn."""

DIGITS = 4
"""Significant digits of a number from a range, so that it can be written down."""


class Sampler(Protocol):
    """Chooses the points of a search."""

    @property
    def size(self) -> int | None:
        """Number of points in the search space; None where it is infinite."""

    @property
    def trials(self) -> int:
        """Largest number of points that are tried."""

    def ask(self) -> list[Point]:
        """Return the points to try now; an empty list at the end."""

    def tell(self, point: Point, score: float | None) -> None:
        """Take the score of a point, the higher the better; None for a trial that failed."""


def make_sampler(axes: Sequence[Axis], space: Space, seed: int) -> Sampler:
    """Return the sampler of a method's search.

    A search space with no more points than trials is tried in full, whatever the sampler.

    Raises:
        ConfigError: the grid is infinite, or Optuna is needed and not installed.
    """
    infinite = [axis.name for axis in axes if axis.size is None]
    name = sampler_name(space)
    if name == "grid" and infinite:
        raise ConfigError(
            f"A grid needs lists, and '{infinite[0]}' is a range.",
            do="give a list of values, or set sampler = 'tpe' or 'random'",
        )
    if name == "grid":
        return GridSampler(axes, space.trials, seed)
    trials = space.trials or DEFAULT_TRIALS
    size = _size(axes)
    if size is not None and (name == "random" or size <= trials):
        return GridSampler(axes, trials, seed)
    return OptunaSampler(axes, trials, seed, is_tpe=name == "tpe")


def sampler_name(space: Space) -> str:
    """Return the sampler that the settings name, or the default one for their choices."""
    tables = (space.space, *space.method.values())
    has_ranges = any(isinstance(choices, Range) for table in tables for choices in table.values())
    return space.sampler or ("tpe" if has_ranges else "grid")


def _size(axes: Sequence[Axis]) -> int | None:
    """Return the number of combinations; None where it is infinite."""
    sizes = [axis.size for axis in axes if axis.size is not None]
    return math.prod(sizes) if len(sizes) == len(axes) else None


class GridSampler:
    """All combinations, the last axis fastest; or `max_points` of them, drawn at random."""

    def __init__(self, axes: Sequence[Axis], max_points: int | None, seed: int) -> None:
        self._axes = axes
        self.size = _size(axes) or 0
        self.trials = min(self.size, max_points or self.size)
        self._indices: Sequence[int] = range(self.size)
        if self.trials < self.size:
            drawn = generator(seed, "tune").choice(self.size, self.trials, replace=False)
            self._indices = sorted(int(index) for index in drawn)

    def ask(self) -> list[Point]:
        """Return all points at once."""
        indices, self._indices = self._indices, ()
        return [_grid_point(self._axes, index) for index in indices]

    def tell(self, point: Point, score: float | None) -> None:
        """Ignore the score."""


def _grid_point(axes: Sequence[Axis], index: int) -> Point:
    """Return the point at an index of the grid."""
    places = np.unravel_index(index, [axis.size or 1 for axis in axes]) if axes else ()
    return {axis.name: axis.at(int(place)) for axis, place in zip(axes, places, strict=True)}


class OptunaSampler:
    """Points that Optuna suggests, in waves; no point comes twice.

    With `is_tpe` suggestions depend on scores (tree of Parzen estimators), else they are random.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, axes: Sequence[Axis], trials: int, seed: int, *, is_tpe: bool) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError(
                f"sampler = '{'tpe' if is_tpe else 'random'}' needs Optuna, which is not "
                "installed.",
                do="pip install 'fedkeel[tune]', or give lists and set sampler = 'grid'",
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = (
            optuna.samplers.TPESampler(seed=seed, n_startup_trials=WAVE, constant_liar=True)
            if is_tpe
            else optuna.samplers.RandomSampler(seed=seed)
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._dropped = optuna.trial.TrialState.FAIL
        self._axes, self._seed = axes, seed
        self.size = _size(axes)
        self.trials = min(trials, self.size or trials)
        self._asked: dict[tuple[Value, ...], Any] = {}

    def ask(self) -> list[Point]:
        """Return the next wave."""
        count = min(WAVE, self.trials - len(self._asked))
        return [point for _ in range(count) if (point := self._new_point()) is not None]

    def _new_point(self) -> Point | None:
        """Return a new point; None where none is found."""
        for _ in range(MAX_REPEATS):
            if (point := self._suggestion()) is not None:
                return point
        if self.size is None:
            return None  # a range so narrow that it has few rounded numbers
        random = generator(self._seed, "tune", len(self._asked))
        while True:
            index = int(random.integers(self.size))
            if tuple(_grid_point(self._axes, index).values()) not in self._asked:
                places = np.unravel_index(index, [axis.size or 1 for axis in self._axes])
                self._study.enqueue_trial(
                    {
                        axis.name: _optuna_value(axis, int(place))
                        for axis, place in zip(self._axes, places, strict=True)
                    }
                )
                return self._suggestion()

    def _suggestion(self) -> Point | None:
        """Return what Optuna suggests; None where this point was asked for before."""
        trial = self._study.ask()
        point = {axis.name: _suggest(axis, trial) for axis in self._axes}
        key = tuple(point.values())
        if key in self._asked:
            self._study.tell(trial, state=self._dropped)
            return None
        self._asked[key] = trial
        return point

    def tell(self, point: Point, score: float | None) -> None:
        """Pass the score of a point on to Optuna."""
        trial = self._asked[tuple(point.values())]
        self._study.tell(trial, FAILED_SCORE if score is None else score)


def _optuna_value(axis: Axis, index: int) -> Value:
    """Return what stands in Optuna's study for the value at an index: lists are numbered."""
    return axis.at(index) if isinstance(axis.choices, Range) else index


def _suggest(axis: Axis, trial: Any) -> Value:  # noqa: ANN401 - Optuna may not be installed
    """Return the value of an axis that Optuna suggests."""
    choices = axis.choices
    if not isinstance(choices, Range):
        if axis.is_ordered:
            return axis.at(trial.suggest_int(axis.name, 0, len(choices) - 1))
        return axis.at(trial.suggest_categorical(axis.name, list(range(len(choices)))))
    if choices.is_whole:
        return int(trial.suggest_int(axis.name, choices.low, choices.high, log=choices.log))
    exact = float(trial.suggest_float(axis.name, choices.low, choices.high, log=choices.log))
    return min(max(float(f"{exact:.{DIGITS}g}"), choices.low), choices.high)
