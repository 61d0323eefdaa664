"""Contexts: what a part sees of a step, of a client's round and of the server's round.

Of states and messages a part sees only its own. Client contexts (`Step`, `Round`) carry no client
axis; server contexts (`RoundCohort`, `Outcome`) have a leading axis K on all that came from
clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.rng import generator
from fedkeel.base.values import Values
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method import checks
from fedkeel.method.checks import call
from fedkeel.method.part import Capability
from fedkeel.solve.span import Span
from fedkeel.task.batch import Batch, Output, batch_mean
from fedkeel.tree import Groups, State, Tree

if TYPE_CHECKING:
    from fedkeel.task.adapters import Adapter
    from fedkeel.task.network import Autograd, Network  # of which a part's declaration has no need

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ByPart = dict[str, State]
"""States or messages by the name of the part that owns them."""


def part_state(states: Mapping[str, State], part: str) -> State:
    """Return a part's own state or message, empty where it has none."""
    return states.get(part, {})


@dataclass(frozen=True)
class ClientInfo:
    """What a client knows about itself.

    Args:
        client: [] stable index 0..C-1, of type int64.
        examples: [] number of training examples, of the run's type, so that 1 / examples has it.
        declared_class_counts: [Y] number of examples of each class, of the run's type; None where
            no part of the method declares CLASS_COUNTS.
    """

    client: Tensor
    examples: Tensor
    declared_class_counts: Tensor | None = None

    @property
    def class_counts(self) -> Tensor:
        """The number of examples of each class, [Y], for parts that need CLASS_COUNTS."""
        if self.declared_class_counts is None:
            raise checks.UndeclaredNeedError("class_counts", Capability.CLASS_COUNTS)
        return self.declared_class_counts


class CriterionPart(Protocol):
    """A part with the role `Criterion`."""

    name: ClassVar[str]

    def criterion(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of each example."""


class LossTermPart(Protocol):
    """A part with the role `LossTerm`."""

    name: ClassVar[str]

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return a value for each example, or one for the batch."""


class PublicTrainingPart(Protocol):
    """A part with the role `PublicTraining`."""

    name: ClassVar[str]

    def public_loss(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of each example."""


class PenaltyPart(Protocol):
    """A part with the role `Penalty`."""

    name: ClassVar[str]

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return the penalty's gradient."""


@dataclass(frozen=True)
class Objective:
    """What a client minimises.

    Args:
        criterion: the part that replaces the task's loss, or None.
        terms: parts that add to the loss.
        penalties: parts that add a function of the parameters, by its gradient.
        public: the part whose loss of public inputs is minimised in place of all that, or None.
    """

    criterion: CriterionPart | None = None
    terms: tuple[LossTermPart, ...] = ()
    penalties: tuple[PenaltyPart, ...] = ()
    public: PublicTrainingPart | None = None

    @property
    def is_task_loss(self) -> bool:
        """Whether the loss is the task's, without a criterion and without terms."""
        return self.criterion is None and not self.terms and self.public is None


@dataclass(frozen=True)
class Message:
    """What the server sends to the clients of a round.

    Args:
        params: the model.
        buffers: the model's buffers, where they are averaged.
        broadcast: further messages, by part.
        round: rounds completed before this one.
        lr: local learning rate of this round.
    """

    params: Tree
    buffers: Tree
    broadcast: ByPart
    round: int
    lr: float


@dataclass(frozen=True)
class PartStates:
    """What the parts have at one client in one step, by part; each part sees its own.

    Args:
        broadcast: what their server halves sent.
        client_state: what they keep for the client.
        carry: what they carried from the step before.
        prepared: their preparations, the rows [B, ...] of this step.
        noted: what they note in this step for the next one's carry.
    """

    broadcast: ByPart
    client_state: ByPart
    carry: ByPart = field(default_factory=dict)
    prepared: ByPart = field(default_factory=dict)
    noted: ByPart = field(default_factory=dict)

    def carried(self, part: str) -> State:
        """Return a part's carry, with what it has noted in this step in the place of the former."""
        return {**part_state(self.carry, part), **part_state(self.noted, part)}


@dataclass(frozen=True)
class PersonalParameters:
    """The parameters of a client that are never sent.

    Args:
        now: before this step; none where the method has none.
        start: at the beginning of the round.
        recorded: the first gradient of this step by them, which they are moved along.
    """

    now: Tree = field(default_factory=dict)
    start: Tree = field(default_factory=dict)
    recorded: list[Tree] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """One local step of one client, as a part sees it.

    Args:
        batch: the examples of this step; before the first step, those of the round. Where clients
            train side by side some may be padding, of weight 0: `batch.real(dtype)`, [B]. A part of
            one's own in which padding shows is given batches without.
        start: the received model.
        client_info: about the client.
        broadcast: what this part's server half sent.
        client_state: what this part keeps for the client.
        carry: what this part carried from the step before.
        prepared: this part's preparation, the rows [B, ...] of this step.
        noted: where this part writes what its `Carry.next_carry` shall find in the carry, such as
            values that a `GradientRule` has on its way. It begins empty in each step.
        network: the model and its loss.
        buffers: the model's buffers.
        objective: what is minimised.
        autograd: how gradients are taken.
        received: the buffers of the received model.
        declared_noise: what `noise` returns; None where no part of the method declares NOISE.
        states: what all parts have in this step, for `view`.
        recorded_losses: the loss of the first gradient of this step, which is recorded.
        piece_size: examples of which the gradient is taken at a time; 0 for all at once.
        personal: the client's personal parameters; models that are given to the methods below
            leave them out, and so do gradients.
        local_model: the second model after this step, for the `GradientRule` of the part that
            trains it.
    """

    batch: Batch
    start: Tree
    client_info: ClientInfo
    network: Network
    buffers: Tree
    objective: Objective = Objective()
    autograd: Autograd = "eager"
    received: Tree = field(default_factory=dict)
    declared_noise: Tree | None = None
    states: PartStates = PartStates({}, {})
    broadcast: State = field(default_factory=dict)
    client_state: State = field(default_factory=dict)
    carry: State = field(default_factory=dict)
    prepared: State = field(default_factory=dict)
    noted: State = field(default_factory=dict)
    recorded_losses: list[Tensor] = field(default_factory=list)
    piece_size: int = 0
    personal: PersonalParameters = field(default_factory=lambda: PersonalParameters())
    local_model: Tree = field(default_factory=dict)

    @property
    def noise(self) -> Tree:
        """Standard normal numbers of the model's shapes, new in every step, for NOISE."""
        if self.declared_noise is None:
            raise checks.UndeclaredNeedError("noise", Capability.NOISE)
        return self.declared_noise

    def view(self, part: str) -> Step:
        """Return this step with the namespaces of one part."""
        return replace(
            self,
            broadcast=part_state(self.states.broadcast, part),
            client_state=part_state(self.states.client_state, part),
            carry=part_state(self.states.carry, part),
            prepared=part_state(self.states.prepared, part),
            noted=self.states.noted.setdefault(part, {}),
        )

    def grad(self, params: Tree, penalties_at: Tree | None = None) -> Tree:
        """Return the gradient of the objective on this step's batch, with all terms and penalties.

        The first call of a step is the one whose task loss is recorded and whose forward pass
        updates batch statistics; later calls leave no trace.

        Args:
            params: where.
            penalties_at: where that of the penalties is taken; None for `params`.
        """
        first = not self.recorded_losses
        buffers = self.buffers if first else self.network.copy_buffers(self.buffers)
        is_whole = not 0 < self.piece_size < len(self.batch)
        value_and_grad = self._value_and_grad if is_whole else self._accumulated
        loss, grads = value_and_grad(self._with_personal(params), buffers)
        grads = self._shared(grads)
        if first:
            self.recorded_losses.append(loss)
        return self._with_penalties(grads, params if penalties_at is None else penalties_at)

    def _with_personal(self, params: Tree) -> Tree:
        """Return shared parameters with the client's personal ones."""
        return {**params, **self.personal.now} if self.personal.now else params

    def _shared(self, grads: Tree) -> Tree:
        """Return the gradient by the shared parameters; record the first one by the others."""
        personal = self.personal
        if not personal.now:
            return grads
        if not personal.recorded:
            personal.recorded.append({name: grads[name] for name in personal.now})
        return {name: g for name, g in grads.items() if name not in personal.now}

    def _value_and_grad(self, params: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
        """Return the task loss [] and the gradient of the objective without its penalties."""
        objective = None if self.objective.is_task_loss else self._objective
        return self.network.value_and_grad(params, buffers, self.batch, self.autograd, objective)

    def _accumulated(self, params: Tree, buffers: Tree) -> tuple[Tensor, Tree]:
        """Return the same, a piece at a time: the mean over the examples of all pieces."""
        losses, grads, weights = [], tree.zeros_like(params), []
        for piece, weight in self.pieces(self.piece_size):
            before = tree.clone(buffers)
            loss, of_piece = piece._value_and_grad(params, buffers)
            is_real = weight > 0  # of a piece of nothing but padding it is not a number
            for name, buffer in buffers.items():
                buffer.copy_(torch.where(is_real, buffer, before[name]))
            grads = {
                k: g + torch.where(is_real, weight * of_piece[k], 0.0) for k, g in grads.items()
            }
            losses.append(torch.where(is_real, weight * loss, 0.0))
            weights.append(weight)
        count = torch.stack(weights).sum()
        return torch.stack(losses).sum() / count, {k: g / count for k, g in grads.items()}

    def _objective(self, output: Output, params: Tree) -> Tensor:
        """Return the loss with all terms, without the penalties, []."""
        part, step = self.objective.criterion, self
        if self.personal.now:  # terms see those that are differentiated
            now = {name: params[name] for name in self.personal.now}
            step = replace(self, personal=replace(self.personal, now=now))
            params = {name: p for name, p in params.items() if name not in now}
        if (public := self.objective.public) is not None:
            losses = call(public.public_loss, output.logits, step.view(public.name))
            losses = checks.check_losses(public, losses, len(self.batch))
        elif part is None:
            losses = self.network.task_losses(output.returned, self.batch.y)
        else:
            losses = call(part.criterion, output.logits, step.view(part.name))
            losses = checks.check_losses(part, losses, len(self.batch))
        total = batch_mean(losses, self.batch)
        for term in self.objective.terms:
            values = call(term.loss_term, output, params, step.view(term.name))
            values = checks.check_losses(term, values, len(self.batch))
            total = total + (batch_mean(values, self.batch) if values.ndim else values)
        return total

    def _with_penalties(self, grads: Tree, params: Tree) -> Tree:
        for part in self.objective.penalties:
            gradient = call(part.penalty_gradient, params, self.view(part.name))
            grads = tree.add(grads, checks.check_tree(part, gradient, params))
        return grads

    def grad_of(self, params: Tree, function: Callable[[Output], Tensor]) -> Tree:
        """Return the gradient of any function of the output on this step's batch, without a trace.

        Args:
            params: where.
            function: output -> a value for each example, [B], whose mean counts, or one for all.
        """

        def objective(output: Output, _: Tree) -> Tensor:
            value = function(output)
            return batch_mean(value, self.batch) if value.ndim else value

        return self._grad_of_task(params, self.batch, objective)

    def _grad_of_task(
        self,
        params: Tree,
        batch: Batch,
        objective: Callable[[Output, Tree], Tensor] | None = None,
        names: Collection[str] | None = None,
    ) -> Tree:
        """Return the gradient of the task loss or an objective, without a trace."""
        buffers, model = self.network.copy_buffers(self.buffers), self._with_personal(params)
        _, grads = self.network.value_and_grad(
            model, buffers, batch, self.autograd, objective, names
        )
        return {name: g for name, g in grads.items() if name in params}

    def example_grads(self, params: Tree) -> Tree:
        """Return the gradient of the loss of each example, [B, ...], without the penalties.

        Padded examples have one too. The first call of a step has its loss recorded.
        """
        from fedkeel.method.per_example import map_examples

        def one(x: Values, y: Values) -> tuple[Tree, Tensor]:
            of_one = replace(self, batch=Batch.of_one(x, y))
            objective = None if self.objective.is_task_loss else of_one._objective
            buffers = self.network.copy_buffers(self.buffers)
            value, grads = self.network.value_and_grad(
                model, buffers, of_one.batch, "functional", objective
            )
            return grads, value

        if not len(self.batch):  # drawn by Poisson sampling, see `Batch.expected`
            if not self.recorded_losses:
                self.recorded_losses.append(next(iter(params.values())).new_zeros(()))
            return {name: value.new_zeros((0, *value.shape)) for name, value in params.items()}
        model = self._with_personal(params)
        grads, values = map_examples(one, self.batch)
        if not self.recorded_losses:
            self.recorded_losses.append(batch_mean(values, self.batch))
        personal = self.personal
        if personal.now and not personal.recorded:
            real = self.batch.real(self.network.dtype)
            shares = real / real.sum()
            personal.recorded.append(
                {name: torch.einsum("b,b...->...", shares, grads[name]) for name in personal.now}
            )
        return {name: grads[name] for name in params}

    def task_grad(self, params: Tree, batch: Batch, names: Collection[str] | None = None) -> Tree:
        """Return the gradient of only the task loss, on any batch, without a trace.

        Args:
            params: where.
            batch: the examples.
            names: of the parameters by which it is taken; None takes it by all of them.
        """
        return self._grad_of_task(params, batch, names=names)

    def input_grad(self, params: Tree, batch: Batch) -> Tensor:
        """Return the gradient [n, ...] of the mean loss by the inputs, in evaluation mode."""
        buffers = self.network.copy_buffers(self.buffers)
        return self.network.input_grad(self._with_personal(params), buffers, batch, self.autograd)

    def logits(self, params: Tree, x: Values) -> Tensor:
        """Return the scores [n, Y] of inputs, in evaluation mode."""
        buffers = self.network.copy_buffers(self.buffers)
        return self.network.logits(self._with_personal(params), buffers, x, train=False)

    def soft_target(self, scores: Tensor) -> Tensor:
        """Return what a model predicts as a target of the task's loss, for SOFT_TARGETS.

        Raises:
            UndeclaredNeedError: the loss takes none.
        """
        function = self.network.soft_target
        if function is None:
            raise checks.UndeclaredNeedError("soft_target", Capability.SOFT_TARGETS)
        return function(scores)

    def output(self, params: Tree, train: bool = False) -> Output:
        """Return what a model makes of this step's batch, without a trace.

        Args:
            params: the model; gradients pass through it where it is what is differentiated.
            train: whether it is in training mode.
        """
        buffers = self.network.copy_buffers(self.buffers)
        return self.network.output(self._with_personal(params), buffers, self.batch, train)

    def teacher(self) -> Output:
        """Return what the received model makes of this step's batch, in evaluation mode.

        Personal parameters are those with which the client began the round.
        """
        buffers, start = self.network.copy_buffers(self.received), self.start
        if self.personal.now:
            start = {**start, **self.personal.start}
        with torch.no_grad():
            return self.network.output(start, buffers, self.batch, train=False)

    def pieces(self, size: int) -> list[tuple[Step, Tensor]]:
        """Cut this step's batch into steps of at most `size` examples, each with its weight.

        The weights, [] each, are numbers of real examples: divided by their sum they make the mean
        over the batch of the means over the pieces. Where the examples of a batch see each other,
        no piece has only one: batch normalisation has no statistics of one.
        """
        out, count = [], len(self.batch)
        cuts = [*range(0, count, size), count]
        if self.network.mixes_examples and len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
            del cuts[-2]
        for start, stop in pairwise(cuts):
            rows = slice(start, stop)
            prepared = {
                part: tree.map_tensors(itemgetter(rows), state)
                for part, state in self.states.prepared.items()
            }
            piece = replace(
                self,
                batch=self.batch.part(rows),
                states=replace(self.states, prepared=prepared),
                recorded_losses=[],
                personal=replace(self.personal, recorded=[]),
                piece_size=0,
            )
            out.append((piece, piece.batch.real(self.network.dtype).sum()))
        return out


@dataclass(frozen=True)
class Arrival:
    """One client that has received the model, before its first step, as a part sees it.

    Args:
        client_info: about the client.
        make_all_examples_step: makes a step whose batch is all examples of the client.
        broadcast: what this part's server half sent.
        client_state: what this part kept for the client from its last round.
        local: the settings of local training.
        noted: where this part writes what its `Carry.init_carry` shall find in the client state,
            in the place of the former.
    """

    client_info: ClientInfo
    make_all_examples_step: Callable[[], Step]
    broadcast: State
    client_state: State
    local: Local
    noted: State = field(default_factory=dict)

    def all_examples_step(self) -> Step:
        """Return a step whose batch is all examples of the client, with this part's namespaces.

        A client that is asked for it begins by itself, never side by side with others.
        """
        return self.make_all_examples_step()


@dataclass(frozen=True)
class Round:
    """One client after its last step, as a part sees it.

    Args:
        start: the received model.
        end: the model after the last step.
        client_info: about the client.
        steps: [] S, the number of steps, of the run's type.
        path_length: displacement of the local model over -lr for a constant gradient of 1, so S
            for plain gradient descent. Momentum and penalties are in it. [] where clients train
            side by side. nan where the local optimiser's path is not a sum of gradients.
        lr: local learning rate of the round; [] where the end of a round is recorded for many.
        make_all_examples_step: makes a step whose batch is all examples of the client.
        broadcast: what this part's server half sent.
        client_state: what this part kept for the client from its last round.
        carry: what this part carried out of the last step.
        new_state: what it keeps for the next one; only `Upload` sees it.
        diagnostics: diagnostics of all parts.
        optimiser: state of the local optimiser after the last step.
        update: the update as the update transforms left it, before a codec; only what comes after
            them sees it.
        loss: [] mean training loss over the steps, of each as it was before the step.
        part: name of the part.
        nonlinear_part: name of a part, or of the local optimiser, that makes the local path
            something else than a weighted sum of gradients; "" for none.
        make_public_step: makes a step whose batch is all public inputs; None without such.
    """

    start: Tree
    end: Tree
    client_info: ClientInfo
    steps: Tensor
    path_length: float | Tensor
    lr: float | Tensor
    make_all_examples_step: Callable[[], Step]
    broadcast: State = field(default_factory=dict)
    client_state: State = field(default_factory=dict)
    carry: State = field(default_factory=dict)
    new_state: State = field(default_factory=dict)
    diagnostics: dict[str, Tensor] = field(default_factory=dict)
    optimiser: State = field(default_factory=dict)
    update: Tree = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    part: str = ""
    nonlinear_part: str = ""
    make_public_step: Callable[[], Step] | None = None

    def all_examples_step(self) -> Step:
        """Return a step whose batch is all examples of the client, with this part's namespaces.

        It is not a step of the path: its `grad` at any point is the gradient of the client's own
        objective there.
        """
        return self.make_all_examples_step().view(self.part)

    def public_step(self) -> Step:
        """Return a step whose batch is all public inputs; who asks for it needs PUBLIC_INPUTS.

        Raises:
            CompositionError: there are no public inputs.
        """
        if self.make_public_step is None:
            raise CompositionError(
                f"{self.part!r} asks for public inputs, and there are none.",
                do=f"let {self.part!r} say that it needs PUBLIC_INPUTS",
            )
        return self.make_public_step().view(self.part)

    def mean_grad(self) -> Tree:
        """Return the mean gradient along the local path; who asks for it needs LINEAR_ACCUMULATION.

        It is (start - end) / (lr * unit), which means something only where no part bends the steps.

        Raises:
            CompositionError: one does.
        """
        if self.nonlinear_part:
            raise CompositionError(
                f"{self.part!r} asks for the mean gradient of a path that is not a sum of them.",
                why=f"{self.nonlinear_part!r} breaks LINEAR_ACCUMULATION",
                do=f"leave one of them out, and let {self.part!r} say that it needs it",
            )
        moved = tree.sub(self.end, self.start)  # as the update is made: recorded, it is made once
        return tree.scale(moved, -1.0 / (self.lr * self.path_length))

    def log(self, name: str, value: Tensor | float) -> None:
        """Record a diagnostic of this client, one number; the record holds the cohort's mean.

        Raises:
            ValueError: `value` is a tensor of several numbers.
        """
        if not isinstance(value, torch.Tensor):
            value = next(iter(self.end.values())).new_tensor(float(value))
        if value.ndim:
            raise ValueError(f"{name!r} is one number for a client; got {list(value.shape)}")
        self.diagnostics[f"{self.part}.{name}"] = value


@dataclass(frozen=True)
class Population:
    """What a server knows of clients and model before the first round.

    Args:
        clients: C, in all.
        per_round: K, selected in a round.
        classes: Y, outputs of the classifier; 0 where the model has none that is known.
        features: F, its inputs; 0 likewise.
        dtype: type of the parameters.
        adapters: low-rank adapters of matrices that are trained parameters too.
        public: number of public inputs.
    """

    clients: int
    per_round: int
    classes: int = 0
    features: int = 0
    dtype: torch.dtype = field(default_factory=lambda: torch.float32)
    adapters: tuple[Adapter, ...] = ()
    public: int = 0

    @classmethod
    def of(cls, network: Network, clients: int, per_round: int) -> Population:
        """Return the population of clients that train a network."""
        classes, features = network.head_shape
        return cls(clients, per_round, classes, features, network.dtype, network.adapters)


@dataclass(frozen=True)
class RoundCohort:
    """The clients of a round, as a server part sees them. Rows are in ascending client order.

    Args:
        clients: [K] stable client indices, a NumPy array.
        weights: [K] sum to 1, a NumPy array in float64.
        lr: local learning rate of the round.
        round: rounds completed before this one.
        population: how many clients there are.
        names: the model's parameter names.
        seed: seed of the run.
        uploads: what this part's client half sent, tensors [K, ...]; of a part that is `summed`
            they may be sums over some of the clients, [G, ...].
        state: what this part remembers.
        rows: what this part remembers of each of these clients, tensors [K, ...].
        is_known: [K] whether it has remembered something of each before, a NumPy array.
        staleness: [K] steps that the server has made since each was sent the model, a NumPy array.
        answer: the mean answer to what this part asked before training.
        root: the server's own update, of its own examples; for parts that need ROOT_EXAMPLES.
        diagnostics: diagnostics of all parts.
        part: name of the part.
    """

    clients: Ints
    weights: Floats
    lr: float
    round: int
    population: Population
    names: tuple[str, ...]
    seed: int
    uploads: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    rows: State = field(default_factory=dict)
    is_known: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    staleness: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    answer: State = field(default_factory=dict)
    root: Tree = field(default_factory=dict)
    diagnostics: dict[str, float] = field(default_factory=dict)
    part: str = ""

    def groups(self, kind: Groups) -> Sequence[Sequence[str]]:
        """Return the parameter names, split into what a projection treats as one vector."""
        return tree.group_names(self.names, kind)

    def rng(self) -> np.random.Generator:
        """Return this part's random stream for this round, a generator of NumPy."""
        return generator(self.seed, self.part, self.round)

    def log(self, name: str, value: float) -> None:
        """Record a diagnostic of this round."""
        self.diagnostics[f"{self.part}.{name}"] = float(value)


Cohort = RoundCohort
"""What version 0.1 calls it: parts of users import this name."""


@dataclass(frozen=True)
class Outcome:
    """A finished server round, as a part that remembers sees it.

    Args:
        start: the global model before the round.
        end: the global model after it.
        updates: the clients' updates, as cohort transforms left them.
        cohort: the clients.
    """

    start: Tree
    end: Tree
    updates: Span
    cohort: RoundCohort
