"""The local loop of one client, the only file that steps a client's parameters.

A client's round is `client_start`, then `client_step` for each mini-batch, then `client_finish`.
They have no client axis, do not branch on data and do not change their arguments, so an engine may
call them for one client at a time, or under vmap for many. Where a part asks for all examples
before the first step, clients begin one at a time, and it may branch on its client state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.method.checks import UndeclaredNeedError, call, check_states, check_tree
from fedkeel.method.compose import Plan
from fedkeel.method.context import (
    Arrival,
    ByPart,
    ClientInfo,
    Message,
    Objective,
    PartStates,
    PersonalParameters,
    Round,
    Step,
    part_state,
)
from fedkeel.method.local_optimiser import clipped
from fedkeel.method.local_path import path_length
from fedkeel.method.local_training import (
    LOCAL_MODEL,
    LOCAL_MODEL_OPTIMISER,
    PERSONAL,
    ClientTraining,
    OwnState,
    start_client_state,
    start_optimiser,
)
from fedkeel.method.part import Capability
from fedkeel.method.roles import LocalModel
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

    training: ClientTraining
    message: Message
    client_info: ClientInfo
    client_state: ByPart
    prepared: ByPart
    all_examples: Callable[[], Batch]

    @property
    def start(self) -> Tree:
        """The received model."""
        return self.message.params

    def personal(self, now: Tree) -> PersonalParameters:
        """Return the personal parameters of a step, where there are any."""
        start = tree.tensors(part_state(self.client_state, PERSONAL))
        return PersonalParameters(now, start) if now else PersonalParameters()


@dataclass(frozen=True)
class LocalState(OwnState):
    """What changes from step to step.

    Args:
        carry: what the parts carry to the next step, by part.
        loss: [] sum of the recorded losses.
    """

    carry: ByPart
    loss: Tensor


def client_start(
    training: ClientTraining,
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
    plan, is_first = training.plan, client_state is None
    message, chosen = _received(training, message, client_state, client_info, all_examples)
    client_state, buffers = start_client_state(training, message, client_state)
    start = message.params
    personal = tree.tensors(part_state(client_state, PERSONAL))
    prepared: ByPart = {}
    client = ClientRound(training, message, client_info, client_state, prepared, all_examples)

    def step_on(batch: Batch) -> Step:
        states = PartStates(message.broadcast, client_state)
        now = client.personal(personal)
        return make_step(training, message, client_info, batch, buffers, states, personal=now)

    noted = {**client_state, **chosen}
    if (part := plan.local_start) is not None:
        arrival = _arrival(client, part.name, lambda: step_on(all_examples()))
        start = check_tree(part, call(part.local_start, start, arrival), start)
        noted[part.name] = {**part_state(noted, part.name), **arrival.noted}
    if plan.preparations:
        batch = (examples or all_examples)()
        step = step_on(batch)
        for maker in plan.preparations:
            prepared[maker.name] = call(maker.prepare, batch, step.view(maker.name))
    local_model = plan.local_model
    model = tree.tensors(part_state(client_state, LOCAL_MODEL))
    if local_model is not None:
        model = call(local_model.begin_model, model, message.params)
    if training.network.traits.writes_parameters:
        start, personal = tree.clone(start), tree.clone(personal)
    local = LocalState(
        params=start,
        personal=personal,
        buffers=tree.clone(buffers),
        optimiser=start_optimiser(training, {**start, **personal}, message, client_state),
        model=model,
        model_optimiser=dict(part_state(client_state, LOCAL_MODEL_OPTIMISER))
        or ({} if local_model is None else training.optimiser.init(model)),
        carry=start_carry(plan, start, noted),
        loss=next(iter(training.network.params.values())).new_zeros(()),
    )
    return client, _trained_on_public(client, local, is_first)


def _trained_on_public(client: ClientRound, local: LocalState, is_first: bool) -> LocalState:
    """Return the local state after the steps on public inputs, which count in no loss."""
    part, public = client.training.plan.public_training, client.training.public_batches
    if part is None:
        return local
    by_task, by_part = call(part.public_passes, client.message.round, is_first)
    for batch, _ in by_task * public:
        step = client_step(client, local, batch, objective=Objective(), prepared={})
        local = replace(step, loss=local.loss)
    for batch, places in by_part * public:
        where: ByPart = {part.name: {"places": places}}
        objective = Objective(public=part)
        step = client_step(client, local, batch, objective=objective, prepared=where)
        local = replace(step, loss=local.loss)
    return local


def _received(
    training: ClientTraining,
    message: Message,
    client_state: ByPart | None,
    client_info: ClientInfo,
    all_examples: Callable[[], Batch],
) -> tuple[Message, ByPart]:
    """Return the message with the model that a client takes out of it, and what is noted of it."""
    if (part := training.plan.receiver) is None:
        return message, {}
    kept, buffers = start_client_state(training, message, client_state)
    client = ClientRound(training, message, client_info, kept, {}, all_examples)

    def step() -> Step:
        states, own = PartStates(message.broadcast, kept), part_state(kept, PERSONAL)
        personal = client.personal(tree.tensors(own))
        batch = all_examples()
        return make_step(training, message, client_info, batch, buffers, states, personal=personal)

    arrival = _arrival(client, part.name, step)
    params = check_tree(part, call(part.received, message.params, arrival), message.params)
    return replace(message, params=params), {part.name: {**arrival.client_state, **arrival.noted}}


def _arrival(client: ClientRound, part: str, all_examples_step: Callable[[], Step]) -> Arrival:
    """Return what a part sees of a client before its first step."""
    return Arrival(
        client_info=client.client_info,
        make_all_examples_step=lambda: all_examples_step().view(part),
        broadcast=part_state(client.message.broadcast, part),
        client_state=part_state(client.client_state, part),
        local=client.training.local,
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
    phase: int | Tensor | None = None,
    objective: Objective | None = None,
    prepared: ByPart | None = None,
) -> LocalState:
    """Make one local step.

    Args:
        client: what stays the same.
        local: what the step before left.
        batch: the examples.
        rows: [B] rows of the preparations that belong to these examples.
        first_pass: [B'] rows of the batch that had the same place in the round's first pass.
        active: [] false for a padded step, which changes nothing; None for a real one.
        phase: index of the phase, [] where clients step side by side; None without phases.
        noise: standard normal numbers of the model's shapes, for methods that need NOISE.
        lr: [] the learning rate, where it is not the message's, or where a step is compiled once
            for many.
        objective: what is minimised, where that is not the method's.
        prepared: what the parts see as their preparations then.
    """
    training, plan, params = client.training, client.training.plan, local.params
    if prepared is None:
        prepared = _prepared_rows(client, rows, first_pass)
    states = PartStates(client.message.broadcast, client.client_state, local.carry, prepared)
    step = make_step(
        training,
        client.message,
        client.client_info,
        batch,
        local.buffers,
        states,
        noise,
        client.personal(local.personal),
    )
    step = replace(step, piece_size=training.local.piece_size)
    step = replace(step, objective=objective) if objective else step
    rate = client.message.lr if lr is None else lr
    model, model_optimiser = local.model, local.model_optimiser
    if plan.local_model is not None:
        model, model_optimiser = _local_model_step(client, plan.local_model, local, step, rate)
        step = replace(step, local_model=model)
    rule = plan.gradient_rule
    if rule is None:
        grads = step.grad(params)
    else:
        grads = check_tree(rule, call(rule.gradient, params, step.view(rule.name)), params)
    for part in plan.gradient_transforms:
        grads = call(part.transform_gradient, grads, params, step.view(part.name))
        grads = check_tree(part, grads, params)
    before = params
    if local.personal:
        if not step.personal.recorded:
            raise ValueError(_NO_GRADIENT)
        before, grads = {**params, **local.personal}, {**grads, **step.personal.recorded[0]}
    grads = clipped(grads, training.local.clip_norm)
    moved, optimiser = training.optimiser.step(before, grads, local.optimiser, rate)
    if phase is not None:
        moved, optimiser = _trained(training, phase, (moved, optimiser), (before, local.optimiser))
    personal = {name: moved.pop(name) for name in local.personal}
    for correction in plan.corrections:
        moved = call(correction.correct, moved, step.view(correction.name))
        moved = check_tree(correction, moved, params)
    carry = {
        part.name: call(part.next_carry, params, states.carried(part.name)) for part in plan.carries
    }
    if not step.recorded_losses:
        raise ValueError(_NO_GRADIENT)
    loss = local.loss + step.recorded_losses[0]
    after = LocalState(
        moved, personal, step.buffers, optimiser, model, model_optimiser, carry, loss
    )
    return after if active is None else _select(active, after, local)


_NO_GRADIENT = "the gradient rule has to call step.grad or step.example_grads once"


def _local_model_step(
    client: ClientRound, part: LocalModel, local: LocalState, step: Step, rate: float | Tensor
) -> tuple[Tree, State]:
    """Return the second model and its optimiser's state after a step."""
    training = client.training
    states = [local.model_optimiser]

    def descend(grads: Tree) -> Tree:
        grads = clipped(grads, training.local.clip_norm)
        moved, state = training.optimiser.step(local.model, grads, states[-1], rate)
        states.append(state)
        return moved

    view = step.view(part.name)
    model = call(part.next_model, local.model, local.params, view, descend)
    return check_tree(part, model, local.model), states[-1]


def _trained(
    training: ClientTraining,
    phase: int | Tensor,
    after: tuple[Tree, State],
    before: tuple[Tree, State],
) -> tuple[Tree, State]:
    """Return parameters and optimiser after a step in which a phase's parameters were trained."""
    phases = training.phases

    def select(name: str, new: Tensor, old: Tensor) -> Tensor:
        of_name = [number for number, names in enumerate(phases) if name in names]
        if len(of_name) in (0, len(phases)):
            return new if of_name else old
        if isinstance(phase, int):
            return new if phase in of_name else old
        is_trained = torch.stack([phase == number for number in of_name]).any()
        return torch.where(is_trained, new, old)

    (params, state), (old_params, old_state) = after, before
    params = {name: select(name, value, old_params[name]) for name, value in params.items()}
    selected: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor):  # a number of steps
            selected[key] = value
            continue
        new, old = tree.leaves(state, key), tree.leaves(old_state, key)
        selected[key] = {name: select(name, t, old[name]) for name, t in new.items()}
    return params, selected


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
        path_length: [] length of the local path, where clients end side by side, or have no steps.
        lr: [] the learning rate, where the end is compiled once for many; None is the message's.
    """
    training, plan, message = client.training, client.training.plan, client.message

    def step_on(batch: Batch | None) -> Step:
        states = PartStates(message.broadcast, client.client_state, local.carry)
        if batch is None:
            raise UndeclaredNeedError("public_step", Capability.PUBLIC_INPUTS)
        personal = client.personal(local.personal)
        return make_step(
            training, message, client.client_info, batch, local.buffers, states, personal=personal
        )

    like = next(iter(training.network.params.values()))
    round = Round(
        start=client.start,
        end=local.params,
        client_info=client.client_info,
        steps=torch.as_tensor(steps, dtype=like.dtype, device=like.device),
        path_length=local_path_length(training, message, int(steps))
        if path_length is None
        else path_length,
        lr=message.lr if lr is None else lr,
        loss=local.loss / (steps.clamp(min=1) if isinstance(steps, Tensor) else max(steps, 1)),
        make_all_examples_step=lambda: step_on(client.all_examples()),
        make_public_step=lambda: step_on(training.public),
        nonlinear_part=training.nonlinear_part,
        optimiser=local.optimiser,
    )

    def view(part: str) -> Round:
        return replace(
            round,
            broadcast=part_state(message.broadcast, part),
            client_state=part_state(client.client_state, part),
            carry=part_state(local.carry, part),
            part=part,
        )

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
    kept = training.kept(local)
    client_state |= kept
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
        loss=round.loss,
        finite=all_finite(
            {
                "update": dict(update),
                "buffers": dict(buffers),
                "uploads": dict(uploads),
                "kept": {k: v for k, v in kept.items() if k in (PERSONAL, LOCAL_MODEL)},
            }
        ),
        diagnostics=round.diagnostics,
    )


def local_path_length(training: ClientTraining, message: Message, steps: int) -> float:
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
    training: ClientTraining,
    message: Message,
    client_info: ClientInfo,
    batch: Batch,
    buffers: Tree,
    states: PartStates,
    noise: Tree | None = None,
    personal: PersonalParameters | None = None,
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
        personal=personal or PersonalParameters(),
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
        personal=tree.tensors(select(after.personal, before.personal)),
        buffers=tree.tensors(select(after.buffers, before.buffers)),
        optimiser=select(after.optimiser, before.optimiser),
        model=tree.tensors(select(after.model, before.model)),
        model_optimiser=select(after.model_optimiser, before.model_optimiser),
        carry={part: select(state, before.carry[part]) for part, state in after.carry.items()},
        loss=torch.where(active, after.loss, before.loss),
    )
