"""The closed list of roles that a part of a method can play.

A role is an abstract class with one method, or two where a state has to begin and go on. A part is
a frozen dataclass of hyper-parameters that inherits the roles it needs; it keeps nothing itself.
Client roles are written for one client, without a client axis; server roles always have a leading
axis K.

Roles are listed by when they act: before training, in a local step, at the end of a client's
round, at the server, in an evaluation. Within a local step the order is `LocalModel`,
`GradientRule` (which takes the gradient of the task's loss or the `Criterion`, with every
`LossTerm` and `Penalty`), `GradientTransform` by stage, the local optimiser or the
`ClientOptimiser`, `StepCorrection`, `Carry`. At the server it is the clients' weights,
`CohortTransform`, `Reduction`, `AggregateTransform` by stage, `ServerOptimiser`, `ServerState`,
`Table`.

Axis letters, the same everywhere: N examples, C clients in all, K clients this round, S local
steps, B batch, Y classes, F features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from fedkeel.base.lazy import Tensor
from fedkeel.config import Local
from fedkeel.method.context import Arrival, Outcome, Population, Round, RoundCohort, Step
from fedkeel.method.local_optimiser import LocalOptimiser
from fedkeel.method.part import Capability as Capability  # a part's author imports only from here
from fedkeel.method.part import Part as Part
from fedkeel.method.part import Stage as Stage
from fedkeel.method.part import Traits as Traits
from fedkeel.method.part import param as param
from fedkeel.solve.span import Span
from fedkeel.task.batch import Batch, Output
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree

# ---- which parameters -----------------------------------------------------------------------


class Personal(Part):
    """Keeps some parameters at the client, where they are trained and never sent. Any number.

    You need it when each client has its own part of the model, such as its classifier. All other
    roles see only the shared parameters. Personal ones take a step of the local optimiser along
    the gradient that `Step.grad` or `Step.example_grads` gives first. Its traits may say
    `keeps_statistics` or `shares_nothing`.
    """

    @abstractmethod
    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the names of the parameters that stay at the client."""


class Phases(Part):
    """Divides local training into phases that train different parameters. At most one.

    You need it when some parameters are trained first and others later, or some never.
    """

    @abstractmethod
    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return the parameters that are trained in each phase; others stay as they are.

        Args:
            layout: all trained parameters of the model.
            personal: those that stay at the client.
        """

    @abstractmethod
    def phase(self, step: int, steps: int, round: int) -> int:
        """Return the phase of a local step, an index of `phases`.

        Args:
            step: 0..S-1.
            steps: S, of the client in this round.
            round: rounds completed before this one.
        """


# ---- before training ------------------------------------------------------------------------


class Dispatch(Part):
    """Changes the model that is sent. At most one.

    You need it when clients start somewhere else than at the global model, such as ahead along a
    momentum. Updates are then relative to what was sent, and so is the aggregate.
    """

    @abstractmethod
    def dispatch(self, params: Tree, state: State, lr: float) -> Tree:
        """Return what is sent in place of the global model.

        Args:
            params: the global model.
            state: the part's own server state.
            lr: local learning rate of the round.
        """


class Broadcast(Part):
    """Sends something to the clients beyond the model.

    You need it when clients use something that the server knows, such as a global momentum.
    """

    @abstractmethod
    def message(self, state: State) -> State:
        """Return what is sent; `state` is the part's own server state."""


class LocalWork(Part):
    """Fixes how much local work is done. At most one.

    You need it when the method is defined by its local work, such as one full-batch step.
    """

    @abstractmethod
    def work(self, local: Local) -> Local:
        """Return the settings of local training that the method means."""


class Survey(Part):
    """Asks the clients of a round something about the received model before they train.

    You need it when local training uses a mean over the clients that belongs to this very model,
    such as the full gradient. It costs a second exchange of messages in every round: all clients
    then receive the weighted mean of the answers, as `step.broadcast["survey"]`.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.SURVEYS})

    @abstractmethod
    def survey(self, step: Step) -> State:
        """Return a client's answer; the step's batch is all its examples."""


class ReceivedModel(Part):
    """Says which model a client takes for the received one. At most one.

    You need it when the server has several models, such as one for each cluster of clients. All
    other parts then count from that model: the update is the difference to it, and a proximal term
    pulls to it. Such a part breaks ONE_MODEL without saying so, and brings the server's half: a
    `ServerOptimiser`. Its traits may say `is_personal_model`, `keeps_statistics` and `sends_rows`.
    """

    @abstractmethod
    def received(self, sent: Tree, arrival: Arrival) -> Tree:
        """Return the model.

        Args:
            sent: the global model.
            arrival: the client, with what this part's server half sent; what is written into its
                `noted` is found by `Carry.init_carry`.
        """


class Preparation(Part):
    """Makes something of the received model and the round's examples before the first step.

    You need it when a step uses values for its examples that the received model determines, such
    as pseudo labels or perturbed inputs.
    """

    pairing: Literal["example", "position"]
    """Which rows a step gets: ``example`` are those of its own examples, ``position`` those of the
    batch that had the same place in the round's first pass."""

    @abstractmethod
    def prepare(self, examples: Batch, step: Step) -> State:
        """Return tensors [n, ...], one row for each of the n distinct examples of the round."""


class LocalStart(Part):
    """Says where a client begins. At most one; it begins at the received model where none is given.

    You need it when a client begins somewhere between the received model and its own. Its update
    is still the difference to the received model. Its traits may say `is_personal_model`.
    """

    @abstractmethod
    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Return the local model before the first step."""


class SteppedStart(LocalStart):
    """A `LocalStart` that takes steps of its own, each on a mini-batch, before the local steps.

    Its mini-batches have the size of those of local training; a pass takes all examples of the
    client, each mini-batch every n-th of them in stored order. Engines may take the steps of
    several clients side by side, so nothing but `start_steps` looks at numbers.
    """

    @abstractmethod
    def start_steps(self, client_state: State, batches: int) -> int:
        """Return how many steps a client takes; `batches` are the mini-batches of a pass."""

    @abstractmethod
    def init_start(self, received: Tree, client_state: State, layout: ParameterLayout) -> State:
        """Return what the first step begins with."""

    @abstractmethod
    def start_step(self, state: State, received: Tree, step: Step) -> State:
        """Return what the next step begins with, of the same names and shapes."""

    @abstractmethod
    def end_start(self, state: State, received: Tree, client_state: State) -> tuple[Tree, State]:
        """Return the local model before the first local step, and what is noted for the carry."""

    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Take all steps of one client."""
        step, kept = arrival.all_examples_step(), arrival.client_state
        count = start_batches(arrival.local, len(step.batch))
        state = self.init_start(received, kept, step.network.layout)
        for number in range(self.start_steps(kept, count)):
            batch = step.batch.part(slice(number % count, None, count))
            state = self.start_step(state, received, replace(step, batch=batch))
        start, noted = self.end_start(state, received, kept)
        arrival.noted.update(noted)
        return start


def start_batches(local: Local, examples: int) -> int:
    """Return the number of mini-batches in a pass of a `SteppedStart`."""
    size = local.examples_per_step
    return 1 if size == "all" else -(-examples // size)


# ---- in a local step ------------------------------------------------------------------------


class PublicTraining(Part):
    """Trains each client on public inputs, before the first step on its own examples. At most one.

    You need it when clients learn from what others say of inputs that all of them have. The steps
    are those of the local loop, in batches of its size, in the order of the inputs. They count
    neither as steps of the round nor in its loss.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PUBLIC_INPUTS})
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})

    @abstractmethod
    def public_passes(self, round: int, is_first: bool) -> tuple[int, int]:
        """Return passes over the public inputs: by the task's loss, then by `public_loss`.

        Args:
            round: rounds completed before this one.
            is_first: whether the client takes part for the first time.
        """

    @abstractmethod
    def public_loss(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss [B] of scores [B, Y].

        ``step.prepared["places"]`` are the places of its examples among all public inputs, [B].
        """


class LocalModel(Part):
    """Trains a second model at each client, which makes its personal model. At most one.

    You need it when a client has a model of its own beside the one that it sends. The second model
    is trained on the same mini-batches, in each step before the first one.
    """

    @abstractmethod
    def init_model(self, start: Tree, layout: ParameterLayout) -> Tree:
        """Return the second model of a client that takes part for the first time.

        Args:
            start: the received model.
            layout: all trained parameters of the model.
        """

    def begin_model(self, model: Tree, received: Tree) -> Tree:
        """Return the second model at the beginning of a round, of the same names and shapes."""
        return model

    @abstractmethod
    def next_model(
        self, model: Tree, params: Tree, step: Step, descend: Callable[[Tree], Tree]
    ) -> Tree:
        """Return the second model after a step.

        Args:
            model: before the step.
            params: the first model before its step.
            step: the step; `GradientRule.gradient` of the same part sees the result as
                `step.local_model`.
            descend: gradient of the second model -> the second model after a step of the local
                optimiser. Call it once at most.
        """

    @abstractmethod
    def personal_model(self, model: Tree, params: Tree) -> Tree:
        """Return the client's personal model.

        Args:
            model: the second model.
            params: the global model.
        """


class Criterion(Part):
    """Replaces the task's loss. At most one.

    You need it when the loss of an example is another one, such as a calibrated cross-entropy.
    """

    @abstractmethod
    def criterion(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of each example of the step, [B]; `logits` are [B, Y]."""


class LossTerm(Part):
    """Adds a function of the network's output to the loss. Any number, summed.

    You need it for regularisers of outputs or features, such as distillation.
    """

    @abstractmethod
    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return a value for each example, [B], whose mean counts, or one for the batch, [].

        Gradients flow through `output` and through `params`, of which it was made.
        """


class Penalty(Part):
    """Adds a function of the parameters to the objective, by its gradient. Any number, summed.

    You need it for regularisers of the parameters, such as a proximal term.
    """

    @property
    @abstractmethod
    def pull(self) -> float:
        """Return mu of the term (mu/2)||theta - theta_t||^2 in the penalty, 0 where it has none.

        The length of the local path counts it.
        """

    @abstractmethod
    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return the penalty's gradient at `params`."""


class GradientRule(Part):
    """Says where, and of what, the gradient is taken. At most one.

    You need it when a step's gradient is not that of the objective at the local model, such as the
    gradient at a perturbed point. Call `step.grad` or `step.example_grads` at least once.
    """

    @abstractmethod
    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient for a step from `params`."""


class GradientTransform(Part):
    """Changes the gradient before the local optimiser uses it. Any number, by stage.

    You need it when each gradient is corrected, projected or clipped.
    """

    gradient_stage: ClassVar[Stage] = Stage.CORRECT
    """When it acts among the transforms of the gradient."""

    @abstractmethod
    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the changed gradient."""


class ClientOptimiser(Part):
    """Takes the place of the run's local optimiser. At most one.

    You need it when a method is defined by how a local step uses the gradient, or by the state from
    which the local optimiser starts, such as second moments that the server sends. Of the settings
    of local training, `optimiser`, `momentum`, `nesterov`, `betas`, `eps` and `keep_state` then
    have no effect. The state after the last step is `round.optimiser`.
    """

    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})

    @abstractmethod
    def local_optimiser(self, local: Local, no_decay: frozenset[str]) -> LocalOptimiser:
        """Return the optimiser.

        Args:
            local: the settings of local training, such as `weight_decay`.
            no_decay: parameters without weight decay: those that no gradient reaches.
        """

    @abstractmethod
    def start_optimiser(self, initial: State, broadcast: State, client_state: State) -> State:
        """Return the optimiser's state before the first step of a round.

        Args:
            initial: the state that the optimiser itself begins with.
            broadcast: what this part's server half sent.
            client_state: what this part keeps for the client.
        """


class StepCorrection(Part):
    """Moves the parameters after the local optimiser's step. Any number, as written.

    You need it when a correction must not pass through the local optimiser's momentum.
    """

    @abstractmethod
    def correct(self, params: Tree, step: Step) -> Tree:
        """Return the corrected parameters."""


class Carry(Part):
    """Remembers something from step to step within a round.

    You need it when a step uses values of earlier steps, such as the last local model.
    """

    @abstractmethod
    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return the carry of the first step."""

    @abstractmethod
    def next_carry(self, before: Tree, carry: State) -> State:
        """Return the next step's carry.

        Args:
            before: the parameters before this step.
            carry: that of this step, with what the part wrote into `step.noted` in its place.
        """


# ---- at the end of a client's round ---------------------------------------------------------


class UpdateTransform(Part):
    """Changes the update after the last step. Any number, by stage.

    You need it when what a client sends is not end - start itself, such as a normalised update.
    """

    update_stage: ClassVar[Stage] = Stage.CORRECT
    """When it acts among the transforms of the update."""

    @abstractmethod
    def transform_update(self, update: Tree, round: Round) -> Tree:
        """Return the changed update; `update` is end - start, as earlier transforms left it."""


class Codec(Part):
    """Encodes the update for sending. At most one.

    You need it when the update is compressed. What the encoding drops is lost: everything after it,
    at the client and at the server, gets the decoded update.
    """

    @abstractmethod
    def encode(self, update: Tree, round: Round) -> State:
        """Return what is sent in place of the update; it has the same form in every round."""

    @abstractmethod
    def decode(self, sent: State, like: Tree) -> Tree:
        """Return the update of one client that `sent` encodes.

        Args:
            sent: what `encode` returned.
            like: the model, for names, shapes and types.
        """


class ClientState(Part):
    """Keeps something for each client from round to round.

    You need it when a client's next round uses its last one, such as a control variate. Its traits
    may say `server_holds_sum` and `from_last_round_only`.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.STABLE_CLIENTS})

    @abstractmethod
    def init_client(self, start: Tree) -> State:
        """Return the state of a client that takes part for the first time."""

    @abstractmethod
    def next_client(self, round: Round) -> State:
        """Return the state for the client's next round, of the same names and shapes."""


class Upload(Part):
    """Sends something to the server beyond the update.

    You need it when the server uses more of a client than its update, such as the change of its
    control variate. Its traits may say `needs_only_sum`.
    """

    @abstractmethod
    def upload(self, round: Round) -> State:
        """Return what is sent."""


# ---- at the server --------------------------------------------------------------------------


class ServerPolicy(Part):
    """Says how many updates the server waits for. At most one; for the cohort where none is given.

    You need it when the server does not wait for slow clients. Clients then train from the models
    of different rounds, and `cohort.staleness` says how many steps the server has made since. A
    server half that uses single updates, or remembers them, needs FRESH_UPDATES and is refused,
    unless its traits say that it `takes_stale_updates`. Those of a policy may say
    `updates_from_present`.
    """

    breaks: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.FRESH_UPDATES, Capability.SURVEYS}
    )

    @abstractmethod
    def updates_per_step(self) -> int:
        """Return the number of updates in a step of the server."""


class CohortTransform(Part):
    """Changes the K updates before they are reduced to one. Any number, as written.

    You need it when updates are compared with one another, such as to remove conflicts. Its traits
    may say `merges_updates`.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.PER_CLIENT_UPDATES})

    def withstands(self, count: int) -> int | None:
        """Return how many broken updates of `count` it is made for; None where it counts none.

        A run is warned where that number is 0, or below the number that may be broken.
        """
        return None

    @abstractmethod
    def transform_cohort(self, updates: Span, cohort: RoundCohort) -> Span:
        """Return the changed updates."""


class Reduction(Part):
    """Makes one update of K. Exactly one; the weighted mean where none is given.

    You need it when the aggregate is not the weighted mean, such as a median. Its traits may say
    `uses_weights`, `counts_absent` and `hides_updates`.
    """

    def sum_noise(self) -> float:
        """Return the standard deviation of the noise that `reduce` adds to the sum, 0 for none.

        Under secure aggregation the clients add it before the server sees the sum, and `updates`
        are then `Sums` that are `noisy`, to which `reduce` adds no more.
        """
        return 0.0

    def withstands(self, count: int) -> int | None:
        """Return how many broken updates of `count` it is made for; None where it counts none.

        A run is warned where that number is 0, or below the number that may be broken.
        """
        return None

    @abstractmethod
    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the aggregate."""


class AggregateTransform(Part):
    """Changes the aggregate before it is applied. Any number, by stage.

    You need it when the aggregate is corrected or projected at the server.
    """

    aggregate_stage: ClassVar[Stage] = Stage.CORRECT
    """When it acts among the transforms of the aggregate."""

    @abstractmethod
    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the changed aggregate."""


class ServerOptimiser(Part):
    """Applies the aggregate to the global model. Exactly one; addition where none is given.

    You need it for momentum or adaptive steps at the server.
    """

    @abstractmethod
    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the new global model and the new state."""


class ServerState(Part):
    """Remembers something at the server from round to round.

    You need it when the server's next round uses its last one.
    """

    @abstractmethod
    def init_server(self, params: Tree, population: Population) -> State:
        """Return the state before the first round."""

    @abstractmethod
    def next_server(self, outcome: Outcome) -> State:
        """Return the state for the next round, of the same names and shapes."""

    def next_without_replies(self, state: State) -> State:
        """Return the state after a round in which nobody replied, as it was unless rounds count."""
        return state


class Table(Part):
    """Remembers something of each client at the server.

    You need it when absent clients count with what they sent last.
    """

    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.STABLE_CLIENTS, Capability.SEPARATE_UPDATES}
    )

    @abstractmethod
    def init_row(self, params: Tree) -> State:
        """Return the row of a client that takes part for the first time."""

    @abstractmethod
    def next_rows(self, outcome: Outcome) -> State:
        """Return the new rows of the round's clients, tensors [K, ...]."""


# ---- in an evaluation -----------------------------------------------------------------------


class FineTuning(Part):
    """Trains each client's model once more before it is evaluated as its personal model.

    At most one. You need it when clients adapt what they receive. Nothing of it is kept.
    """

    @abstractmethod
    def fine_tuning(self, local: Local) -> Local:
        """Return the settings of this training, from those of local training."""

    def fine_tuned(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters that are trained."""
        return frozenset(layout.names)


class PersonalPrediction(Part):
    """Changes what a client's personal model predicts, by the client's training examples.

    At most one. You need it when examples are predicted from their neighbours among those.
    """

    @abstractmethod
    def predict(self, output: Output, known: Output, targets: Tensor) -> Tensor:
        """Return the scores [B, Y] in place of those of `output`.

        Args:
            output: what the model makes of the examples to predict, with features [B, F].
            known: what it makes of the client's training examples, features [n, F].
            targets: [n] their labels.
        """


ROLES: Mapping[type, str] = {
    Personal: "personal parameters",
    Phases: "training phases",
    Dispatch: "dispatch",
    Broadcast: "broadcast",
    LocalWork: "local work",
    Survey: "survey",
    ReceivedModel: "received model",
    Preparation: "preparation",
    LocalStart: "local start",
    PublicTraining: "training on public inputs",
    LocalModel: "second local model",
    Criterion: "criterion",
    LossTerm: "loss term",
    GradientRule: "gradient rule",
    Penalty: "penalty",
    GradientTransform: "gradient transform",
    ClientOptimiser: "local optimiser",
    StepCorrection: "step correction",
    Carry: "carry within a round",
    UpdateTransform: "update transform",
    Codec: "encoding of the update",
    ClientState: "client state",
    Upload: "upload",
    ServerPolicy: "server policy",
    CohortTransform: "cohort transform",
    Reduction: "reduction",
    AggregateTransform: "aggregate transform",
    ServerOptimiser: "server optimiser",
    ServerState: "server state",
    Table: "table of clients",
    FineTuning: "fine-tuning",
    PersonalPrediction: "personal prediction",
}
"""Every role with its name in messages, in the order in which they act."""

SLOTS = (
    *(Phases, Dispatch, LocalWork, ReceivedModel, LocalStart, PublicTraining, LocalModel),
    Criterion,
    *(GradientRule, ClientOptimiser, Codec, ServerPolicy, Reduction, ServerOptimiser),
    *(FineTuning, PersonalPrediction),
)
"""Roles that at most one part of a method may play."""
