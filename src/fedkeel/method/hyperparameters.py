"""Hyper-parameters of parts: their types, their ranges, and what is wrong with one."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from fedkeel.errors import CompositionError
from fedkeel.method.part import Part


def check_hyperparameters(part: Part) -> None:
    """Refuse a hyper-parameter of the wrong type or out of range.

    Raises:
        CompositionError: in the one sentence that is used for all of them.
    """
    hints = hyperparameter_types(type(part))
    for f in dataclasses.fields(part):
        value, hint = getattr(part, f.name), hints[f.name]
        bounds = dict(f.metadata)
        if not (_fits(value, hint) and _within(value, bounds)):
            raise CompositionError(
                f"`{f.name}` of {part.name} must be {_wanted(hint, bounds)}. Got {value!r}."
            )


@lru_cache(maxsize=256)
def hyperparameter_types(kind: type[Part]) -> dict[str, Any]:
    """Return the types of a part's hyper-parameters by name."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def is_expressible(hint: Any) -> bool:  # noqa: ANN401 - a type hint
    """Return whether values of a type can be written in an expression."""
    plain = (bool, int, float, str, type(None))
    return all(option in plain or get_origin(option) is Literal for option in _options(hint))


def type_name(hint: Any) -> str:  # noqa: ANN401
    """Return a type as it is written, without the modules that everyone knows."""
    shown = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"typing\.|fedkeel\.\w+\.", "", shown)


def _options(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type hint
    union = get_origin(hint) in (typing.Union, types.UnionType)
    return get_args(hint) if union else (hint,)


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401
    for option in _options(hint):
        if get_origin(option) is Literal:
            if any(value == known and type(value) is type(known) for known in get_args(option)):
                return True
        elif option is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return True
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif isinstance(value, option):
            return True
    return False


def _within(value: Any, bounds: dict[str, float]) -> bool:  # noqa: ANN401
    if value is None or isinstance(value, str):
        return True
    return (
        math.isfinite(value)
        and value >= bounds.get("ge", value)
        and value <= bounds.get("le", value)
        and ("gt" not in bounds or value > bounds["gt"])
        and ("lt" not in bounds or value < bounds["lt"])
    )


def _wanted(hint: Any, bounds: dict[str, float]) -> str:  # noqa: ANN401
    names = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            names += [repr(v) for v in get_args(option)]
        else:
            names.append({"NoneType": "None", "str": "text"}.get(option.__name__, option.__name__))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = " and ".join(f"{signs[k]} {v:g}" for k, v in bounds.items())
    kinds = " or ".join(names)
    bare = kinds.startswith(("'", "None", "text"))
    article = "" if bare else "an " if kinds[0] in "aeiou" else "a "
    return f"{article}{kinds}" + (f" {limits}" if limits else "")
