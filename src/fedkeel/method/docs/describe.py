"""A method as text: the order of its steps, and facts about its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedkeel.method.compose import Plan, broken_by, roles_of
from fedkeel.method.docs.docstring import summary
from fedkeel.method.hyperparameters import hyperparameter_types, type_name
from fedkeel.method.part import Part
from fedkeel.method.roles import LocalWork


def describe(plan: Plan) -> str:
    """Return the fixed order of a method's step and round, one line each, with its parts."""
    rule = plan.gradient_rule
    objective = plan.objective
    loss = f"the loss of {objective.criterion.name}" if objective.criterion else "the task loss"
    if rule is None:
        where = f"of {loss} at the local model"
    else:
        where = f"by {rule.name}" + (f", of {loss}" if objective.criterion else "")
    added = [*(p.name for p in objective.terms), *(p.name for p in objective.penalties)]
    penalties = "".join(f" + {name}" for name in added)
    lines = [
        f"method   {plan.expression}",
        f"weights  {plan.weights}",
        "a client's round",
        *_line("keep parameters at the client", _names(plan.personals)),
        *_line("local work by", [p.name for p in plan.parts if isinstance(p, LocalWork)]),
        *_line("answer before training", _names(plan.surveys)),
        *_line("receive", [_model(plan), *_names(plan.broadcasts)]),
        *_line("take for the received model that of", _name(plan.receiver)),
        *_line("begin at the model of", _name(plan.local_start)),
        *_line("train on public inputs by", _name(plan.public_training)),
        *_line("prepare", _names(plan.preparations)),
        *_line("phases by", _name(plan.phases)),
        *_line("step: second model of", _name(plan.local_model)),
        *([f"  step: gradient {where}{penalties}"] if plan.makes_steps else []),
        *_line("  then", _names(plan.gradient_transforms)),
        f"  step: {_optimiser(plan)}" if plan.makes_steps else "  train: by your own function",
        *_line("  then", _names(plan.corrections)),
        *_line("carry to the next step", _names(plan.carries)),
        *_line("change the update", _names(plan.update_transforms)),
        *_line("keep for the next round", _names(plan.client_states)),
        *_line("send", [_update(plan), *_names(plan.uploads)]),
        "the server's round",
        *_line("wait for as many updates as", _name(plan.policy)),
        *_line("look up", _names(plan.tables)),
        *_line("change the updates", _names(plan.cohort_transforms)),
        f"  reduce: {plan.reduction.name}",
        *_line("change the aggregate", _names(plan.aggregate_transforms)),
        f"  apply: {plan.server_optimiser.name}",
        *_line("remember", _names(plan.server_states)),
        *_evaluation(plan),
    ]
    return "\n".join(lines)


def _model(plan: Plan) -> str:
    return "model" if plan.dispatch is None else f"model, as {plan.dispatch.name} changes it"


def _optimiser(plan: Plan) -> str:
    part = plan.client_optimiser
    if part is None:
        return "local optimiser (weight decay, momentum, learning rate)"
    return f"the local optimiser of {part.name} (weight decay, learning rate)"


def _update(plan: Plan) -> str:
    return "update" if plan.codec is None else f"update, as {plan.codec.name} encodes it"


def _evaluation(plan: Plan) -> list[str]:
    lines = [
        *_line("train once more by", _name(plan.fine_tuning)),
        *_line("predict by", _name(plan.personal_prediction)),
    ]
    return ["a client's evaluation", *lines] if lines else []


def _names(parts: Sequence[Part]) -> list[str]:
    return [part.name for part in parts]


def _name(part: Part | None) -> list[str]:
    return [] if part is None else [part.name]


def _line(label: str, names: Sequence[str]) -> list[str]:
    return [f"  {label}: {', '.join(names)}"] if names else []


@dataclasses.dataclass(frozen=True)
class Hyperparameter:
    """A hyper-parameter of a part; the fields are keys of ``fedkeel methods --json``.

    Args:
        name: its name.
        type: its type as text.
        range: its bounds by the sign of the comparison, such as ``{"ge": 0.0}``.
        default: its default value.
        value: its value in this part.
    """

    name: str
    type: str
    range: dict[str, float]
    default: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class PartFacts:
    """The facts about a part that programs need; the fields are keys of ``fedkeel methods --json``.

    Args:
        name: its name.
        paper: citation key.
        summary: the first line of its docstring.
        roles: the roles that it plays.
        needs: the capabilities that it needs.
        breaks: the capabilities that it breaks.
        weights: the weights of clients that it states; None for the run's.
        parameters: its hyper-parameters.
    """

    name: str
    paper: str
    summary: str
    roles: list[str]
    needs: list[str]
    breaks: list[str]
    weights: str | None
    parameters: list[Hyperparameter]


def facts(part: Part | type[Part]) -> PartFacts:
    """Return the facts about a part, or about a class of parts with its defaults."""
    kind = part if isinstance(part, type) else type(part)
    instance = part if isinstance(part, Part) else kind()
    return PartFacts(
        name=instance.name,
        paper=instance.paper,
        summary=summary(kind),
        roles=roles_of(kind),
        needs=sorted(capability.name for capability in instance.needs),
        breaks=sorted(capability.name for capability in broken_by(instance)),
        weights=instance.weights,
        parameters=hyperparameters(instance),
    )


def hyperparameters(part: Part) -> list[Hyperparameter]:
    """Return a part's hyper-parameters."""
    types = hyperparameter_types(type(part))
    return [
        Hyperparameter(
            field.name,
            type_name(types[field.name]),
            dict(field.metadata),
            field.default,
            getattr(part, field.name),
        )
        for field in dataclasses.fields(part)
    ]
