"""Which methods can be combined: the verdict on a pair, and what each reason means."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method.compose import WHY, Plan, length_hint
from fedkeel.method.grammar import parse
from fedkeel.method.local_path import nonlinear_optimiser
from fedkeel.method.part import Capability, Part
from fedkeel.method.parts.dpsgd import DPSGD
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES, SLOTS

TaskKind = Literal[
    "classification", "several labels", "regression", "segmentation", "tokens", "survival"
]

_EVERYWHERE = frozenset(Capability) - {
    Capability.CLASSES,
    Capability.CLASS_COUNTS,
    Capability.PLAIN_LOSS,
    Capability.SOFT_TARGETS,
    Capability.INPUT_GRADIENT,
}
TASK_KINDS: dict[TaskKind, frozenset[Capability]] = {
    "classification": frozenset(Capability),
    "several labels": _EVERYWHERE | {Capability.SOFT_TARGETS, Capability.INPUT_GRADIENT},
    "regression": _EVERYWHERE | {Capability.SOFT_TARGETS, Capability.INPUT_GRADIENT},
    "segmentation": _EVERYWHERE | {Capability.SOFT_TARGETS, Capability.INPUT_GRADIENT},
    "tokens": _EVERYWHERE | {Capability.SOFT_TARGETS},
    "survival": _EVERYWHERE - {Capability.EXAMPLE_LOSSES, Capability.LOSS_BY_EXAMPLE}
    | {Capability.INPUT_GRADIENT},
}
"""What each kind of task provides, with a model that has a head and no batch normalisation."""


def task_kinds(expression: str) -> list[TaskKind]:
    """Return the kinds of tasks that a method can be used on.

    >>> task_kinds("fedlc"), task_kinds("fedreg")[:2]
    (['classification'], ['classification', 'several labels'])
    """
    parts = parse(expression, weights="uniform").parts  # tasks are the same with any weights
    needs = frozenset().union(*(part.needs for part in parts))
    return [kind for kind, provided in TASK_KINDS.items() if needs <= provided]


LEGAL, WEIGHTS, TWICE, BREAKS = "+", "w", "=", "B"
SLOT_CODES = dict(zip(SLOTS, "PDLVITMCGOEYRSFN", strict=True))

REASONS = {
    LEGAL: "they can be combined.",
    WEIGHTS: "their papers weight clients differently: they can be combined once the run states "
    "`weights`.",
    TWICE: "both contain the same part, which a method can have once.",
    BREAKS: "one breaks what the other needs.",
    **{
        code: f"both fill the slot '{ROLES[slot]}', which takes one part."
        for slot, code in SLOT_CODES.items()
    },
}
"""What a code means."""


@dataclass(frozen=True)
class PairVerdict:
    """Whether two methods can be combined.

    Args:
        code: a key of `REASONS`.
        error: the refusal, None where they can be combined as they are.
    """

    code: str
    error: CompositionError | None = None

    @property
    def legal(self) -> bool:
        """Whether they can be combined as they are."""
        return self.error is None

    @property
    def reason(self) -> str:
        """The refusal and what to do, in one line; "" where there is none."""
        if self.error is None:
            return ""
        what = self.error.what.split("': ", 1)[-1]
        return f"{what} {self.error.do[0].upper()}{self.error.do[1:]}." if self.error.do else what


def verdict(one: str, other: str) -> PairVerdict:
    """Return whether ``one+other`` can be composed, and if not, why.

    >>> verdict("fedprox", "gcfed").legal
    True
    >>> verdict("momentum", "gradma").code
    'S'
    """
    expression = f"{one}+{other}"
    error = _refusal(expression)
    if error is None:
        return PairVerdict(LEGAL)
    if _refusal(expression, weighed=True) is None:
        return PairVerdict(WEIGHTS, error)
    return PairVerdict(_code(parse(one).parts, parse(other).parts), error)


def check_optimiser(plan: Plan, local: Local) -> None:
    """Refuse a method that counts on a path that the local optimiser does not make.

    Raises:
        CompositionError: a part needs LINEAR_ACCUMULATION, which the optimiser breaks.
    """
    if not nonlinear_optimiser(local):
        return
    need = Capability.LINEAR_ACCUMULATION
    part = next((part for part in plan.parts if need in part.needs), None)
    if part is None:
        return
    if local.optimiser == "sgd":
        setting, remedy = "keep_state = True", "drop local.keep_state"
        reason = "momentum that is kept moves by the gradients of earlier rounds"
    else:
        setting, remedy = f"optimiser = {local.optimiser!r}", "set local.optimiser = 'sgd'"
        reason = f"{local.optimiser} divides each entry of a gradient by its own size"
    raise CompositionError(
        f"{part.name} cannot be run with local.{setting}.",
        expected=need.value,
        why=f"{part.name} {WHY[need]}, and {reason}",
        do=f"{remedy}, or drop {part.name}{length_hint(part)}",
    )


def check_sampling(plan: Plan, local: Local) -> None:
    """Refuse Poisson batches where a step would divide by the number that came, or none came.

    Raises:
        CompositionError: another part than `dpsgd` acts in the method's steps.
    """
    if local.sampling != "poisson":
        return
    rule = plan.gradient_rule
    is_dpsgd = isinstance(rule, DPSGD) and rule.clipped == "example"
    others = [part.name for part in (*plan.personals, *plan.preparations)]
    others += [plan.local_model.name] if plan.local_model else []
    if plan.weights == "processed":
        others.append("weights = 'processed'")
    if is_dpsgd and not others:
        return
    remedy = f"drop {', '.join(others)}" if is_dpsgd else "add dpsgd, or [privacy] of examples"
    raise CompositionError(
        "local.sampling = 'poisson' is for dpsgd.",
        got=f"method {plan.expression!r}, weights {plan.weights!r}",
        why="a batch may be empty, and its sum is divided by the expected number of examples",
        do=f"{remedy}, or set local.sampling = 'random'",
    )


def all_pairs() -> list[tuple[str, str]]:
    """Return every pair of entries of the registry, in its order."""
    return list(combinations(REGISTRY, 2))


def _refusal(expression: str, weighed: bool = False) -> CompositionError | None:
    try:
        parse(expression, weights="examples" if weighed else None)
    except CompositionError as error:
        return error
    return None


def _code(ones: tuple[Part, ...], others: tuple[Part, ...]) -> str:
    """Return which rule refuses a pair, in the order in which `compose` asks."""
    if {part.name for part in ones} & {part.name for part in others}:
        return TWICE
    for slot, code in SLOT_CODES.items():
        if all(any(isinstance(part, slot) for part in parts) for parts in (ones, others)):
            return code
    return BREAKS
