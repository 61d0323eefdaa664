"""Numbers of a method, such as FedProx's mu, that are inputs of what is compiled.

Then clients of runs that differ in them train side by side, each with the numbers of its own run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

from torch import Tensor

from fedkeel.method.compose import Plan
from fedkeel.method.hyperparameters import hyperparameter_types
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Part


def numbers_of(parts: Iterable[Part]) -> dict[str, float]:
    """Return the hyper-parameters of parts that are numbers, by the names of part and field.

    Counts are left out: they say how often something is done.

    >>> from fedkeel.method.grammar import parse
    >>> numbers_of(parse("fedntd(beta=0.5)").parts)
    {'fedntd.beta': 0.5, 'fedntd.tau': 1.0}
    """
    return {
        f"{part.name}.{name}": value
        for part in parts
        for name, hint in hyperparameter_types(type(part)).items()
        if float in (hint, *get_args(hint))
        and isinstance(value := getattr(part, name), int | float)
        and not isinstance(value, bool)
    }


def with_numbers(training: ClientTraining, numbers: Mapping[str, Tensor | float]) -> ClientTraining:
    """Return a training whose parts have other numbers, which may be tensors []."""
    if not numbers:
        return training
    changed: dict[int, Part] = {}
    for part in training.plan.parts:
        names = {f"{part.name}.{f.name}": f.name for f in fields(part)}
        new: dict[str, Any] = {f: numbers[name] for name, f in names.items() if name in numbers}
        if new:
            changed[id(part)] = replace(part, **new)
    plan: Plan = _with_parts(training.plan, changed)
    return replace(training, plan=plan)


def _with_parts(value: Any, changed: Mapping[int, Part]) -> Any:  # noqa: ANN401
    """Return a plan, or what a plan holds, with other parts in the place of some."""
    if isinstance(value, Part):
        return changed.get(id(value), value)
    if isinstance(value, tuple):
        return tuple(_with_parts(each, changed) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        new = {f.name: _with_parts(getattr(value, f.name), changed) for f in fields(value)}
        return replace(value, **new)
    return value
