"""What stays the same in local training, and what a client goes on from in its next round."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedkeel import tree
from fedkeel.config import Buffers, Local
from fedkeel.method.checks import call
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, Message, part_state
from fedkeel.method.local_optimiser import OPTIMISERS, LocalOptimiser
from fedkeel.task.network import Autograd, Network
from fedkeel.tree import State, Tree

BUFFERS, MODEL, OPTIMISER = "buffers", "model", "optimiser"
"""Names in a client's state of the buffers, the model and the local optimiser, where a client goes
on from its own."""


@dataclass(frozen=True)
class LocalTraining:
    """What stays the same for all clients and rounds.

    Args:
        plan: the method.
        network: the model and its loss.
        local: local training, as the method means it (`Plan.work`).
        buffers: what happens to the model's buffers.
        autograd: how gradients are taken.
        rounds: T, of the run.
        keeps_model: whether each client goes on from its own model; its update is then 0.
    """

    plan: Plan
    network: Network
    local: Local
    buffers: Buffers = "refuse"
    autograd: Autograd = "eager"
    rounds: int = 1
    keeps_model: bool = False

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
    def keeps_optimiser(self) -> bool:
        """Whether a client goes on from its own state of the optimiser that the settings name."""
        return self.local.keep_state and self.plan.client_optimiser is None

    @property
    def keeps_own(self) -> bool:
        """Whether a client goes on from its own buffers, model or optimiser."""
        return self.buffers == "local" or self.keeps_model or self.keeps_optimiser

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from round to round."""
        return bool(self.plan.client_states) or self.keeps_own

    def kept(self, buffers: Tree, params: Tree, optimiser: State) -> ByPart:
        """Return what a client keeps beside the states of the parts."""
        kept: ByPart = {}
        if self.buffers == "local":
            kept[BUFFERS] = dict(buffers)
        if self.keeps_model:
            kept[MODEL] = dict(params)
        if self.keeps_optimiser and optimiser:
            kept[OPTIMISER] = dict(optimiser)
        return kept


def start_client_state(
    training: LocalTraining, message: Message, client_state: ByPart | None
) -> tuple[ByPart, Tree]:
    """Return a client's state, its first one where it has none, and the buffers it begins with."""
    buffers = message.buffers or training.network.buffers
    if client_state is None:
        client_state = {
            part.name: call(part.init_client, message.params)
            for part in training.plan.client_states
        }
        if training.keeps_own:
            optimiser = training.optimiser.init(message.params)
            own = training.kept(buffers, message.params, optimiser)
            client_state |= tree.substates(tree.map_tensors(torch.clone, dict(own)))
    if training.buffers == "local":
        buffers = tree.tensors(part_state(client_state, BUFFERS))
    return client_state, buffers


def start_optimiser(
    training: LocalTraining, start: Tree, message: Message, client_state: ByPart
) -> State:
    """Return the local optimiser's state before a round's first step."""
    kept, part = dict(part_state(client_state, OPTIMISER)), training.plan.client_optimiser
    if kept:
        return kept
    initial = training.optimiser.init(start)
    if part is None:
        return initial
    own = part_state(client_state, part.name)
    return call(part.start_optimiser, initial, part_state(message.broadcast, part.name), own)
