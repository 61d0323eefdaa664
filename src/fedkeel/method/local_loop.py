"""The local loop of one client, the only file that steps a client's parameters.

A client's round is `client_start`, then `client_step` for each mini-batch, then `client_finish`.
They have no client axis, do not branch on data and do not change their arguments, so an engine may
call them for one client at a time, or under vmap for many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.method.checks import call, check_states, check_tree
from fedkeel.method.compose import Plan
from fedkeel.method.context import (
    ByPart,
    ClientInfo,
    Message,
    PartStates,
    Round,
    Step,
    part_state,
)
from fedkeel.method.local_optimiser import clipped
from fedkeel.method.local_path import nonlinear_optimiser, path_length
from fedkeel.method.local_training import (
    MODEL,
    LocalTraining,
    start_client_state,
    start_optimiser,
)
from fedkeel.method.round_values import Reply
from fedkeel.task.batch import Batch
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class ClientRound:
    """What stays the same for one client during its round.

    Args:
        training: what stays the same for all clients.
        message: what the server sent.
        client_info: about the client.
        client_state: what the parts keep for the client.
        prepared: what the preparations made, by part, one row for each distinct example.
        all_examples: returns all examples of the client.
    """

    training: LocalTraining
    message: Message
    client_info: ClientInfo
    client_state: ByPart
    prepared: ByPart
    all_examples: Callable[[], Batch]

    @property
    def start(self) -> Tree:
        """The received model."""
        return self.message.params


@dataclass(frozen=True)
class LocalState:
    """What changes from step to step.

    Args:
        params: the local model.
        buffers: its buffers.
        optimiser: state of the local optimiser.
        carry: what the parts carry to the next step, by part.
        loss: [] sum of the recorded losses.
    """

    params: Tree
    buffers: Tree
    optimiser: State
    carry: ByPart
    loss: Tensor


def client_start(
    training: LocalTraining,
    message: Message,
    client_state: ByPart | None,
    client_info: ClientInfo,
    all_examples: Callable[[], Batch],
    examples: Callable[[], Batch] | None = None,
) -> tuple[ClientRound, LocalState]:
    """Begin a client's round.

    Args:
        training: method, model and local training.
        message: what the server sent.
        client_state: what the client kept from its last round, None the first time.
        client_info: about the client.
        all_examples: returns all examples of the client; called only where a part needs them.
        examples: returns the distinct examples of the round, where those are not all; called only
            where a part prepares them.
    """
    plan = training.plan
    client_state, buffers = start_client_state(training, message, client_state)
    start = message.params
    if training.keeps_model:
        start = tree.tensors(part_state(client_state, MODEL))
    prepared: ByPart = {}
    if plan.preparations:
        batch = (examples or all_examples)()
        states = PartStates(message.broadcast, client_state)
        step = make_step(training, message, client_info, batch, buffers, states)
        for part in plan.preparations:
            prepared[part.name] = call(part.prepare, batch, step.view(part.name))
    client = ClientRound(training, message, client_info, client_state, prepared, all_examples)
    return client, LocalState(
        params=tree.clone(start) if training.network.traits.writes_parameters else start,
        buffers=tree.clone(buffers),
        optimiser=start_optimiser(training, start, message, client_state),
        carry=start_carry(plan, start, client_state),
        loss=next(iter(start.values())).new_zeros(()),
    )


def start_carry(plan: Plan, start: Tree, client_state: ByPart) -> ByPart:
    """Return what the parts carry to the first step, by part."""
    return {
        part.name: call(part.init_carry, start, part_state(client_state, part.name))
        for part in plan.carries
    }


def client_step(
    client: ClientRound,
    local: LocalState,
    batch: Batch,
    rows: Tensor | None = None,
    first_pass: Tensor | None = None,
    active: Tensor | None = None,
    noise: Tree | None = None,
    lr: float | Tensor | None = None,
) -> LocalState:
    """Make one local step.

    Args:
        client: what stays the same.
        local: what the step before left.
        batch: the examples.
        rows: [B] rows of the preparations that belong to these examples.
        first_pass: [B'] rows of the batch that had the same place in the round's first pass.
        active: [] false for a padded step, which changes nothing; None for a real one.
        noise: standard normal numbers of the model's shapes, for methods that need NOISE.
        lr: [] the learning rate, where it is not the message's, or where a step is compiled once
            for many.
    """
    training, plan, params = client.training, client.training.plan, local.params
    prepared = _prepared_rows(client, rows, first_pass)
    states = PartStates(client.message.broadcast, client.client_state, local.carry, prepared)
    step = make_step(
        training, client.message, client.client_info, batch, local.buffers, states, noise
    )
    step = replace(step, piece_size=training.local.piece_size)
    rule = plan.gradient_rule
    if rule is None:
        grads = step.grad(params)
    else:
        grads = check_tree(rule, call(rule.gradient, params, step.view(rule.name)), params)
    for part in plan.gradient_transforms:
        grads = call(part.transform_gradient, grads, params, step.view(part.name))
        grads = check_tree(part, grads, params)
    grads = clipped(grads, training.local.clip_norm)
    rate = client.message.lr if lr is None else lr
    moved, optimiser = training.optimiser.step(params, grads, local.optimiser, rate)
    for correction in plan.corrections:
        moved = call(correction.correct, moved, step.view(correction.name))
        moved = check_tree(correction, moved, params)
    carry = {
        part.name: call(part.next_carry, params, part_state(local.carry, part.name))
        for part in plan.carries
    }
    if not step.recorded_losses:
        raise ValueError("the gradient rule has to call step.grad or step.example_grads once")
    after = LocalState(moved, step.buffers, optimiser, carry, local.loss + step.recorded_losses[0])
    return after if active is None else _select(active, after, local)


def client_finish(
    client: ClientRound,
    local: LocalState,
    steps: int | Tensor,
    path_length: Tensor | None = None,
    lr: Tensor | None = None,
) -> Reply:
    """End a client's round.

    Args:
        client: what stays the same.
        local: what the last step left.
        steps: S, the number of real steps; [] where clients end side by side.
        path_length: [] length of the local path, where clients end side by side.
        lr: [] the learning rate, where the end is compiled once for many; None is the message's.
    """
    training, plan, message = client.training, client.training.plan, client.message

    def all_examples_step() -> Step:
        states = PartStates(message.broadcast, client.client_state, local.carry)
        batch = client.all_examples()
        return make_step(training, message, client.client_info, batch, local.buffers, states)

    like = next(iter(client.start.values()))
    round = Round(
        start=client.start,
        end=local.params,
        client_info=client.client_info,
        steps=torch.as_tensor(steps, dtype=like.dtype, device=like.device),
        path_length=local_path_length(training, message, int(steps))
        if path_length is None
        else path_length,
        lr=message.lr if lr is None else lr,
        make_all_examples_step=all_examples_step,
        nonlinear_part=plan.nonlinear_part or nonlinear_optimiser(training.local),
        optimiser=local.optimiser,
    )

    def view(part: str) -> Round:
        return replace(
            round,
            broadcast=part_state(message.broadcast, part),
            client_state=part_state(client.client_state, part),
            part=part,
        )

    if training.keeps_model:
        update = {name: torch.zeros_like(value) for name, value in client.start.items()}
    else:
        update = tree.sub(local.params, client.start)
    for part in plan.update_transforms:
        update = call(part.transform_update, update, view(part.name))
        update = check_tree(part, update, client.start)
    round, codec = replace(round, update=update), plan.codec
    encoded: ByPart = {}
    if codec is not None:
        encoded[codec.name] = call(codec.encode, update, view(codec.name))
        update = call(codec.decode, encoded[codec.name], client.start)
        update = check_tree(codec, update, client.start)
    client_state = {
        part.name: call(part.next_client, view(part.name)) for part in plan.client_states
    }
    client_state |= training.kept(local.buffers, local.params, local.optimiser)
    buffers = local.buffers if training.buffers == "average" else {}
    uploads: ByPart = {}
    for sender in plan.uploads:
        new_state = part_state(client_state, sender.name)
        uploads[sender.name] = call(sender.upload, replace(view(sender.name), new_state=new_state))
    uploads.update(encoded)
    check_states("sends to the server", uploads)
    return Reply(
        update=update,
        buffers=buffers,
        uploads=uploads,
        client_state=client_state,
        loss=local.loss / (steps.clamp(min=1) if isinstance(steps, Tensor) else max(steps, 1)),
        finite=all_finite(
            {
                "update": dict(local.params if training.keeps_model else update),
                "buffers": dict(buffers),
                "uploads": dict(uploads),
            }
        ),
        diagnostics=round.diagnostics,
    )


def local_path_length(training: LocalTraining, message: Message, steps: int) -> float:
    """Return the length of the local path of S steps, see `Round.path_length`.

    The effect of clipping on the pull of the penalties is not known, and is left out.
    """
    pull = training.plan.pull if training.local.clip_norm is None else 0.0
    factors = training.step_factors(message.round, steps)
    return path_length(training.optimiser, steps, message.lr, pull, factors)


def all_finite(state: State) -> Tensor:
    """Return [] whether every entry is finite, and small enough to be added up."""
    sums = [t.sum() for _, t in tree.walk(state) if t.is_floating_point()]
    return torch.isfinite(torch.stack(sums)).all()


def make_step(
    training: LocalTraining,
    message: Message,
    client_info: ClientInfo,
    batch: Batch,
    buffers: Tree,
    states: PartStates,
    noise: Tree | None = None,
) -> Step:
    """Return a step on a batch, with a copy of the buffers, which a forward pass may change."""
    return Step(
        batch=batch,
        start=message.params,
        client_info=client_info,
        network=training.network,
        buffers=training.network.copy_buffers(buffers),
        objective=training.plan.objective,
        autograd=training.autograd,
        received=message.buffers or training.network.buffers,
        declared_noise=noise,
        states=states,
    )


def _prepared_rows(client: ClientRound, rows: Tensor | None, first_pass: Tensor | None) -> ByPart:
    """Return the rows of the preparations that this step sees."""
    prepared: ByPart = {}
    for part in client.training.plan.preparations:
        index = rows if part.pairing == "example" else first_pass
        if index is None:
            raise ValueError(f"{part.name} prepares examples; the engine gave no rows")
        prepared[part.name] = tree.map_tensors(
            lambda t, index=index: t[index],  # type: ignore[misc]
            client.prepared[part.name],
        )
    return prepared


def _select(active: Tensor, after: LocalState, before: LocalState) -> LocalState:
    """Return `after` where `active` is true and `before` elsewhere."""

    def select(a: State | Tree, b: State | Tree) -> State:
        return tree.where(active, dict(a), dict(b))

    return LocalState(
        params=tree.tensors(select(after.params, before.params)),
        buffers=tree.tensors(select(after.buffers, before.buffers)),
        optimiser=select(after.optimiser, before.optimiser),
        carry={part: select(state, before.carry[part]) for part, state in after.carry.items()},
        loss=torch.where(active, after.loss, before.loss),
    )
