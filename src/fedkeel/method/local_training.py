"""What stays the same in local training, and what a client goes on from in its next round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.values import tensors_of
from fedkeel.config import Buffers, Local
from fedkeel.method.checks import call
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, Message, part_state
from fedkeel.method.local_optimiser import OPTIMISERS, LocalOptimiser
from fedkeel.method.local_path import nonlinear_optimiser
from fedkeel.task.batch import Batch
from fedkeel.task.network import Autograd, Network
from fedkeel.tree import State, Tree

BUFFERS, OPTIMISER = "buffers", "optimiser"
"""Names in a client's state of the buffers and the local optimiser, where a client goes on from its
own."""

PERSONAL, LOCAL_MODEL, LOCAL_MODEL_OPTIMISER = "personal", "local_model", "local_model_optimiser"
"""Names in a client's state of the personal parameters, the second model and its optimiser."""


@dataclass(frozen=True)
class ClientTraining:
    """What stays the same for all clients and rounds.

    Args:
        plan: the method.
        network: the model and its loss.
        local: local training, as the method means it (`Plan.work`).
        buffers: what happens to the model's buffers.
        autograd: how gradients are taken.
        rounds: T, of the run.
        personal: names of the parameters that stay at the client.
        public: the public inputs with their targets, where a part needs them.
    """

    plan: Plan
    network: Network
    local: Local
    buffers: Buffers = "refuse"
    autograd: Autograd = "eager"
    rounds: int = 1
    personal: frozenset[str] = frozenset()
    public: Batch | None = None

    @property
    def nonlinear_part(self) -> str:
        """Name of what makes the local path something else than a sum of gradients, or ""."""
        by_steps = self.plan.nonlinear_part or nonlinear_optimiser(self.local)
        return by_steps if self.plan.makes_steps else "local_training"

    def first_optimiser(self, params: Tree) -> State:
        """Return the state that a client's optimiser begins with; the user's begins with none."""
        return self.optimiser.init(params) if self.plan.makes_steps else {}

    @property
    def optimiser(self) -> LocalOptimiser:
        """The local optimiser: the method's own, or that of the settings."""
        no_decay, part = self.network.traits.without_gradient, self.plan.client_optimiser
        if part is not None:
            return call(part.local_optimiser, self.local, no_decay)
        return OPTIMISERS[self.local.optimiser].of(self.local, no_decay)

    def step_factors(self, round: int, steps: int) -> tuple[float, ...]:
        """Return the learning rates of the S steps of a round over the round's; () for 1 in all."""
        return self.local.schedule.step_factors(round, steps, self.rounds)

    @property
    def shares_nothing(self) -> bool:
        """Whether all parameters stay at the clients."""
        return not self.shared_params

    @cached_property
    def shared_params(self) -> Tree:
        """The initial parameters that are sent."""
        params = self.network.params
        return {k: v for k, v in params.items() if k not in self.personal}

    @cached_property
    def personal_params(self) -> Tree:
        """The initial parameters that stay at the client."""
        return {k: v for k, v in self.network.params.items() if k in self.personal}

    @cached_property
    def phases(self) -> tuple[frozenset[str], ...]:
        """The parameters that are trained in each phase; () where all are in all steps."""
        part = self.plan.phases
        if part is None:
            return ()
        return tuple(call(part.phases, self.network.layout, self.personal))

    def phases_of_steps(self, steps: int, round: int) -> list[int]:
        """Return [S] the phase of each local step; [] where there are no phases."""
        part = self.plan.phases
        return [] if part is None else [call(part.phase, s, steps, round) for s in range(steps)]

    @cached_property
    def public_batches(self) -> list[tuple[Batch, Tensor]]:
        """The public inputs in batches of local training, with their places among all of them."""
        if self.public is None:
            return []
        count, size = len(self.public), self.local.batch_size
        cuts = [*range(0, count, count if size == "all" else size), count]
        if self.network.mixes_examples and len(cuts) > 2 and cuts[-1] - cuts[-2] == 1:
            del cuts[-2]  # batch normalisation has no statistics of one
        places = torch.arange(count, device=tensors_of(self.public.x)[0].device)
        return [(self.public.part(slice(a, b)), places[a:b]) for a, b in pairwise(cuts)]

    @property
    def keeps_optimiser(self) -> bool:
        """Whether a client goes on from its own state of the optimiser that the settings name."""
        return self.local.keep_state and self.plan.client_optimiser is None

    @property
    def keeps_own(self) -> bool:
        """Whether a client goes on from its own buffers, parameters, model or optimiser."""
        keeps_values = bool(self.personal) or self.plan.local_model is not None
        return self.buffers == "local" or self.keeps_optimiser or keeps_values

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from round to round."""
        return bool(self.plan.client_states) or self.keeps_own

    def kept(self, trained: OwnState) -> ByPart:
        """Return what a client keeps beside the states of the parts."""
        kept: ByPart = {}
        if self.buffers == "local":
            kept[BUFFERS] = dict(trained.buffers)
        if self.personal:
            kept[PERSONAL] = dict(trained.personal)
        if self.plan.local_model is not None:
            kept[LOCAL_MODEL] = dict(trained.model)
        if self.keeps_optimiser and trained.optimiser:
            kept[OPTIMISER] = dict(trained.optimiser)
        if self.keeps_optimiser and trained.model_optimiser:
            kept[LOCAL_MODEL_OPTIMISER] = dict(trained.model_optimiser)
        return kept

    def first(self, message: Message) -> OwnState:
        """Return what a client begins with that takes part for the first time."""
        params, part = message.params, self.plan.local_model
        model = {} if part is None else call(part.init_model, params, self.network.layout)
        return OwnState(
            params=params,
            personal=self.personal_params,
            buffers=message.buffers or self.network.buffers,
            optimiser=self.first_optimiser({**params, **self.personal_params}),
            model=model,
            model_optimiser={} if part is None else self.optimiser.init(model),
        )


@dataclass(frozen=True)
class OwnState:
    """What a client trains.

    Args:
        params: the shared parameters.
        personal: the parameters that stay at the client.
        buffers: the buffers.
        optimiser: state of the local optimiser.
        model: the second model; empty where the method has none.
        model_optimiser: state of the second model's optimiser.
    """

    params: Tree
    personal: Tree
    buffers: Tree
    optimiser: State
    model: Tree
    model_optimiser: State


def start_client_state(
    training: ClientTraining, message: Message, client_state: ByPart | None
) -> tuple[ByPart, Tree]:
    """Return a client's state, its first one where it has none, and the buffers it begins with."""
    buffers = message.buffers or training.network.buffers
    if client_state is None:
        client_state = {
            part.name: call(part.init_client, message.params)
            for part in training.plan.client_states
        }
        if training.keeps_own:
            kept = training.kept(training.first(message))
            client_state |= tree.substates(tree.map_tensors(torch.clone, dict(kept)))
    if training.buffers == "local":
        buffers = tree.tensors(part_state(client_state, BUFFERS))
    return client_state, buffers


def start_optimiser(
    training: ClientTraining, start: Tree, message: Message, client_state: ByPart
) -> State:
    """Return the local optimiser's state before a round's first step."""
    kept, part = dict(part_state(client_state, OPTIMISER)), training.plan.client_optimiser
    if kept:
        return kept
    initial = training.first_optimiser(start)
    if part is None:
        return initial
    state = part_state(client_state, part.name)
    return call(part.start_optimiser, initial, part_state(message.broadcast, part.name), state)
