"""Which parts go with local training of the user's own: by their roles, never by their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

from fedkeel.errors import CompositionError
from fedkeel.features.own_training.legality import check_parts
from fedkeel.method import roles
from fedkeel.method.compose import compose
from fedkeel.method.grammar import parse
from fedkeel.method.part import Capability
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES, Penalty, ServerState
from harness import EVERYTHING

WITHOUT_STEPS = EVERYTHING - {Capability.LOCAL_STEPS}

IN_STEPS = {
    "training phases",
    "preparation",
    "training on public inputs",
    "second local model",
    "criterion",
    "loss term",
    "gradient rule",
    "penalty",
    "gradient transform",
    "local optimiser",
    "step correction",
    "carry within a round",
    "fine-tuning",
}


def part_of(role: type, name: str) -> roles.Part:
    """A part of a user's that has one role and does nothing."""
    methods = {method: lambda self, *args: {} for method in role.__abstractmethods__}
    methods |= {"pull": 0.0} if role is Penalty else {}
    return type("Mine", (role,), {**methods, "name": name, "paper": ""})()


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.__name__)
def test_each_role_goes_or_is_refused(role: type) -> None:
    part = part_of(role, "mine")
    if ROLES[role] not in IN_STEPS:
        check_parts([part])
        plan = compose([part], WITHOUT_STEPS)
        assert not plan.makes_steps
        return
    assert compose([part], EVERYTHING).makes_steps
    with pytest.raises(CompositionError, match="mine needs LOCAL_STEPS"):
        compose([part], WITHOUT_STEPS)
    with pytest.raises(CompositionError, match="mine cannot be combined with") as caught:
        check_parts([part])
    assert f"its role, {ROLES[role]}, acts in local steps" in str(caught.value)


def test_the_nearest_method_can_be_used() -> None:
    """Of every method that is refused, alone and beside others."""
    refused = {}
    for name in REGISTRY:
        for beside in ("", "+krum", "+fedadam", "+topk"):
            try:
                plan = parse(name + beside, EVERYTHING | {Capability.CLASS_COUNTS})
            except CompositionError:
                continue  # the two do not go together anyway
            try:
                check_parts(plan.parts)
            except CompositionError as error:
                nearest = str(error.do).split(" in its place")[0].removeprefix("take ")
                parse(nearest, WITHOUT_STEPS, "examples")
                refused[name + beside] = nearest
            else:
                assert not parse(plan.expression, WITHOUT_STEPS, "examples").makes_steps
    assert refused["localgc"] == refused["gcfed"] == "gcfed.global"
    assert refused["gradma"] == "gradma.s"
    assert refused["dpsgd"] == "dpclient"
    assert refused["fednova"] == "fednova(length='steps')"
    assert refused["fedprox+krum"] == "krum"
    assert refused["fedprox+fedadam"] == "fedadam"
    assert refused["fedadamw"] == "fedadam"
    assert refused["fedrep"] == refused["ditto"] == refused["finetune"] == "fedper"
    allowed = {name for name in REGISTRY if name not in refused}
    assert {"momentum", "fedadam", "fedgh", "globalgc", "fedgc", "krum", "median"} <= allowed
    assert {"fedbuff", "dpclient", "topk", "quantise", "fedper", "fedbn", "fedsgd"} <= allowed
    assert not {"scaffold", "feddyn", "moon", "mime", "fedsam", "fedlc"} & allowed


def test_a_part_may_act_in_steps_by_one_of_its_roles() -> None:
    class Both(Penalty, ServerState):
        name, paper, pull = "both", "", 0.0

        def penalty_gradient(
            self, params: dict[str, Tensor], step: roles.Step
        ) -> dict[str, Tensor]:
            return params

        def init_server(self, params, population):
            return {}

        def next_server(self, state, outcome):
            return {}

    with pytest.raises(CompositionError, match="its role, penalty"):
        check_parts([Both()])


def test_the_guide_says_which_methods_go() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "own-training.md"
    table = guide.read_text("utf-8").split("| goes | is refused |")[1].split("\n\n")[0]
    rows = [
        line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "`" in line
    ]
    name = re.compile(r"`([a-z_0-9.]+(?:\(length='steps'\))?)`")
    goes, refused = ([n for row in rows for n in name.findall(row[side])] for side in (0, 1))
    assert len(goes) > 15
    assert len(refused) > 12
    for method in goes:
        check_parts(parse(method).parts)
    for method in refused:
        with pytest.raises(CompositionError, match="local training of your own"):
            check_parts(parse(method).parts)
    with pytest.raises(CompositionError) as caught:
        check_parts(parse("fedprox").parts)
    for line in str(caught.value).splitlines():
        assert line in guide.read_text("utf-8")
