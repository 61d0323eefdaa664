"""The closed list of roles that a part of a method can play.

A role is an abstract class with one method, or two where a state has to begin and go on. A part is
a frozen dataclass of hyper-parameters that inherits the roles it needs; it keeps nothing. Client
roles are written for one client, without a client axis; server roles always see a leading axis K.

Order of what is sent
    `Dispatch`, `Broadcast`.
Order of a local step
    `GradientRule` (where the gradient is taken; of the task's loss or a `Criterion`, with every
    `LossTerm` and `Penalty`), `GradientTransform` by stage, the local optimiser, `StepCorrection`.
Order of a client's round
    `ClientState.init_client`, `Survey` (questions before training), `Preparation`, the steps with
    `Carry`, `UpdateTransform` by stage, `Codec`, `ClientState.next_client`, `Upload`.
Order of a server round
    weights, `CohortTransform`, `Reduction`, `AggregateTransform` by stage, `ServerOptimiser`,
    `ServerState.next_server`, `Table`.

Axis letters, the same everywhere: N examples, C clients in all, K clients this round, S local
steps, B batch, Y classes, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from fedkeel.config import Local, Weights
from fedkeel.tree import State, Tree

if TYPE_CHECKING:
    from fedkeel.method.context import Cohort, Outcome, Population, Round, Step
    from fedkeel.solve.span import Span
    from fedkeel.task.network import Batch, Output


class Capability(Enum):
    """What a part may need of task, loop or engine, and another part may break."""

    HEAD = "a named classifier sub-module"
    INPUT_GRADIENT = "inputs that a gradient can be taken of"
    LINEAR_ACCUMULATION = "a local path that is a weighted sum of gradients"
    WHOLE_UPDATES = "updates that are as long as clients have moved, not divided by their steps"
    PER_CLIENT_UPDATES = "single clients' updates at the server"
    STABLE_CLIENTS = "clients that keep their index from round to round"
    FEATURES = "a classifier whose inputs are the features"
    BLOCKS = "a network of several blocks, one after the other"
    CLASS_COUNTS = "how many examples of each class a client has"
    EXAMPLE_LOSSES = "an objective that is a mean over examples, none of which sees another"
    NOISE = "random numbers in every step"
    SURVEYS = "an exchange of messages before local training"


class Stage(IntEnum):
    """Order among transforms of one kind; within a stage, the order of the expression."""

    CORRECT = 0
    PROJECT = 1
    LIMIT = 2


def param(
    default: Any,  # noqa: ANN401 - the type is that of the field
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:  # noqa: ANN401
    """Declare a hyper-parameter with its range, which `compose` checks.

    Args:
        default: the value where none is given.
        ge: smallest value allowed.
        gt: bound below that is not allowed itself.
        le: largest value allowed.
        lt: bound above that is not allowed itself.
    """
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


@dataclass(frozen=True)
class Part(ABC):
    """A piece of a method: hyper-parameters, and the roles its class inherits."""

    name: ClassVar[str]
    """Unique name, which is also its namespace of state and messages, e.g. ``fedgc.cgc``."""
    paper: ClassVar[str]
    """Citation key in papers.bib; other methods share the names FedGC and FedGH."""
    weights: ClassVar[Weights | None] = None
    """The paper's client weights, where it states any."""
    needs: ClassVar[frozenset[Capability]] = frozenset()
    """What it asks of model, engine and other parts, of `Capability`; refused where it cannot be
    had."""
    breaks: ClassVar[frozenset[Capability]] = frozenset()
    """What others cannot have beside it. A `Preparation` that is a `Criterion`, a `LossTerm` or a
    `Penalty` too breaks EXAMPLE_LOSSES and SURVEYS without saying so."""
    keeps_pull: ClassVar[bool] = True
    """Whether a penalty pulls the step as it pulls the gradient; not where the gradient is taken
    elsewhere, or reshaped by what the data are. Then its gradient counts as any other."""


class LocalWork(Part):
    """Fixes how much local work is done. At most one."""

    @abstractmethod
    def work(self, local: Local) -> Local:
        """Return the settings of local training that the method means."""


class Penalty(Part):
    """Adds a function of the parameters to the objective, by its gradient. Any number, summed."""

    @property
    @abstractmethod
    def pull(self) -> float:
        """Return mu where the penalty holds (mu/2)||theta - theta_t||^2, for the step counts."""

    @abstractmethod
    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return the penalty's gradient at `params`."""


class Criterion(Part):
    """Replaces the task's loss. At most one."""

    @abstractmethod
    def criterion(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of each example of the step, [B]; `logits` are [B, Y]."""


class LossTerm(Part):
    """Adds a function of the network's output to the loss. Any number, summed."""

    @abstractmethod
    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return a value for each example, [B], whose mean counts, or one for the batch, [].

        Gradients flow through `output` and through `params`, of which it was made.
        """


class GradientRule(Part):
    """Says where, and of what, the gradient is taken. At most one."""

    @abstractmethod
    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient for a step from `params`."""


class GradientTransform(Part):
    """Changes the gradient before the local optimiser sees it. Any number, by stage."""

    gradient_stage: ClassVar[Stage]

    @abstractmethod
    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the changed gradient."""


class StepCorrection(Part):
    """Moves the parameters after the local optimiser's step. Any number, as written."""

    @abstractmethod
    def correct(self, params: Tree, step: Step) -> Tree:
        """Return the corrected parameters."""


class Carry(Part):
    """Remembers something from step to step within a round."""

    @abstractmethod
    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return what the first step sees."""

    @abstractmethod
    def next_carry(self, before: Tree, carry: State) -> State:
        """Return what the next step sees; `before` are the parameters before this step."""


class Survey(Part):
    """Asks the clients of a round something about the received model before they train.

    It costs an exchange of messages. All clients then receive the weighted mean of the answers,
    under ``survey`` among what is sent.
    """

    @abstractmethod
    def survey(self, step: Step) -> State:
        """Return a client's answer; the step's batch is all its examples."""


class Preparation(Part):
    """Makes something of the received model and the round's examples before the first step."""

    pairing: Literal["example", "position"]
    """Which rows a step sees: those of its own examples, or those of the batch that had the same
    place in the round's first pass."""

    @abstractmethod
    def prepare(self, examples: Batch, step: Step) -> State:
        """Return tensors [n, ...], one row for each of the n distinct examples of the round."""


class UpdateTransform(Part):
    """Changes the update after the last step. Any number, by stage."""

    update_stage: ClassVar[Stage]

    @abstractmethod
    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the changed update; `update` is end - start, as earlier transforms left it."""


class Codec(Part):
    """Says in what form the update is sent. At most one.

    What is not sent is gone: everything after this, at the client and at the server, sees the
    update as it was decoded.
    """

    @abstractmethod
    def encode(self, update: Tree, round: Round) -> State:
        """Return what is sent in place of the update; it has the same form in every round."""

    @abstractmethod
    def decode(self, sent: State, like: Tree) -> Tree:
        """Return the update of one client that `sent` stands for.

        Args:
            sent: what `encode` returned.
            like: the model, for names, shapes and types.
        """


class ClientState(Part):
    """Keeps something for each client from round to round."""

    mirrored: ClassVar[bool] = False
    """Whether the part's server state adds up what the clients keep. Where one client loses its
    own, the sum is wrong for ever: the part then begins anew, for all clients and the server."""

    renewed: ClassVar[bool] = False
    """Whether what a client keeps is made of its last round alone, whatever it kept before. Of few
    examples it is then a product of thin matrices, and an engine may keep it as such."""

    @abstractmethod
    def init_client(self, start: Tree) -> State:
        """Return the state of a client that takes part for the first time."""

    @abstractmethod
    def next_client(self, round: Round) -> State:
        """Return the state for the client's next round, of the same names and shapes."""


class Upload(Part):
    """Sends something to the server beyond the update."""

    summed: ClassVar[bool] = False
    """Whether its server half looks at no more than the sum of what the clients send: it may then
    be given sums over some of them, [G, ...] in place of [K, ...]."""

    @abstractmethod
    def upload(self, round: Round) -> State:
        """Return what is sent."""


class Broadcast(Part):
    """Sends something to the clients beyond the model."""

    @abstractmethod
    def message(self, state: State) -> State:
        """Return what is sent; `state` is the part's own server state."""


class Dispatch(Part):
    """Changes the model that is sent. At most one.

    Updates are then relative to what was sent, and so is the aggregate.
    """

    @abstractmethod
    def dispatch(self, params: Tree, state: State, lr: float) -> Tree:
        """Return what is sent in place of the global model.

        Args:
            params: the global model.
            state: the part's own server state.
            lr: local learning rate of the round.
        """


class Table(Part):
    """Remembers something of each client at the server."""

    @abstractmethod
    def init_row(self, params: Tree) -> State:
        """Return the row of a client that takes part for the first time."""

    @abstractmethod
    def next_rows(self, outcome: Outcome) -> State:
        """Return the new rows of the round's clients, tensors [K, ...]."""


class CohortTransform(Part):
    """Changes the K updates before they are reduced to one. Any number, as written."""

    @abstractmethod
    def transform_cohort(self, updates: Span, cohort: Cohort) -> Span:
        """Return the changed updates."""


class Reduction(Part):
    """Makes one update of K. Exactly one; the weighted mean where none is given."""

    @abstractmethod
    def reduce(self, updates: Span, cohort: Cohort) -> Tree:
        """Return the aggregate."""


class AggregateTransform(Part):
    """Changes the aggregate before it is applied. Any number, by stage."""

    aggregate_stage: ClassVar[Stage]

    @abstractmethod
    def transform_aggregate(self, update: Tree, updates: Span, cohort: Cohort) -> Tree:
        """Return the changed aggregate."""


class ServerOptimiser(Part):
    """Applies the aggregate to the global model. Exactly one; addition where none is given."""

    @abstractmethod
    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: Cohort
    ) -> tuple[Tree, State]:
        """Return the new global model and the new state."""


class ServerState(Part):
    """Remembers something at the server from round to round."""

    @abstractmethod
    def init_server(self, params: Tree, population: Population) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def next_server(self, outcome: Outcome) -> State:
        """Return the state for the next round, of the same names and shapes."""


ROLES: Mapping[type, str] = {
    Dispatch: "dispatch",
    Broadcast: "broadcast",
    LocalWork: "local work",
    Survey: "survey",
    Preparation: "preparation",
    Criterion: "criterion",
    LossTerm: "loss term",
    GradientRule: "gradient rule",
    Penalty: "penalty",
    GradientTransform: "gradient transform",
    StepCorrection: "step correction",
    Carry: "carry within a round",
    UpdateTransform: "update transform",
    Codec: "encoding of the update",
    ClientState: "client state",
    Upload: "upload",
    CohortTransform: "cohort transform",
    Reduction: "reduction",
    AggregateTransform: "aggregate transform",
    ServerOptimiser: "server optimiser",
    ServerState: "server state",
    Table: "table of clients",
}
"""Every role with its name in messages, in the order in which they act."""

SLOTS = (Dispatch, LocalWork, Criterion, GradientRule, Codec, Reduction, ServerOptimiser)
"""Roles that at most one part of a method may play."""
