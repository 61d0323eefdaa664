"""What is searched for one method: axes of choices, and points that set one value on each.

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
from fedkeel.method.grammar import Term, accepts, parse, read, written
from fedkeel.method.registry import ALIASES

Point = dict[str, Value]
"""One value for each axis, by the axis's name."""

End = Literal["low", "high"]

NEAR = 0.05
"""Share of a range's span, at either end of it, that counts as its edge."""

MANY = 1000
"""Points of a grid that are all checked before anything runs; of a larger one so many are."""


@dataclass(frozen=True)
class Axis:
    """Choices for one setting or hyper-parameter.

    Args:
        name: what it is called: the setting's dotted key, or the term and the hyper-parameter.
        choices: what is tried.
        term: which term of the expression has it, counted from 0; None for a setting of the run.
        key: the hyper-parameter, or the setting's dotted key.
    """

    name: str
    choices: Choices
    term: int | None
    key: str

    @property
    def some(self) -> tuple[Value, ...]:
        """The choices; of a range its two ends."""
        if isinstance(self.choices, Range):
            return (self.choices.low, self.choices.high)
        return self.choices

    @property
    def size(self) -> int | None:
        """How many values there are; None where they are without number."""
        if isinstance(self.choices, Range):
            return int(self.choices.high - self.choices.low) + 1 if self.choices.whole else None
        return len(self.choices)

    def at(self, index: int) -> Value:
        """Return the value at a place, for an axis that has a size."""
        if isinstance(self.choices, Range):
            return int(self.choices.low) + index
        return self.choices[index]

    @property
    def ordered(self) -> bool:
        """Whether neighbours in a list are near each other: numbers that ascend or descend."""
        numbers = _numbers(self.some)
        return len(numbers) == len(self.some) and numbers in (
            sorted(numbers),
            sorted(numbers, reverse=True),
        )

    def end(self, value: Value) -> End | None:
        """Return the end of the axis at which a value lies, or None.

        Zero at the low end is none: strengths and rates end there by themselves.
        """
        numbers = _numbers(self.some)
        if len(numbers) < len(self.some) or len(numbers) < 2 or not isinstance(value, int | float):
            return None
        low, high = min(numbers), max(numbers)
        reach = NEAR if isinstance(self.choices, Range) else 0.0
        if isinstance(self.choices, Range) and self.choices.log:
            place = math.log(value / low) / math.log(high / low)
        else:
            place = (value - low) / (high - low)
        if place >= 1.0 - reach:
            return "high"
        return "low" if place <= reach and low != 0 else None


def _numbers(values: Sequence[Value]) -> list[int | float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def axes(method: str, space: Space) -> tuple[Axis, ...]:
    """Return what is searched for a method: settings first, then its own hyper-parameters.

    Args:
        method: the expression. A hyper-parameter that it gives itself is not searched.
        space: all choices.
    """
    found = [Axis(key, choices, None, key) for key, choices in space.space.items()]
    for place, term in enumerate(read(method)):
        own: dict[str, Choices] = {}
        for name, choices in space.method.items():
            own |= choices if _meant(name, term) else {}
        takes = accepts(term, method)
        for key, some in own.items():
            if key in takes and key not in term.values:
                found.append(Axis(f"{_title(term)}.{key}", some, place, key))
    return tuple(found)


def applied(
    settings: RunSettings, method: str, searched: Sequence[Axis], point: Point
) -> RunSettings:
    """Return the settings of a run at a point.

    Raises:
        ConfigError: a value cannot be used for its setting.
    """
    values = {axis.key: point[axis.name] for axis in searched if axis.term is None}
    return changed(settings, {**values, "method": expression(method, searched, point)})


def expression(method: str, searched: Sequence[Axis], point: Point) -> str:
    """Return a method's expression with the hyper-parameters of a point."""
    terms = read(method)
    for axis in searched:
        if axis.term is not None:
            terms[axis.term].values[axis.key] = point[axis.name]
    return method if all(axis.term is None for axis in searched) else written(terms)


def changed(settings: RunSettings, values: Mapping[str, Value]) -> RunSettings:
    """Return settings with other values at dotted keys, checked like those of a file.

    Raises:
        ConfigError: names the key, what was given and what is accepted.
    """
    nested = settings.model_dump()
    for key, value in values.items():
        *parents, leaf = key.split(".")
        here = nested
        for name in parents:
            here = here[name]
        here[leaf] = value
    return config.build(type(settings), nested, "the search")


def check(settings: RunSettings, methods: Sequence[str], space: Space) -> None:
    """Refuse choices that no run could be made with, before any run.

    Every value of every axis is tried with the first values of the others; of a grid, its points.

    Raises:
        ConfigError: an unknown key, or a value that a setting does not take.
        CompositionError: an unknown method or hyper-parameter, or a value that it does not take.
    """
    known = _searchable()
    for key in space.space:
        if key not in known:
            raise _unknown(key, known)
    for name, choices in space.method.items():
        _check_term(name, choices)
    for method in methods:
        found = axes(method, space)
        for point in _points(found):
            one = applied(settings, method, found, point)
            parse(one.method, None, one.weights)


def _points(found: Sequence[Axis]) -> list[Point]:
    grid = itertools.product(*(axis.some for axis in found))
    first = [
        dict(zip(_names(found), values, strict=True)) for values in itertools.islice(grid, MANY)
    ]
    alone = [{**first[0], axis.name: value} for axis in found for value in axis.some]
    return first + alone


def _names(found: Sequence[Axis]) -> list[str]:
    return [axis.name for axis in found]


def _searchable() -> list[str]:
    """Return the dotted keys of the settings that can be searched."""
    every = list(config.paths(config.Run))
    leaves = [key for key in every if not any(other.startswith(f"{key}.") for other in every)]
    return [key for key in leaves if key == "weights" or key.startswith(("local.", "cohort."))]


def _unknown(key: str, known: Sequence[str]) -> ConfigError:
    if key in config.paths(config.Experiment):
        return ConfigError(
            f"[tune.space]: '{key}' cannot be searched.",
            expected="settings below local and cohort, or weights",
            do="make an experiment file for each value",
        )
    do = did_you_mean(key, known, len(known))
    if nearest(key, known) is None:
        do = config.meant(config.Run, key.rpartition(".")[2], known)
    return ConfigError(f"[tune.space] has no key '{key}'.", do=do)


def _check_term(name: str, choices: Mapping[str, Choices]) -> None:
    """Refuse a table of hyper-parameters that belong to nothing.

    Raises:
        CompositionError: there is no such method, or it has no such hyper-parameter.
    """
    term, *more = read(name)
    if more or term.values:
        raise ConfigError(
            f"[tune.method]: '{name}' is not the name of a method.",
            expected="a name as it stands in an expression, such as fedprox or fedgc.sgc",
        )
    takes = accepts(term, name)
    for key in choices:
        if key not in takes:
            raise ConfigError(
                f"[tune.method]: {name} has no hyper-parameter '{key}'.",
                do=did_you_mean(key, takes) if takes else f"{name} takes none",
            )


def _meant(name: str, term: Term) -> bool:
    """Return whether a table's name stands for a term."""
    [other] = read(name)
    same = ALIASES.get(other.name, other.name) == ALIASES.get(term.name, term.name)
    return same and other.part in ("", term.part)


def _title(term: Term) -> str:
    return term.name + (f".{term.part}" if term.part else "")
