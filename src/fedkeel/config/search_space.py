"""What is searched for good settings: the table ``[tune]`` of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from fedkeel.base.settings import Settings
from fedkeel.errors import did_you_mean

Value = bool | int | float | str
"""A setting, or a hyper-parameter of a part."""

Metric = Literal["best", "last", "last_mean"]
SamplerName = Literal["grid", "random", "tpe"]
Split = Literal["validation", "test"]

LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""What is searched where nothing is said."""


class Range(Settings):
    """Numbers between two bounds.

    Where both bounds are written as whole numbers, only whole numbers are tried.

    Args:
        low: smallest value.
        high: largest value.
        log: whether their logarithms are spread evenly; then `low` > 0.
    """

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"a range needs low < high, and has {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a range with log = true needs low > 0, and has {self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Choices = Range | tuple[Value, ...]


def _learning_rates() -> dict[str, Choices]:
    return {"local.lr": LEARNING_RATES}


class Space(Settings):
    """What ``fedkeel tune`` searches, and what it chooses by.

    Args:
        space: choices for ``weights`` and for settings below ``local`` and ``cohort``, by dotted
            key: a list, or a `Range`. Every method gets these.
        method: choices for the hyper-parameters of a method, by its name in an expression. What an
            expression gives itself stays.
        sampler: ``grid`` tries every combination of the lists; ``random`` draws; ``tpe`` lets
            Optuna's tree of Parzen estimators suggest. None takes ``grid`` where all choices are
            lists, and ``tpe`` elsewhere.
        trials: trials of each method, at most; combinations are never tried twice. None tries the
            whole grid, or 16 where the sampler is another.
        seeds: runs of each trial; their mean counts.
        seed: the first of these seeds; None takes the run's own.
        metric: what counts of a run, over the rounds after which it was evaluated: the ``best``
            accuracy, the ``last``, or the mean of the last ten, ``last_mean``.
        split: where accuracy is measured: on a ``validation`` part of the training data, or on the
            ``test`` set, as many papers do.
        holdout: share of each client's training examples that is the validation part.
    """

    space: dict[str, Choices] = Field(default_factory=_learning_rates)
    method: dict[str, dict[str, Choices]] = Field(default_factory=dict)
    sampler: SamplerName | None = None
    trials: int | None = Field(None, ge=1)
    seeds: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=0, le=2**32 - 1)
    metric: Metric = "best"
    split: Split = "validation"
    holdout: float = Field(0.2, gt=0.0, lt=1.0)

    renamed: ClassVar[Mapping[str, str]] = {"on": "split"}

    @field_validator("space", mode="before")
    @classmethod
    def _flat(cls, values: object) -> object:
        return dict(_read(values, "space")) if isinstance(values, Mapping) else values

    @field_validator("method", mode="before")
    @classmethod
    def _by_method(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        result: dict[str, dict[str, Choices]] = {}
        for key, choices in _read(values, "method").items():
            name, _, hyperparameter = key.rpartition(".")
            if not name:
                raise ValueError(
                    f"'method.{key}' has no table: write [tune.method.NAME] {key} = ..."
                )
            result.setdefault(name, {})[hyperparameter] = choices
        return result


def _read(values: Mapping[str, Any], at: str, prefix: str = "") -> dict[str, Choices]:
    """Return choices by dotted key; tables may be nested or their keys dotted.

    Raises:
        ValueError: what stands at a key is neither a list nor a range.
    """
    result: dict[str, Choices] = {}
    for name, value in values.items():
        key, where = prefix + name, f"'{at}.{prefix}{name}'"
        if isinstance(value, Range):
            result[key] = value
        elif isinstance(value, Mapping) and value.keys() & {"low", "high"}:
            result[key] = _range(value, where)
        elif isinstance(value, Mapping):
            result |= _read(value, at, f"{key}.")
        elif isinstance(value, list | tuple):
            result[key] = _list(value, where)
        else:
            raise ValueError(f"{where} is {value!r}: give a list, or {{low = ..., high = ...}}")
    return result


def _range(value: Mapping[str, Any], where: str) -> Range:
    for name in value.keys() - set(Range.model_fields):
        raise ValueError(f"{where} has no key {name!r}: {did_you_mean(name, Range.model_fields)}")
    for bound in ("low", "high"):
        number = value.get(bound)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{where} needs a number for '{bound}', and has {number!r}")
    try:
        return Range.model_validate(dict(value))
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {message}") from None


def _list(value: list[Any] | tuple[Any, ...], where: str) -> tuple[Value, ...]:
    if not value:
        raise ValueError(f"{where} is an empty list: give at least one choice")
    for one in value:
        if not isinstance(one, bool | int | float | str):
            raise ValueError(f"{where} has a choice {one!r}: give numbers, true, false or text")
    return tuple(dict.fromkeys(value))
