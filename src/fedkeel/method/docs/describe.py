"""A method in words: what happens in which order, what is sent and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedkeel.method.compose import Plan, roles_of
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
        *_listed("local work by", [p.name for p in plan.parts if isinstance(p, LocalWork)]),
        *_listed("answer before training", _names(plan.surveys)),
        *_listed("receive", [_model(plan), *_names(plan.broadcasts)]),
        *_listed("prepare", _names(plan.preparations)),
        f"  step: gradient {where}{penalties}",
        *_listed("  then", _names(plan.gradient_transforms)),
        "  step: local optimiser (weight decay, momentum, learning rate)",
        *_listed("  then", _names(plan.corrections)),
        *_listed("carry to the next step", _names(plan.carries)),
        *_listed("change the update", _names(plan.update_transforms)),
        *_listed("keep for the next round", _names(plan.client_states)),
        *_listed("send", [_update(plan), *_names(plan.uploads)]),
        "the server's round",
        *_listed("look up", _names(plan.tables)),
        *_listed("change the updates", _names(plan.cohort_transforms)),
        f"  reduce: {plan.reduction.name}",
        *_listed("change the aggregate", _names(plan.aggregate_transforms)),
        f"  apply: {plan.server_optimiser.name}",
        *_listed("remember", _names(plan.server_states)),
    ]
    return "\n".join(lines)


def _model(plan: Plan) -> str:
    return "model" if plan.dispatch is None else f"model, as {plan.dispatch.name} changes it"


def _update(plan: Plan) -> str:
    return "update" if plan.codec is None else f"update, as {plan.codec.name} encodes it"


def _names(parts: Sequence[Part]) -> list[str]:
    return [part.name for part in parts]


def _listed(what: str, names: Sequence[str]) -> list[str]:
    return [f"  {what}: {', '.join(names)}"] if names else []


def facts(part: Part | type[Part]) -> dict[str, Any]:
    """Return what programs want to know of a part: name, paper, roles, needs, parameters."""
    kind = part if isinstance(part, type) else type(part)
    made = part if isinstance(part, Part) else kind()
    return {
        "name": made.name,
        "paper": made.paper,
        "summary": summary(kind),
        "roles": roles_of(kind),
        "needs": sorted(c.name for c in made.needs),
        "breaks": sorted(c.name for c in made.breaks),
        "weights": made.weights,
        "parameters": parameters(made),
    }


def parameters(part: Part) -> list[dict[str, Any]]:
    """Return a part's hyper-parameters: name, type, range, default and value."""
    hints = hyperparameter_types(type(part))
    return [
        {
            "name": f.name,
            "type": type_name(hints[f.name]),
            "range": dict(f.metadata),
            "default": f.default,
            "value": getattr(part, f.name),
        }
        for f in dataclasses.fields(part)
    ]
