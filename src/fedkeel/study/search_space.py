"""The search space of a method: axes of choices, and points with one value on each axis.

An axis is a setting of the run (``local.lr``), or a hyper-parameter of a term of the method's
expression (``fedprox.mu``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeel import config
from fedkeel.config import Choices, Range, Space, Value
from fedkeel.config import Run as RunSettings
from fedkeel.errors import ConfigError, did_you_mean, nearest
from fedkeel.method.grammar import Term, accepted_hyperparameters, parse, read_terms, write_terms
from fedkeel.method.parts.index import ALIASES

Point = dict[str, Value]
"""One value for each axis, by the axis's name."""

End = Literal["low", "high"]

EDGE_SHARE = 0.05
"""Share of a range's span, at either end of it, that counts as its edge."""

MAX_CHECKED = 1000
"""Largest number of points of a grid that are checked before anything runs."""


@dataclass(frozen=True)
class Axis:
    """The choices for one setting or hyper-parameter.

    Args:
        name: the setting's dotted key, or the term and the hyper-parameter.
        choices: the values to try.
        term: index of the expression's term that has the hyper-parameter; None for a setting.
        key: the hyper-parameter, or the setting's dotted key.
    """

    name: str
    choices: Choices
    term: int | None
    key: str

    @property
    def examples(self) -> tuple[Value, ...]:
        """The choices of a list, or the two ends of a range."""
        if isinstance(self.choices, Range):
            return (self.choices.low, self.choices.high)
        return self.choices

    @property
    def size(self) -> int | None:
        """Number of values; None where it is infinite."""
        if isinstance(self.choices, Range):
            return int(self.choices.high - self.choices.low) + 1 if self.choices.is_whole else None
        return len(self.choices)

    def at(self, index: int) -> Value:
        """Return the value at an index of an axis that has a size."""
        if isinstance(self.choices, Range):
            return int(self.choices.low) + index
        return self.choices[index]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are numbers that ascend or descend."""
        numbers = _numbers(self.examples)
        orders = (sorted(numbers), sorted(numbers, reverse=True))
        return len(numbers) == len(self.examples) and numbers in orders

    def end_at(self, value: Value) -> End | None:
        """Return the end of the axis at which a value lies, or None.

        Zero at the low end does not count: strengths and rates cannot go below it.
        """
        numbers = _numbers(self.examples)
        if len(numbers) < max(len(self.examples), 2) or not isinstance(value, int | float):
            return None
        low, high = min(numbers), max(numbers)
        margin = EDGE_SHARE if isinstance(self.choices, Range) else 0.0
        if isinstance(self.choices, Range) and self.choices.log:
            place = math.log(value / low) / math.log(high / low)
        else:
            place = (value - low) / (high - low)
        if place >= 1.0 - margin:
            return "high"
        return "low" if place <= margin and low != 0 else None


def _numbers(values: Sequence[Value]) -> list[int | float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def search_axes(method: str, space: Space) -> tuple[Axis, ...]:
    """Return the axes of a method's search: settings first, then its hyper-parameters.

    Args:
        method: the expression. A hyper-parameter with a value in it is not searched.
        space: all choices.
    """
    axes = [Axis(key, choices, None, key) for key, choices in space.space.items()]
    for index, term in enumerate(read_terms(method)):
        choices_by_key: dict[str, Choices] = {}
        for name, choices in space.method.items():
            choices_by_key |= choices if _is_named(term, name) else {}
        accepted = accepted_hyperparameters(term, method)
        title = term.name + (f".{term.part}" if term.part else "")
        for key, values in choices_by_key.items():
            if key in accepted and key not in term.values:
                axes.append(Axis(f"{title}.{key}", values, index, key))
    return tuple(axes)


def _is_named(term: Term, name: str) -> bool:
    """Return whether the name of a table of hyper-parameters means a term."""
    [named] = read_terms(name)
    same_method = ALIASES.get(named.name, named.name) == ALIASES.get(term.name, term.name)
    return same_method and named.part in ("", term.part)


def settings_at(
    point: Point, axes: Sequence[Axis], method: str, settings: RunSettings
) -> RunSettings:
    """Return the settings of a run at a point.

    Raises:
        ConfigError: a setting does not accept its value.
    """
    values = {axis.key: point[axis.name] for axis in axes if axis.term is None}
    return with_values(settings, {**values, "method": expression_at(point, axes, method)})


def points_of_numbers(axes: Sequence[Axis]) -> tuple[Point, Point]:
    """Return the first point of a search, and one with other numbers of the method.

    Both are the same where no number of the method is searched.
    """
    first: Point = {axis.name: axis.examples[0] for axis in axes}
    last = {
        axis.name: axis.examples[-1]
        for axis in axes
        if axis.term is not None and isinstance(axis.examples[-1], float)
    }
    return first, first | last


def expression_at(point: Point, axes: Sequence[Axis], method: str) -> str:
    """Return a method's expression with the hyper-parameters of a point."""
    terms = read_terms(method)
    for axis in axes:
        if axis.term is not None:
            terms[axis.term].values[axis.key] = point[axis.name]
    return method if all(axis.term is None for axis in axes) else write_terms(terms)


def with_values(settings: RunSettings, values: Mapping[str, Value]) -> RunSettings:
    """Return settings with other values at dotted keys, checked like those of a file.

    Raises:
        ConfigError: names the key, the value and what is accepted.
    """
    nested = settings.model_dump()
    for key, value in values.items():
        *parents, leaf = key.split(".")
        table = nested
        for name in parents:
            table = table[name]
        table[leaf] = value
    return config.build(type(settings), nested, "the search")


def check_space(settings: RunSettings, methods: Sequence[str], space: Space) -> None:
    """Refuse choices that no run accepts, before any run.

    Every value of every axis is checked with the first values of the others; of a grid, its points.

    Raises:
        ConfigError: an unknown key, or a value that a setting does not accept.
        CompositionError: an unknown method or hyper-parameter, or a value that it does not accept.
    """
    searchable = _searchable_keys()
    for key in space.space:
        if key not in searchable:
            raise _unknown_key(key, searchable)
    for name, choices in space.method.items():
        _check_hyperparameters(name, choices)
    for method in methods:
        axes = search_axes(method, space)
        for point in _points_to_check(axes):
            tried = settings_at(point, axes, method, settings)
            parse(tried.method, None, tried.weights)


def _points_to_check(axes: Sequence[Axis]) -> list[Point]:
    names = [axis.name for axis in axes]
    grid = itertools.product(*(axis.examples for axis in axes))
    points = [
        dict(zip(names, values, strict=True)) for values in itertools.islice(grid, MAX_CHECKED)
    ]
    return points + [{**points[0], axis.name: value} for axis in axes for value in axis.examples]


def _searchable_keys() -> list[str]:
    """Return the dotted keys of the settings that can be searched."""
    paths = list(config.paths(config.Run))
    leaves = [key for key in paths if not any(path.startswith(f"{key}.") for path in paths)]
    return [key for key in leaves if key == "weights" or key.startswith(("local.", "cohort."))]


def _unknown_key(key: str, searchable: Sequence[str]) -> ConfigError:
    if key in config.paths(config.Experiment):
        return ConfigError(
            f"[tune.space]: '{key}' cannot be searched.",
            expected="settings below local and cohort, or weights",
            do="make an experiment file for each value",
        )
    do = did_you_mean(key, searchable, len(searchable))
    if nearest(key, searchable) is None:
        do = config.meant(config.Run, key.rpartition(".")[2], searchable)
    return ConfigError(f"[tune.space] has no key '{key}'.", do=do)


def _check_hyperparameters(name: str, choices: Mapping[str, Choices]) -> None:
    """Refuse a table with an unknown method or unknown hyper-parameters.

    Raises:
        CompositionError: there is no such method.
        ConfigError: the name is an expression, or the method has no such hyper-parameter.
    """
    term, *others = read_terms(name)
    if others or term.values:
        raise ConfigError(
            f"[tune.method]: '{name}' is not the name of a method.",
            expected="a name as it stands in an expression, such as fedprox or fedgc.sgc",
        )
    accepted = accepted_hyperparameters(term, name)
    for key in choices:
        if key not in accepted:
            raise ConfigError(
                f"[tune.method]: {name} has no hyper-parameter '{key}'.",
                do=did_you_mean(key, accepted) if accepted else f"{name} takes none",
            )
