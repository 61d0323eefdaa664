"""Composition: hyper-parameters, slots, needs, weights and the order of parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from each import each
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method.compose import (
    LOOP,
    SERVER,
    SIMULATION,
    broken_by,
    compose,
    roles_of,
)
from fedkeel.method.context import Outcome, Round, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.method.hyperparameters import check_hyperparameters, hyperparameter_types
from fedkeel.method.part import Capability, Part, Traits, param, traits_of
from fedkeel.method.parts.compress import TopK
from fedkeel.method.parts.fedgc import CGC, SGC
from fedkeel.method.parts.fednova import FedNova
from fedkeel.method.parts.fedprox import FedProx
from fedkeel.method.parts.gcfed import GlobalGC, LocalGC
from fedkeel.method.parts.gradma import GradMAS, GradMAW
from fedkeel.method.parts.scaffold import Scaffold
from fedkeel.method.parts.server import Addition, WeightedMean
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import LocalWork, Reduction, Table, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree
from harness import EVERYTHING

PARTS = sorted({k() for r in REGISTRY.values() for k in r.parts.values()}, key=lambda p: p.name)
FIELDS = [(part, f.name) for part in PARTS for f in dataclasses.fields(part)]
BOUNDED = [
    (p, f.name, *b) for p in PARTS for f in dataclasses.fields(p) for b in f.metadata.items()
]


def refused(part: Part) -> CompositionError:
    with pytest.raises(CompositionError) as caught:
        compose([part], EVERYTHING)
    assert len(str(caught.value).splitlines()) <= 4
    return caught.value


# --- hyper-parameters ------------------------------------------------------------------------


@each(("part", "name"), FIELDS)
@each("value", [object(), [1.0], b"x", 1j])
def test_a_value_of_the_wrong_type_is_refused(part: Part, name: str, value: object) -> None:
    error = refused(dataclasses.replace(part, **{name: value}))
    assert error.what.startswith(f"`{name}` of {part.name} must be ")
    assert error.what.endswith(f". Got {value!r}.")


@each(("part", "name", "kind", "bound"), BOUNDED)
def test_a_value_out_of_range_is_refused_and_one_at_its_edge_is_not(
    part: Part, name: str, kind: str, bound: float
) -> None:
    whole = int in hints(part, name)
    step = 1 if whole else 1e-9
    outside = {"ge": bound - step, "le": bound + step, "gt": bound, "lt": bound}[kind]
    inside = {"ge": bound, "le": bound, "gt": bound + step, "lt": bound - step}[kind]
    one = int if whole else float
    error = refused(dataclasses.replace(part, **{name: one(outside)}))
    sign = {"ge": ">=", "le": "<=", "gt": ">", "lt": "<"}[kind]
    assert f"{sign} {bound:g}" in error.what
    check_hyperparameters(dataclasses.replace(part, **{name: one(inside)}))


def hints(part: Part, name: str) -> tuple[object, ...]:
    hint = hyperparameter_types(type(part))[name]
    return getattr(hint, "__args__", (hint,))


@each("value", [float("inf"), float("-inf"), float("nan"), True, "0.1"])
@each(("part", "name"), [x for x in FIELDS if float in hints(*x)])
def test_numbers_are_finite_and_are_numbers(part: Part, name: str, value: object) -> None:
    refused(dataclasses.replace(part, **{name: value}))


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (FedProx(mu=-1), "`mu` of fedprox must be a float >= 0. Got -1."),
        (GradMAS(beta1=1.0), "`beta1` of gradma.s must be a float >= 0 and < 1. Got 1.0."),
        (GradMAS(memory=-1), "`memory` of gradma.s must be an int or None >= 0. Got -1."),
        (Addition(lr=0.0), "`lr` of addition must be a float > 0. Got 0.0."),
        (LocalGC(head=3), "`head` of gcfed.local must be text or None. Got 3."),
        (LocalGC(layers="some"), "`layers` of gcfed.local must be 'body' or 'all'. Got 'some'."),
        (LocalGC(vectors=1), "`vectors` of gcfed.local must be a bool. Got 1."),
    ],
)
def test_one_sentence_for_all_of_them(part: Part, says: str) -> None:
    assert refused(part).what == says


def test_a_whole_number_is_a_float_and_a_fraction_is_no_whole_number() -> None:
    assert compose([FedProx(mu=2)]).pull == 2
    refused(GradMAS(memory=2.0))
    assert compose([LocalGC(lam=1)]).parts == (LocalGC(lam=1),)


# --- needs -----------------------------------------------------------------------------------


@each("entry", REGISTRY)
def test_what_a_method_needs_has_to_be_provided(entry: str) -> None:
    plan = parse(entry, EVERYTHING)
    assert plan.needs <= EVERYTHING | LOOP | SERVER
    assert plan.needs == frozenset().union(*(part.needs for part in plan.parts))
    for need in plan.needs & EVERYTHING:
        with pytest.raises(CompositionError) as caught:
            parse(entry, EVERYTHING - {need})
        assert need.name in caught.value.what
        assert need.value == caught.value.expected
        assert any(caught.value.what.startswith(f"{part.name} needs") for part in plan.parts)
        assert len(str(caught.value).splitlines()) <= 4


def test_what_is_not_known_yet_is_not_checked() -> None:
    assert parse("gcfed").needs == {Capability.HEAD}
    with pytest.raises(CompositionError, match=r"model\.head"):
        parse("gcfed", SIMULATION)


PATH = LOOP - {Capability.OWN_STEPS_ALONE}


@each(
    ("expression", "needs"),
    [
        ("gcfed.local(head='fc2')", set()),
        ("gcfed.local(lam=0.5)", set()),
        ("localgc", set()),
        ("fednova(length='steps')", {Capability.WHOLE_UPDATES}),
        ("fednova(length='steps', effective='path')", PATH),
        ("fednova(effective='steps')", PATH),
        ("fednova", PATH),
        ("gradma.w", {Capability.STABLE_CLIENTS}),
        ("gradma.w(previous='start')", set()),
    ],
)
def test_needs_follow_the_hyper_parameters(expression: str, needs: set[Capability]) -> None:
    assert parse(expression).needs == needs


def test_what_is_not_needed_cannot_be_broken() -> None:
    assert parse("fednova(length='steps')+fedreg", EVERYTHING).parts[0] == FedNova(length="steps")
    with pytest.raises(CompositionError, match=r"fednova\(length='steps'\)"):
        parse("fednova+fedreg", EVERYTHING)


@pytest.mark.parametrize("length", ["path", "steps"])
@pytest.mark.parametrize("other", ["minibatch_sgd", "feddyn"])
def test_updates_are_divided_by_their_steps_once_and_not_for_feddyn(
    other: str, length: str
) -> None:
    with pytest.raises(CompositionError, match="breaks") as caught:
        parse(f"{other}+fednova(length='{length}')", EVERYTHING)
    assert "or use" not in str(caught.value)  # there is no way out


# --- names, slots, weights -------------------------------------------------------------------


def test_a_part_stands_once() -> None:
    with pytest.raises(CompositionError, match=r"has fedprox twice") as caught:
        compose([FedProx(mu=0.1), FedProx(mu=0.2)])
    assert "stored under its name" in str(caught.value)


def test_a_full_slot_names_who_is_in_it_and_the_way_out() -> None:
    with pytest.raises(CompositionError) as caught:
        parse("fedavgm+gradma.s")
    what, got, do = str(caught.value).splitlines()
    assert what.startswith("'momentum+gradma.s' puts 2 parts in the slot")
    assert "momentum (hsu2019): " in got
    assert "gradma.s (luo2023gradma): " in got
    assert do.strip() == (
        "do   drop one of momentum, gradma.s; gradma.s brings its own momentum (beta1)"
    )


@dataclass(frozen=True)
class Alternative(LocalWork):
    """Works as told, in a file of one's own."""

    name: ClassVar[str] = "alternative"
    paper: ClassVar[str] = "nobody2030"
    weights: ClassVar[str] = "examples"

    def work(self, local: Local) -> Local:
        return local


def test_parts_of_ones_own_are_judged_by_the_same_rules() -> None:
    expression = compose([Alternative(), FedProx()]).expression
    assert expression == f"{Alternative.__module__}:Alternative+fedprox"
    with pytest.raises(CompositionError, match="slot 'local work'") as caught:
        compose([Alternative(), *parse("fedsgd").parts])
    assert "alternative (nobody2030): Works as told, in a file of one's own." in str(caught.value)


def test_weights_are_the_runs_choice_or_what_the_parts_state() -> None:
    assert compose([]).weights == "examples"
    assert compose([FedProx()]).weights == "examples"
    assert compose([SGC()]).weights == "processed"
    assert compose([SGC(), CGC()]).weights == "processed"
    assert compose([Scaffold(), GradMAW()]).weights == "uniform"
    assert compose([Scaffold()], weights="processed").weights == "processed"
    with pytest.raises(CompositionError) as caught:
        compose([Alternative(), FedProx(), Scaffold()])
    assert caught.value.got == "alternative states 'examples', scaffold states 'uniform'"


# --- the plan --------------------------------------------------------------------------------


def test_nothing_is_fedavg() -> None:
    plan = compose([])
    assert plan.expression == "fedavg"
    assert (plan.reduction, plan.server_optimiser) == (WeightedMean(), Addition())
    assert plan.gradient_rule is None


def test_transforms_stand_by_stage_and_then_as_written() -> None:
    """Corrections before projections, whatever the order of the expression."""
    assert parse("localgc+scaffold").gradient_transforms[0] == Scaffold()
    assert parse("scaffold+localgc").gradient_transforms[0] == Scaffold()
    assert parse("fedgc.cgc+fednova").update_transforms == (FedNova(), CGC())
    assert parse("globalgc+fednova").aggregate_transforms == (FedNova(), GlobalGC())
    assert parse("globalgc+fedgc.sgc").aggregate_transforms == (GlobalGC(), SGC())
    assert parse("fedgc.sgc+globalgc").aggregate_transforms == (SGC(), GlobalGC())
    both = "localgc+gradma.w", "gradma.w+localgc"
    orders = [[p.name for p in parse(e).gradient_transforms] for e in both]
    assert orders == [["gcfed.local", "gradma.w"], ["gradma.w", "gcfed.local"]]


def test_a_part_is_in_every_list_of_a_role_it_plays() -> None:
    plan = parse("scaffold")
    one = (Scaffold(),)
    assert plan.gradient_transforms == plan.client_states == plan.uploads == one
    assert plan.broadcasts == plan.server_states == one
    assert roles_of(Scaffold) == [
        "broadcast",
        "gradient transform",
        "client state",
        "upload",
        "server state",
    ]


def test_pulls_are_added_up() -> None:
    @dataclass(frozen=True)
    class Second(FedProx):
        """Another of the kind."""

        mu: float = param(0.25, ge=0.0)
        name: ClassVar[str] = "second"

    assert compose([FedProx(mu=0.5), Second()]).pull == 0.75


# --- traits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adds(Upload, Reduction, Table):
    """As parts were written before there were traits."""

    name: ClassVar[str] = "adds"
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.NOISE})
    needs_only_sum: ClassVar[bool] = True

    @property
    def hides_updates(self) -> bool:
        return True

    def upload(self, round: Round) -> State:
        return {}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        return updates.sum(cohort.weights)

    def init_row(self, params: Tree) -> State:
        return {}

    def next_rows(self, outcome: Outcome) -> State:
        return {}


def test_traits_that_are_attributes_of_their_own_are_read() -> None:
    assert traits_of(Adds()) == Traits(needs_only_sum=True, hides_updates=True)
    assert traits_of(TopK()) == Traits()
    assert compose([Adds()]).steps_without_replies


def test_a_part_of_such_attributes_derived_from_another_changes_its_traits() -> None:
    @dataclass(frozen=True)
    class Whole(Scaffold):
        from_last_round_only: ClassVar[bool] = False

    assert traits_of(Whole()) == replace(traits_of(Scaffold()), from_last_round_only=False)
    assert compose([Whole()]).last_round_states == frozenset()
    assert compose([Scaffold()]).last_round_states == {"scaffold"}


def test_what_roles_need_is_added_to_what_a_part_states() -> None:
    memory = {
        Capability.PER_CLIENT_UPDATES,
        Capability.STABLE_CLIENTS,
        Capability.SEPARATE_UPDATES,
    }
    assert Adds().needs == memory | {Capability.NOISE}
    assert Scaffold().needs == {Capability.LINEAR_ACCUMULATION, Capability.STABLE_CLIENTS}


@pytest.mark.parametrize(
    ("trait", "broken"),
    [
        ("hides_updates", Capability.PER_CLIENT_UPDATES),
        ("merges_updates", Capability.SEPARATE_UPDATES),
        ("shares_nothing", Capability.SHARED_PARAMETERS),
    ],
)
def test_a_trait_breaks_what_it_takes_away(trait: str, broken: Capability) -> None:
    @dataclass(frozen=True)
    class Other(TopK):
        traits: ClassVar[Traits] = Traits(**{trait: True})

    assert broken_by(Other()) == {broken, Capability.ROOT_EXAMPLES}
    assert broken_by(TopK()) == {Capability.ROOT_EXAMPLES}  # clients keep what they have not sent
