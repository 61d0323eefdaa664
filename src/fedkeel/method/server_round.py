"""The server round: the only file that updates the global model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedkeel import tree
from fedkeel.base.clock import Lap
from fedkeel.config import Weights
from fedkeel.errors import TrainingError
from fedkeel.method import round_values
from fedkeel.method.checks import (
    call,
    check_finite_model,
    check_model_and_state,
    check_models_unchanged,
    check_same_form,
    check_span,
    check_states,
    check_tree,
    explain_errors,
)
from fedkeel.method.compose import Plan
from fedkeel.method.context import (
    ByPart,
    Floats,
    Ints,
    Message,
    Outcome,
    Population,
    RoundCohort,
    part_state,
)
from fedkeel.method.part import traits_of
from fedkeel.method.round_values import Replies, RoundResult, Server, TableRows
from fedkeel.method.server_memory import states_without_replies
from fedkeel.solve.span import Span
from fedkeel.tree import Tree


def server_message(plan: Plan, server: Server, lr: float) -> Message:
    """Return what the clients of the next round receive.

    Raises:
        TrainingError: a part raised an exception or does not return tensors; it names the part.
    """
    params, dispatch = server.params, plan.dispatch
    with explain_errors(f"The message of round {server.round + 1} cannot be made"):
        broadcast = {
            part.name: call(part.message, part_state(server.memory, part.name))
            for part in plan.broadcasts
        }
        check_states("sends to the clients", broadcast)
        if dispatch is not None:
            memory = part_state(server.memory, dispatch.name)
            params = check_tree(dispatch, call(dispatch.dispatch, params, memory, lr), params)
    return Message(params, server.buffers, broadcast, server.round, lr)


def server_round(
    plan: Plan,
    server: Server,
    message: Message,
    replies: Replies,
    population: Population,
    seed: int,
    table_rows: TableRows | None = None,
    lap: Lap = lambda _: None,
) -> RoundResult:
    """Aggregate the replies of a round.

    Replies are put in ascending client order first, and those that are not finite or weigh nothing
    are left out, so that neither their order nor their presence can change the result. A round
    without any reply changes nothing but the round number and what counts rounds, unless the
    reduction is also of absent clients, or hides the updates: it then adds its noise to nothing.

    Args:
        plan: the method.
        server: the server before the round.
        message: what the clients received.
        replies: what the clients gave back.
        population: how many clients there are.
        seed: seed of the run.
        table_rows: what tables hold of the clients; for methods with tables.
        lap: called with ``projection`` when a transform of the cohort or the aggregate ends, and
            with ``server`` when another phase ends.

    Raises:
        TrainingError: there were replies and none of them is finite; or a part raised an exception,
            returned something of another form than is asked for, or left a model with NaN or
            infinity.
    """
    finite = replies.finite
    excluded = sorted(int(client) for client in replies.clients[~finite])
    if len(replies.clients) and not finite.any():
        raise TrainingError(
            f"Training diverged in round {server.round + 1}: no client's update is finite.",
            got=f"{len(excluded)} updates with NaN or infinity",
            do="lower local.lr (or the method's own step size), clip gradients, or bring inputs "
            "that are large to a common scale",
        )
    weights = raw_weights(plan.weights, replies.examples, replies.processed)
    order = np.flatnonzero(finite & (weights > 0.0))
    order = order[np.argsort(replies.clients[order], kind="stable")]
    if len(order) == 0 and not plan.steps_without_replies:
        with explain_errors(f"The server's step in round {server.round + 1} failed"):
            memory = {**server.memory, **states_without_replies(plan, server)}
        after = replace(server, memory=memory, round=server.round + 1)
        return RoundResult(after, excluded, {}, order, {})
    replies, staleness = _select_replies(replies, order, plan.sum_only_uploads), replies.staleness
    table_rows = table_rows or TableRows({}, np.zeros(len(finite), dtype=np.bool_))
    weights = weights[order]
    cohort = RoundCohort(
        clients=replies.clients,
        weights=weights / weights.sum(),
        lr=message.lr,
        round=server.round,
        population=population,
        names=tuple(server.params),
        seed=seed,
        is_known=table_rows.is_known[order],
        staleness=np.zeros(len(order), np.int64) if staleness is None else staleness[order],
        root=replies.root,
    )
    updates = replies.updates(weights)
    rows = _select_rows(table_rows.rows, order)
    with explain_errors(f"The server's step in round {server.round + 1} failed"):
        after, rows = _aggregate(plan, server, message, replies, updates, rows, cohort, lap)
    check_finite_model(
        after.round,
        (
            *plan.cohort_transforms,
            plan.reduction,
            *plan.aggregate_transforms,
            plan.server_optimiser,
        ),
        {**after.params, **after.buffers},
    )
    after = _copy_from_replies(after, replies)
    return RoundResult(after, excluded, cohort.diagnostics, replies.clients, rows)


def _aggregate(
    plan: Plan,
    server: Server,
    message: Message,
    replies: Replies,
    updates: Span,
    rows: ByPart,
    cohort: RoundCohort,
    lap: Lap,
) -> tuple[Server, ByPart]:
    """Call the server roles in their order; return the server and the clients' new table rows."""

    def view(part: str) -> RoundCohort:
        return replace(
            cohort,
            uploads=part_state(replies.uploads, part),
            state=part_state(server.memory, part),
            rows=part_state(rows, part),
            answer=tree.substate(part_state(message.broadcast, part), "survey"),
            part=part,
        )

    lap("server")
    has_replies = len(replies.clients) > 0
    for transform in plan.cohort_transforms if has_replies else ():
        changed = call(transform.transform_cohort, updates, view(transform.name))
        updates = check_span(transform, changed, updates, traits_of(transform).merges_updates)
    lap("projection")
    reduction, reduced = plan.reduction, view(plan.reduction.name)
    if any(traits_of(part).merges_updates for part in plan.cohort_transforms):  # they count equally
        reduced = replace(reduced, weights=np.full(len(updates), 1.0 / len(updates)))
    update = call(reduction.reduce, updates, reduced)
    update = check_tree(reduction, update, server.params)
    if traits_of(reduction).hides_updates:
        updates, cohort = round_values.hidden_updates(update, cohort)
    lap("server")
    for part in plan.aggregate_transforms:
        update = call(part.transform_aggregate, update, updates, view(part.name))
        update = check_tree(part, update, server.params)
    lap("projection")
    optimiser = plan.server_optimiser
    with check_models_unchanged(optimiser, start=server.params):
        result = call(optimiser.apply, server.params, update, updates, view(optimiser.name))
    params, state = check_model_and_state(optimiser, result)
    params = check_tree(optimiser, params, server.params)
    memory, new_rows = {optimiser.name: state}, ByPart()
    if not (has_replies or traits_of(reduction).hides_updates):
        memory |= states_without_replies(plan, server)
        return Server(params, server.buffers, memory, server.round + 1), new_rows
    for keeper in plan.server_states:
        outcome = Outcome(server.params, params, updates, view(keeper.name))
        with check_models_unchanged(keeper, start=server.params, end=params):
            memory[keeper.name] = call(keeper.next_server, outcome)
    check_same_form("remembers at the server", server.memory, memory)
    for table in plan.tables:
        outcome = Outcome(server.params, params, updates, view(table.name))
        with check_models_unchanged(table, start=server.params, end=params):
            new_rows[table.name] = call(table.next_rows, outcome)
    check_same_form("remembers of clients", rows, new_rows)
    buffers = round_values.mean_buffers(replies.buffers, cohort)
    return Server(params, buffers, memory, server.round + 1), new_rows


def raw_weights(kind: Weights, examples: Ints, processed: Ints) -> Floats:
    """Return [K] weights that do not yet sum to 1.

    Args:
        kind: how clients count.
        examples: [K] number of examples each owns.
        processed: [K] number of examples each processed this round.
    """
    if kind == "uniform":
        return (examples > 0).astype(np.float64)
    return (examples if kind == "examples" else processed).astype(np.float64)


def _select_replies(replies: Replies, order: Ints, sum_only: frozenset[str]) -> Replies:
    """Return the replies `order`, without a copy where those are all of them in their order.

    Where only sums were kept, the updates and the uploads of the parts `sum_only` stay as they are.
    """
    if np.array_equal(order, np.arange(len(replies.clients))):
        return replies
    single = replies.uploads
    if replies.summed:
        single = {part: state for part, state in single.items() if part not in sum_only}
    return replace(
        replies,
        clients=replies.clients[order],
        examples=replies.examples[order],
        processed=replies.processed[order],
        finite=replies.finite[order],
        update=replies.update if replies.summed else _select_tensors(replies.update, order),
        buffers=_select_tensors(replies.buffers, order),
        uploads={**replies.uploads, **_select_rows(single, order)},
    )


def _select_tensors(rows: Tree, order: Ints) -> Tree:
    index = torch.from_numpy(order)
    return {name: tensor[index.to(tensor.device)] for name, tensor in rows.items()}


def _select_rows(states: ByPart, order: Ints) -> ByPart:
    index = torch.from_numpy(order)
    return {
        part: tree.map_tensors(lambda t: t[index.to(t.device)], state)
        for part, state in states.items()
    }


def _copy_from_replies(server: Server, replies: Replies) -> Server:
    """Return the server with copies of its tensors in the replies' memory, which is used again."""
    copy = tree.copy_if_shared(replies.update, replies.buffers, dict(replies.uploads))
    return replace(
        server,
        params={name: copy(tensor) for name, tensor in server.params.items()},
        buffers={name: copy(tensor) for name, tensor in server.buffers.items()},
        memory={part: tree.map_tensors(copy, state) for part, state in server.memory.items()},
    )
