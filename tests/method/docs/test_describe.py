"""Methods in words: the order of a round, facts for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from each import each
from fedkeel.method.compose import roles_of
from fedkeel.method.docs.describe import Hyperparameter, describe, facts
from fedkeel.method.docs.docstring import summary
from fedkeel.method.grammar import parse
from fedkeel.method.part import Part
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES

KINDS = sorted(
    {kind for recipe in REGISTRY.values() for kind in recipe.parts.values()}, key=lambda k: k.name
)


# --- facts for programs ----------------------------------------------------------------------


@each("kind", KINDS)
def test_facts_are_plain_values(kind: type[Part]) -> None:
    found = facts(kind)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    assert found == facts(kind())
    assert set(found.roles) == {n for role, n in ROLES.items() if issubclass(kind, role)}
    assert found.roles == roles_of(kind)
    assert found.roles
    assert found.name == kind.name
    assert found.summary == summary(kind)


def test_facts_of_a_part_as_it_is_set() -> None:
    (part,) = parse("gradma.s(memory=20, lr=2.0)").parts
    found = {p.name: p for p in facts(part).parameters}
    assert found["memory"] == Hyperparameter("memory", "int | None", {"ge": 0}, None, 20)
    assert found["groups"].type == "Literal['tensor', 'layer', 'model']"
    assert found["beta1"].range == {"ge": 0.0, "lt": 1.0}
    assert found["lr"].value == 2.0
    assert facts(part).needs == ["PER_CLIENT_UPDATES", "SEPARATE_UPDATES", "STABLE_CLIENTS"]
    assert facts(part).weights == "uniform"


def test_facts_follow_the_hyper_parameters() -> None:
    assert facts(parse("gcfed.local").parts[0]).needs == ["HEAD"]
    assert facts(parse("localgc").parts[0]).needs == []


# --- the order of a round --------------------------------------------------------------------


@each("entry", REGISTRY)
def test_a_description_names_every_part_and_every_role_it_plays(entry: str) -> None:
    plan = parse(entry)
    text = describe(plan)
    lines = text.splitlines()
    assert lines[0] == f"method   {plan.expression}"
    assert lines[1] == f"weights  {plan.weights}"
    body = "\n".join(lines[2:])
    for part in plan.parts:
        assert body.count(part.name) >= len(roles_of(part))


def test_the_order_of_everything_at_once() -> None:
    text = describe(
        parse(
            "fedsgd+fedprox+scaffold+localgc+gradma+fednova+fedgc+globalgc+fedgh", weights="uniform"
        )
    )
    assert text.splitlines()[1:] == [
        "weights  uniform",
        "a client's round",
        "  local work by: fedsgd",
        "  receive: model, scaffold, fedgc.cgc",
        "  step: gradient of the task loss at the local model + fedprox",
        "    then: scaffold, gcfed.local, gradma.w",
        "  step: local optimiser (weight decay, momentum, learning rate)",
        "  carry to the next step: gradma.w",
        "  change the update: fednova, fedgc.cgc",
        "  keep for the next round: scaffold, gradma.w",
        "  send: update, scaffold, fednova",
        "the server's round",
        "  change the updates: fedgh",
        "  reduce: mean",
        "  change the aggregate: fednova, fedgc.sgc, gcfed.global",
        "  apply: gradma.s",
        "  remember: scaffold, fedgc.cgc",
    ]


def test_the_order_of_a_method_that_prepares_and_corrects() -> None:
    assert describe(parse("fedreg")).splitlines() == [
        "method   fedreg",
        "weights  uniform",
        "a client's round",
        "  receive: model",
        "  prepare: fedreg",
        "  step: gradient by fedreg",
        "  step: local optimiser (weight decay, momentum, learning rate)",
        "    then: fedreg",
        "  send: update",
        "the server's round",
        "  reduce: mean",
        "  apply: addition",
    ]
