"""Composition of parts into a `Plan`, or a refusal with the reason.

Three rules are checked before anything is trained:

1. A role that takes one part has at most one.
2. Task and engine provide what each part needs.
3. No part breaks what another one needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fedkeel.config import ChosenWeights, Local, Weights
from fedkeel.errors import CompositionError
from fedkeel.method import plugins
from fedkeel.method.checks import call
from fedkeel.method.context import Objective
from fedkeel.method.docs.docstring import summary
from fedkeel.method.hyperparameters import check_hyperparameters
from fedkeel.method.part import Capability, Part, traits_of
from fedkeel.method.parts.server import Addition, WeightedMean
from fedkeel.method.roles import (
    ROLES,
    SLOTS,
    AggregateTransform,
    Broadcast,
    Carry,
    ClientOptimiser,
    ClientState,
    Codec,
    CohortTransform,
    Criterion,
    Dispatch,
    FineTuning,
    GradientRule,
    GradientTransform,
    LocalModel,
    LocalStart,
    LocalWork,
    LossTerm,
    Penalty,
    Personal,
    PersonalPrediction,
    Phases,
    Preparation,
    PublicTraining,
    ReceivedModel,
    Reduction,
    ServerOptimiser,
    ServerPolicy,
    ServerState,
    StepCorrection,
    Survey,
    Table,
    UpdateTransform,
    Upload,
)
from fedkeel.task.parameter_names import ParameterLayout

R = TypeVar("R", bound=Part)

LOOP = frozenset(
    {Capability.LINEAR_ACCUMULATION, Capability.WHOLE_UPDATES, Capability.OWN_STEPS_ALONE}
)
"""What the client loop always provides."""
SERVER = frozenset({Capability.SEPARATE_UPDATES, Capability.FRESH_UPDATES, Capability.ONE_MODEL})
"""What the server round provides unless a part breaks it."""
SIMULATION = frozenset(
    {
        Capability.PER_CLIENT_UPDATES,
        Capability.STABLE_CLIENTS,
        Capability.CLASS_COUNTS,
        Capability.NOISE,
        Capability.SURVEYS,
        Capability.SHARED_PARAMETERS,
        Capability.LOCAL_STEPS,
        Capability.ROOT_EXAMPLES,
    }
)
"""What an engine on one machine provides, where local training is not the user's own."""


@dataclass(frozen=True)
class Plan:
    """A legal method, its parts sorted by role in the order in which they act.

    Args:
        parts: the parts as composed.
        expression: canonical expression.
        weights: how clients count in the mean.
        personals: parts that keep parameters at the client.
        phases: the part that divides local training into phases, or None.
        dispatch: the part that changes the model that is sent, or None.
        surveys: parts that ask the clients before they train.
        receiver: the part that says which model a client takes for the received one, or None.
        objective: what a client minimises: criterion, loss terms and penalties.
        gradient_rule: the part that says where the gradient is taken, or None.
        gradient_transforms: parts that change the gradient, by stage.
        client_optimiser: the part that takes the place of the run's local optimiser, or None.
        corrections: parts that move parameters after a step.
        carries: parts that remember from step to step.
        preparations: parts that prepare before the first step.
        local_start: the part that says where a client begins, or None.
        public_training: the part that trains on public inputs first, or None.
        local_model: the part that trains a second model at the client, or None.
        update_transforms: parts that change the update, by stage.
        codec: the part that says in what form the update is sent, or None.
        client_states: parts that keep something for each client.
        uploads: parts that send to the server.
        broadcasts: parts that send to the clients.
        tables: parts that remember something of each client at the server.
        policy: the part that says how many updates the server waits for, or None for the cohort.
        cohort_transforms: parts that change the updates at the server.
        reduction: the part that makes one update of K.
        aggregate_transforms: parts that change the aggregate, by stage.
        server_optimiser: the part that applies the aggregate.
        server_states: parts that remember at the server.
        fine_tuning: the part that trains clients' models once more to evaluate them, or None.
        personal_prediction: the part that changes what personal models predict, or None.
        makes_steps: whether local training is a loop of steps, and not the user's own.
    """

    parts: tuple[Part, ...]
    expression: str
    weights: Weights
    personals: tuple[Personal, ...]
    phases: Phases | None
    dispatch: Dispatch | None
    surveys: tuple[Survey, ...]
    receiver: ReceivedModel | None
    objective: Objective
    gradient_rule: GradientRule | None
    gradient_transforms: tuple[GradientTransform, ...]
    client_optimiser: ClientOptimiser | None
    corrections: tuple[StepCorrection, ...]
    carries: tuple[Carry, ...]
    preparations: tuple[Preparation, ...]
    local_start: LocalStart | None
    public_training: PublicTraining | None
    local_model: LocalModel | None
    update_transforms: tuple[UpdateTransform, ...]
    codec: Codec | None
    client_states: tuple[ClientState, ...]
    uploads: tuple[Upload, ...]
    broadcasts: tuple[Broadcast, ...]
    tables: tuple[Table, ...]
    policy: ServerPolicy | None
    cohort_transforms: tuple[CohortTransform, ...]
    reduction: Reduction
    aggregate_transforms: tuple[AggregateTransform, ...]
    server_optimiser: ServerOptimiser
    server_states: tuple[ServerState, ...]
    fine_tuning: FineTuning | None
    personal_prediction: PersonalPrediction | None
    makes_steps: bool = True

    @property
    def pull(self) -> float:
        """Sum of the penalties' pulls; 0 where a part does not preserve them."""
        if not all(traits_of(part).preserves_penalty_pull for part in self.parts):
            return 0.0
        return sum((part.pull for part in _playing(self.parts, Penalty)), 0.0)

    @cached_property
    def needs(self) -> frozenset[Capability]:
        """All that the parts need of task, loop and engine."""
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def client_sum_parts(self) -> frozenset[str]:
        """Names of the parts whose server state is a sum over the clients' states."""
        return frozenset(
            part.name for part in self.client_states if traits_of(part).server_holds_sum
        )

    @property
    def last_round_states(self) -> frozenset[str]:
        """Names of the parts whose client state depends only on the last round."""
        return frozenset(
            part.name for part in self.client_states if traits_of(part).from_last_round_only
        )

    @cached_property
    def nonlinear_part(self) -> str:
        """Name of a part that breaks LINEAR_ACCUMULATION, or "" where none does."""
        capability = Capability.LINEAR_ACCUMULATION
        return next((part.name for part in self.parts if capability in part.breaks), "")

    @property
    def needs_only_update_sum(self) -> bool:
        """Whether the server uses only the weighted sum of the updates.

        A user's part that acts on updates at the server may use more, so the answer is then no.
        """
        has_stated_weights = all(part.weights in (None, self.weights) for part in self.parts)
        user_parts = [p for p in self.parts if not type(p).__module__.startswith("fedkeel.")]
        server_roles = (Reduction, AggregateTransform, ServerOptimiser, ServerState)
        return (
            has_stated_weights
            and not (self.tables or self.cohort_transforms or self.policy)
            and Capability.PER_CLIENT_UPDATES not in self.needs
            and not any(isinstance(part, server_roles) for part in user_parts)
        )

    @property
    def sum_only_uploads(self) -> frozenset[str]:
        """Names of the parts of whose uploads the server uses only the sum."""
        return frozenset(
            part.name
            for part in self.uploads
            if traits_of(part).needs_only_sum and self.needs_only_update_sum
        )

    @property
    def steps_without_replies(self) -> bool:
        """Whether the server makes a step in a round without replies too."""
        after = (*self.aggregate_transforms, self.server_optimiser)
        traits = traits_of(self.reduction)
        is_of_all = traits.counts_absent and not any(isinstance(p, Upload) for p in after)
        return traits.hides_updates or is_of_all

    @property
    def has_personal_models(self) -> bool:
        """Whether each client is evaluated with a model of its own, beside the global model."""
        extras = (self.local_model, self.fine_tuning, self.personal_prediction)
        is_extra = any(part is not None for part in extras)
        return bool(self.personals) or is_extra or self.starts_are_personal

    @property
    def starts_are_personal(self) -> bool:
        """Whether where a client begins, or what it receives, is its personal model."""
        parts = (self.local_start, self.receiver)
        return any(part is not None and traits_of(part).is_personal_model for part in parts)

    @property
    def row_senders(self) -> frozenset[str]:
        """Names of the parts that send each client a model of its own, not the global one."""
        return frozenset(part.name for part in self.broadcasts if traits_of(part).sends_rows)

    @property
    def buffers_keeper(self) -> Part | None:
        """The part that keeps the model's buffers at the client, or None."""
        parts: list[Part] = [*self.personals, *([self.receiver] if self.receiver else [])]
        keeping = ((p, traits_of(p)) for p in parts)
        return next((p for p, t in keeping if t.keeps_statistics or t.shares_nothing), None)

    def personal_names(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters that stay at the client.

        Raises:
            ModelError: a name fits no parameter.
            CompositionError: none is shared, and a part acts on those that are.
        """
        personal = frozenset[str]().union(*(call(part.personal, layout) for part in self.personals))
        acting = next((part for part in self.parts if acts_on_shared(part)), None)
        keeping = next((p for p in self.personals if p is not acting), None)
        if acting and keeping and personal == frozenset(layout.names):
            raise CompositionError(
                f"'{self.expression}': all parameters stay at the clients, and {acting.name} acts "
                "on those that are shared.",
                got=summary_of(keeping),
                expected="parameters that are shared",
                do=f"drop {acting.name}, or keep fewer parameters at the clients",
            )
        return personal

    def work(self, local: Local) -> Local:
        """Return the settings of local training, as the method means them."""
        for part in self.parts:
            if isinstance(part, LocalWork):
                return part.work(local)
        return local


def compose(
    parts: Sequence[Part],
    provides: Iterable[Capability] | None = None,
    weights: ChosenWeights | None = None,
) -> Plan:
    """Compose parts into a method.

    Args:
        parts: the parts, in the order of the expression.
        provides: what task and engine provide; None checks everything but this.
        weights: the run's choice; None and ``method`` take what the parts state.

    Raises:
        CompositionError: a hyper-parameter out of range, a part given twice, two parts in a slot
            that takes one, a need that is not provided or that another part breaks, or parts that
            state different weights while the run has not chosen.
    """
    parts = tuple(parts)
    expression = expression_of(parts)
    for part in parts:
        check_hyperparameters(part)
    _check_names(parts, expression)
    _check_slots(parts, expression)
    provided = frozenset(SIMULATION if provides is None else provides)
    if provides is not None:
        _check_needs(parts, provided | LOOP | SERVER)
    _check_breaks(parts, expression)

    def staged(role: type[R], stage: str) -> tuple[R, ...]:
        return tuple(sorted(_playing(parts, role), key=lambda p: getattr(p, stage)))

    penalties = _playing(parts, Penalty)
    return Plan(
        parts=parts,
        expression=expression,
        weights=_stated_weights(parts, expression)
        if weights is None or weights == "method"
        else weights,
        personals=_playing(parts, Personal),
        phases=next(iter(_playing(parts, Phases)), None),
        dispatch=next(iter(_playing(parts, Dispatch)), None),
        surveys=_playing(parts, Survey),
        receiver=next(iter(_playing(parts, ReceivedModel)), None),
        objective=Objective(
            criterion=next(iter(_playing(parts, Criterion)), None),
            terms=_playing(parts, LossTerm),
            penalties=penalties,
        ),
        gradient_rule=next(iter(_playing(parts, GradientRule)), None),
        gradient_transforms=staged(GradientTransform, "gradient_stage"),
        client_optimiser=next(iter(_playing(parts, ClientOptimiser)), None),
        corrections=_playing(parts, StepCorrection),
        carries=_playing(parts, Carry),
        preparations=_playing(parts, Preparation),
        local_start=next(iter(_playing(parts, LocalStart)), None),
        public_training=next(iter(_playing(parts, PublicTraining)), None),
        local_model=next(iter(_playing(parts, LocalModel)), None),
        update_transforms=staged(UpdateTransform, "update_stage"),
        codec=next(iter(_playing(parts, Codec)), None),
        client_states=_playing(parts, ClientState),
        uploads=_playing(parts, Upload),
        broadcasts=_playing(parts, Broadcast),
        tables=_playing(parts, Table),
        policy=next(iter(_playing(parts, ServerPolicy)), None),
        cohort_transforms=_playing(parts, CohortTransform),
        reduction=next(iter(_playing(parts, Reduction)), WeightedMean()),
        aggregate_transforms=staged(AggregateTransform, "aggregate_stage"),
        server_optimiser=next(iter(_playing(parts, ServerOptimiser)), Addition()),
        server_states=_playing(parts, ServerState),
        fine_tuning=next(iter(_playing(parts, FineTuning)), None),
        personal_prediction=next(iter(_playing(parts, PersonalPrediction)), None),
        makes_steps=Capability.LOCAL_STEPS in provided,
    )


def _playing(parts: Sequence[Part], role: type[R]) -> tuple[R, ...]:
    return tuple(part for part in parts if isinstance(part, role))


def roles_of(part: Part | type[Part]) -> list[str]:
    """Return the names of the roles that a part plays, in the order in which they act."""
    kind = part if isinstance(part, type) else type(part)
    return [name for role, name in ROLES.items() if issubclass(kind, role)]


def expression_of(parts: Sequence[Part]) -> str:
    """Return the canonical expression of parts: every hyper-parameter that is not its default."""
    terms = []
    for part in parts:
        arguments = [
            f"{f.name}={getattr(part, f.name)!r}"
            for f in dataclasses.fields(part)
            if getattr(part, f.name) != f.default
        ]
        terms.append(
            plugins.expression_name(part) + (f"({', '.join(arguments)})" if arguments else "")
        )
    return "+".join(terms) or "fedavg"


def summary_of(part: Part) -> str:
    """Return a part's name, its paper and what it does."""
    line, paper = summary(type(part)), f" ({part.paper})" if part.paper else ""
    return f"{part.name}{paper}" + (f": {line}" if line else "")


def _check_names(parts: Sequence[Part], expression: str) -> None:
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise CompositionError(
                f"'{expression}' has {part.name} twice.",
                why="a part's state and messages are stored under its name",
                do="name it once",
            )
        seen.add(part.name)


def _check_slots(parts: Sequence[Part], expression: str) -> None:
    for slot in SLOTS:
        rivals = [part for part in parts if isinstance(part, slot)]
        if len(rivals) > 1:
            raise CompositionError(
                f"'{expression}' puts {len(rivals)} parts in the slot '{ROLES[slot]}', "
                "which takes one.",
                got=" and ".join(summary_of(part) for part in rivals),
                do=f"drop one of {', '.join(part.name for part in rivals)}" + _slot_hint(rivals),
            )


def _slot_hint(rivals: Sequence[Part]) -> str:
    names = {part.name for part in rivals}
    if {"momentum", "gradma.s"} <= names:
        return "; gradma.s brings its own momentum (beta1)"
    return ""


def _check_needs(parts: Sequence[Part], provided: frozenset[Capability]) -> None:
    if Capability.LOCAL_STEPS not in provided:
        provided -= {Capability.LINEAR_ACCUMULATION}
    for part in parts:
        needs = part.needs | ({Capability.LOCAL_STEPS} if acts_in_steps(part) else set())
        for need in sorted(needs - provided, key=lambda n: n.name):
            raise CompositionError(
                f"{part.name} needs {need.name}, which this task or engine does not provide.",
                got=summary_of(part),
                expected=need.value,
                do=_NEED_HINTS.get(need, f"drop {part.name}"),
            )


_NEED_HINTS = {
    Capability.HEAD: "name the classifier: model.head = '...', or Task(model, head='...')",
    Capability.INPUT_GRADIENT: "use floating-point inputs, or drop the part",
    Capability.FEATURES: "name the classifier: model.head = '...', or Task(model, head='...')",
    Capability.BLOCKS: "use a network of several sub-modules with parameters",
    Capability.EXAMPLE_LOSSES: "use a network without batch normalisation, and a loss for each "
    "example (reduction='none'): in a mean of one example, class weights cancel",
    Capability.LOSS_BY_EXAMPLE: "return a loss for each example (reduction='none'): in a mean of "
    "one example, class weights cancel",
    Capability.PLAIN_LOSS: "take loss = 'cross_entropy': the part puts one of its own in its "
    "place, and class weights, label smoothing or another loss would be lost; or drop the part",
    Capability.SOFT_TARGETS: "use a named loss of labels or quantities, or drop the part",
    Capability.PUBLIC_INPUTS: "give some: data.public = 'FILE', or data.public_fraction = 0.1; in "
    "Python public=(x, y)",
    Capability.LOCAL_STEPS: "take a part that acts on updates, or leave out local_training",
}


def _check_breaks(parts: Sequence[Part], expression: str) -> None:
    for breaker in parts:
        for part in parts:
            for broken in sorted(needs_of(part) & broken_by(breaker), key=lambda n: n.name):
                if part is breaker:
                    continue
                raise CompositionError(
                    f"'{expression}': {part.name} needs {broken.name}, "
                    f"which {breaker.name} breaks.",
                    expected=broken.value,
                    why=f"{part.name} {WHY.get(broken, 'counts on it')}; {summary_of(breaker)}",
                    do=f"drop {part.name} or {breaker.name}" + _break_hint(part, breaker),
                )


def needs_of(part: Part) -> frozenset[Capability]:
    """Return what a part needs, with what its roles need."""
    needs = {
        Capability.PER_CLIENT_UPDATES: isinstance(part, Upload)
        and not traits_of(part).needs_only_sum,
        Capability.SHARED_PARAMETERS: acts_on_shared(part) or isinstance(part, Personal),
        Capability.FRESH_UPDATES: compares_updates(part),
        Capability.ONE_MODEL: isinstance(part, (*_AFTER_UPDATES, ServerPolicy)),
        Capability.OWN_STEPS_ALONE: isinstance(part, Phases),
    }
    return part.needs.union(capability for capability, is_needed in needs.items() if is_needed)


def compares_updates(part: Part) -> bool:
    """Return whether a part's server half needs updates that begin at one model."""
    acts = any(isinstance(part, role) for role in _AFTER_UPDATES)
    return acts and not (traits_of(part).takes_stale_updates or isinstance(part, ServerPolicy))


_AFTER_UPDATES = (
    *(Survey, Dispatch, Broadcast, CohortTransform, Reduction, AggregateTransform),
    *(ServerOptimiser, ServerState, Table),
)
"""Roles that tell clients what the server made of updates, or act on updates at the server."""


def acts_in_steps(part: Part) -> bool:
    """Return whether a part has a role that acts inside a local step, or makes some."""
    return any(isinstance(part, role) for role in IN_STEPS)


IN_STEPS = (
    *(Phases, Preparation, LocalModel, Criterion, LossTerm, GradientRule, Penalty),
    *(GradientTransform, ClientOptimiser, StepCorrection, Carry, FineTuning, PublicTraining),
)
"""Roles that act inside a local step, or make some."""


def acts_on_shared(part: Part) -> bool:
    """Return whether a part has a role that acts on the parameters that all clients share."""
    return any(isinstance(part, role) for role in ROLES if role not in _WITHOUT_SHARED)


_WITHOUT_SHARED = frozenset(
    {
        *(Personal, Phases, LocalWork, Preparation, Criterion, LossTerm, ClientOptimiser),
        *(FineTuning, PersonalPrediction, PublicTraining),
    }
)
"""Roles that have something to do where clients share no parameters."""


def broken_by(part: Part) -> frozenset[Capability]:
    """Return what others cannot have beside a part, with what its roles and traits break.

    What a loss takes from a preparation is there only in a step: not before training, and not
    where the gradient of each example is taken by itself.
    """
    prepares = isinstance(part, Preparation) and isinstance(part, (Criterion, LossTerm, Penalty))
    traits = traits_of(part)
    broken = {
        Capability.EXAMPLE_LOSSES: prepares,
        Capability.SURVEYS: prepares,
        Capability.PER_CLIENT_UPDATES: traits.hides_updates,
        Capability.SEPARATE_UPDATES: traits.merges_updates,
        Capability.SHARED_PARAMETERS: traits.shares_nothing,
        Capability.ROOT_EXAMPLES: isinstance(part, (ClientState, Personal, LocalModel)),
        Capability.ONE_MODEL: isinstance(part, ReceivedModel),
        Capability.OWN_STEPS_ALONE: isinstance(part, PublicTraining),
    }
    return part.breaks.union(capability for capability, is_broken in broken.items() if is_broken)


WHY = {
    Capability.LINEAR_ACCUMULATION: "divides by the length of that path",
    Capability.WHOLE_UPDATES: "uses how far clients have moved",
    Capability.PER_CLIENT_UPDATES: "uses what single clients send",
    Capability.SEPARATE_UPDATES: "joins each update with what else it knows of that client",
    Capability.EXAMPLE_LOSSES: "takes the gradient of each example by itself",
    Capability.SURVEYS: "asks for a gradient before anything is prepared",
    Capability.SHARED_PARAMETERS: "acts on those",
    Capability.ROOT_EXAMPLES: "trains at the server as a client that keeps nothing from round to "
    "round",
    Capability.FRESH_UPDATES: "takes all updates of a step as moves from one model, or sends back "
    "what it made of the last step",
    Capability.OWN_STEPS_ALONE: "says of these which parameters they train, and of no others",
    Capability.ONE_MODEL: "makes one step of all updates, or sends what it made of them to all",
}
"""What a part does with what it needs, and another part breaks."""


def _break_hint(part: Part, breaker: Part) -> str:
    path_alone = part.needs & breaker.breaks == {Capability.LINEAR_ACCUMULATION}
    return length_hint(part) if path_alone else ""


def length_hint(part: Part) -> str:
    """Return what else a part can do without LINEAR_ACCUMULATION; "" where it can do nothing."""
    named = "length" in {f.name for f in dataclasses.fields(part)}
    return ", or use fednova(length='steps')" if named else ""


def _stated_weights(parts: Sequence[Part], expression: str) -> Weights:
    stated = {part.weights: part for part in parts if part.weights is not None}
    if len(stated) > 1:
        (a, first), (b, second) = list(stated.items())[:2]
        raise CompositionError(
            f"'{expression}': the papers weight clients differently.",
            got=f"{first.name} states {a!r}, {second.name} states {b!r}",
            expected="one choice for the run",
            do=f"set weights = '{a}', '{b}' or 'examples' in the experiment",
        )
    return next(iter(stated), None) or "examples"
