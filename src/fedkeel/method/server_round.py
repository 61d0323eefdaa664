"""The server round: the only file that updates the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedkeel import tree
from fedkeel.clock import Lap
from fedkeel.config import Weights
from fedkeel.errors import CompositionError, TrainingError
from fedkeel.method import checks
from fedkeel.method.compose import Plan
from fedkeel.method.context import (
    Bools,
    ByPart,
    Cohort,
    Floats,
    Ints,
    Message,
    Outcome,
    Population,
    part_state,
)
from fedkeel.solve.span import Span, Sums
from fedkeel.task.network import Network
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Server:
    """What the server knows between rounds.

    Args:
        params: the global model.
        buffers: its buffers, where they are averaged.
        memory: what the parts remember, by part.
        round: rounds completed.
    """

    params: Tree
    buffers: Tree
    memory: ByPart
    round: int = 0


@dataclass(frozen=True)
class Replies:
    """What the K clients of a round gave back, on a leading axis.

    Args:
        clients: [K] client indices, in any order.
        examples: [K] number of examples each owns.
        processed: [K] number of examples each processed this round.
        finite: [K] whether everything each sent is finite.
        update: updates, tensors [K, ...]; where `summed`, G sums of them with their clients'
            weights, [G, ...].
        buffers: buffers, tensors [K, ...], where they are averaged.
        uploads: further messages by part, tensors [K, ...]; where `summed`, of the parts that are
            `Plan.summed` G sums.
        summed: whether only sums of updates were kept, of the clients that are finite and count.
    """

    clients: Ints
    examples: Ints
    processed: Ints
    finite: Bools
    update: Tree
    buffers: Tree
    uploads: ByPart
    summed: bool = False


@dataclass(frozen=True)
class RoundResult:
    """What a server round did.

    Args:
        server: the server after the round.
        excluded: clients whose update was not finite, and was left out.
        diagnostics: diagnostics by ``part.name``.
        clients: [K] clients that counted, ascending.
        rows: what is remembered of each of them from now on, by part, tensors [K, ...].
    """

    server: Server
    excluded: list[int]
    diagnostics: dict[str, float]
    clients: Ints
    rows: ByPart


@dataclass(frozen=True)
class TableRows:
    """What the server remembers of the clients of a round.

    Args:
        rows: by part, tensors [K, ...], in the order of the replies.
        is_known: [K] whether it has remembered something of each before.
    """

    rows: ByPart
    is_known: Bools


def server_start(plan: Plan, network: Network, population: Population, average: bool) -> Server:
    """Return the server before the first round.

    Args:
        plan: the method.
        network: the model, with its initial parameters.
        population: how many clients there are.
        average: whether buffers are averaged.
    """
    params = tree.clone(network.params)
    memory = initial_memory(plan, params, population)
    return Server(params, tree.clone(network.buffers) if average else {}, memory)


def initial_memory(plan: Plan, params: Tree, population: Population) -> ByPart:
    """Return what the parts at the server remember before the first round."""
    optimiser = plan.server_optimiser
    with checks.explain_errors("The server's memory cannot be begun"):
        memory: ByPart = {p.name: p.init_server(params, population) for p in plan.server_states}
        memory[optimiser.name] = optimiser.init_optimiser(params, population)
    checks.check_states("remembers at the server", memory)
    return memory


def reset_client_sums(plan: Plan, server: Server, population: Population) -> Server:
    """Return the server with the memory of mirrored parts as before the first round.

    For when a client has lost what it kept: what is left of it in a sum cannot be taken out.
    """
    fresh = initial_memory(plan, server.params, population)
    mirrored = {name: state for name, state in fresh.items() if name in plan.client_sum_parts}
    return replace(server, memory={**server.memory, **mirrored})


def copy_memory(server: Server) -> Server:
    """Return a server whose memory is its own: parts may change what they remember in place."""
    memory = {name: tree.map_tensors(torch.clone, kept) for name, kept in server.memory.items()}
    return replace(server, memory=memory)


def server_message(plan: Plan, server: Server, lr: float) -> Message:
    """Return what the clients of the next round receive.

    Raises:
        TrainingError: names the part that raised something, or that sends something of no use.
    """
    params, dispatch = server.params, plan.dispatch
    with checks.explain_errors(f"The message of round {server.round + 1} cannot be made"):
        sent = {
            part.name: part.message(part_state(server.memory, part.name))
            for part in plan.broadcasts
        }
        checks.check_states("sends to the clients", sent)
        if dispatch is not None:
            found = dispatch.dispatch(params, part_state(server.memory, dispatch.name), lr)
            params = checks.check_tree(dispatch, found, params)
    return Message(params, server.buffers, sent, server.round, lr)


def add_mean_answers(message: Message, answers: ByPart, weights: Floats) -> Message:
    """Return the message with the weighted mean of the clients' answers in it.

    Args:
        message: what the clients have received.
        answers: by part, tensors [K, ...].
        weights: [K] how the clients count, in the same order; they need not sum to 1.

    Raises:
        CompositionError: an answer is not made of floating-point tensors.
        TrainingError: no client gave a finite answer.
    """
    flat = dict(tree.walk(dict(answers)))
    wrong = [path for path, t in flat.items() if not t.is_floating_point()]
    if wrong or not flat:
        raise CompositionError(
            "The answers to a survey have no mean.",
            got=f"{wrong[0]}: {flat[wrong[0]].dtype}" if wrong else "nothing",
            expected="floating-point tensors",
        )
    finite = [t.reshape(len(t), -1).isfinite().all(dim=1) for t in flat.values()]
    kept = np.where(torch.stack(finite).all(dim=0).cpu().numpy(), weights, 0.0)
    if not kept.any():
        raise TrainingError(
            f"Training diverged in round {message.round + 1}: no client's answer is finite.",
            do="lower local.lr (or the method's own step size), or clip gradients",
        )
    rows = np.flatnonzero(kept)
    index, shares = torch.from_numpy(rows), torch.from_numpy(kept[rows] / kept.sum())

    def mean(t: torch.Tensor) -> torch.Tensor:
        weighted: torch.Tensor = shares.to(t.device, t.dtype)
        return torch.einsum("k,k...->...", weighted, t[index.to(t.device)])

    return with_answers(message, {k: tree.map_tensors(mean, v) for k, v in answers.items()})


def with_answers(message: Message, answers: ByPart) -> Message:
    """Return the message with answers, by part, among what is sent."""
    told = {k: {**part_state(message.broadcast, k), "survey": v} for k, v in answers.items()}
    return replace(message, broadcast={**message.broadcast, **told})


def initial_table_row(plan: Plan, params: Tree) -> ByPart:
    """Return what is remembered of a client of which nothing is known yet."""
    with checks.explain_errors("What is remembered of a client cannot be begun"):
        rows = {part.name: part.init_row(params) for part in plan.tables}
    checks.check_states("remembers of a client", rows)
    return rows


def server_round(
    plan: Plan,
    server: Server,
    message: Message,
    replies: Replies,
    population: Population,
    seed: int,
    remembered: TableRows | None = None,
    lap: Lap = lambda _: None,
) -> RoundResult:
    """Aggregate the replies of a round.

    Replies are put in ascending client order first, and those that are not finite or weigh nothing
    are left out, so that neither their order nor their presence can change the result. A round
    without any reply changes nothing but the round number.

    Args:
        plan: the method.
        server: the server before the round.
        message: what the clients received.
        replies: what the clients gave back.
        population: how many clients there are.
        seed: seed of the run.
        remembered: what is remembered of the clients; for methods with tables.
        lap: hears of ``projection``, when a transform of the cohort or the aggregate ends, and of
            ``server``, when something else does.

    Raises:
        TrainingError: there were replies and none of them is finite; or a part raised something,
            returned something of another form than is asked for, or left a model with NaN or
            infinity.
    """
    finite = replies.finite
    excluded = sorted(int(c) for c in replies.clients[~finite])
    if len(replies.clients) and not finite.any():
        raise TrainingError(
            f"Training diverged in round {server.round + 1}: no client's update is finite.",
            got=f"{len(excluded)} updates with NaN or infinity",
            do="lower local.lr (or the method's own step size), clip gradients, or bring inputs "
            "that are large to a common scale",
        )
    raw = raw_weights(plan.weights, replies.examples, replies.processed)
    keep = np.flatnonzero(finite & (raw > 0.0))
    keep = keep[np.argsort(replies.clients[keep], kind="stable")]
    if len(keep) == 0:
        nobody = np.zeros(0, dtype=np.int64)
        return RoundResult(replace(server, round=server.round + 1), excluded, {}, nobody, {})
    replies = _take(replies, keep, plan.sum_only_uploads if replies.summed else frozenset())
    remembered = remembered or TableRows({}, np.zeros(len(finite), dtype=np.bool_))
    rows = _pick(remembered.rows, keep)
    diagnostics: dict[str, float] = {}
    cohort = Cohort(
        clients=replies.clients,
        weights=raw[keep] / raw[keep].sum(),
        lr=message.lr,
        round=server.round,
        population=population,
        names=tuple(server.params),
        seed=seed,
        is_known=remembered.is_known[keep],
        diagnostics=diagnostics,
    )
    updates = Sums(replies.update, weights=raw[keep]) if replies.summed else Span(replies.update)
    with checks.explain_errors(f"The server's step in round {server.round + 1} failed"):
        after, rows = _aggregate(plan, server, message, (replies, updates), rows, cohort, lap)
    makers = (*plan.cohort_transforms, plan.reduction, *plan.aggregate_transforms)
    checks.check_finite_model(
        after.round, (*makers, plan.server_optimiser), {**after.params, **after.buffers}
    )
    return RoundResult(_apart(after, replies), excluded, diagnostics, replies.clients, rows)


def _apart(server: Server, replies: Replies) -> Server:
    """Return the server with copies of what lies in the replies: the next are written there."""
    own = tree.copy_if_shared(replies.update, replies.buffers, dict(replies.uploads))
    params, buffers = ({k: own(t) for k, t in s.items()} for s in (server.params, server.buffers))
    memory = {name: tree.map_tensors(own, kept) for name, kept in server.memory.items()}
    return Server(params, buffers, memory, server.round)


def _aggregate(
    plan: Plan,
    server: Server,
    message: Message,
    received: tuple[Replies, Span],
    rows: ByPart,
    cohort: Cohort,
    lap: Lap,
) -> tuple[Server, ByPart]:
    """Run the server roles in their order; return the server, and what it remembers of clients."""
    replies, updates = received

    def view(part: str) -> Cohort:
        return replace(
            cohort,
            uploads=part_state(replies.uploads, part),
            state=part_state(server.memory, part),
            rows=part_state(rows, part),
            answer=tree.substate(part_state(message.broadcast, part), "survey"),
            part=part,
        )

    lap("server")
    for transform in plan.cohort_transforms:
        updates = checks.check_span(
            transform, transform.transform_cohort(updates, view(transform.name)), updates
        )
    lap("projection")
    reduction = plan.reduction
    update = checks.check_tree(
        reduction, reduction.reduce(updates, view(reduction.name)), server.params
    )
    lap("server")
    for part in plan.aggregate_transforms:
        update = part.transform_aggregate(update, updates, view(part.name))
        update = checks.check_tree(part, update, server.params)
    lap("projection")
    optimiser = plan.server_optimiser
    with checks.check_models_unchanged(optimiser, start=server.params):
        applied = optimiser.apply(server.params, update, updates, view(optimiser.name))
    params, state = checks.check_model_and_state(optimiser, applied)
    params = checks.check_tree(optimiser, params, server.params)
    memory, known = {optimiser.name: state}, ByPart()
    for keeper in plan.server_states:
        outcome = Outcome(server.params, params, updates, view(keeper.name))
        with checks.check_models_unchanged(keeper, start=server.params, end=params):
            memory[keeper.name] = keeper.next_server(outcome)
    checks.check_same_form("remembers at the server", server.memory, memory)
    for table in plan.tables:
        outcome = Outcome(server.params, params, updates, view(table.name))
        with checks.check_models_unchanged(table, start=server.params, end=params):
            known[table.name] = table.next_rows(outcome)
    checks.check_same_form("remembers of clients", rows, known)
    buffers = _mean_buffers(replies.buffers, cohort)
    return Server(params, buffers, memory, server.round + 1), known


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


def _take(replies: Replies, keep: Ints, summed: frozenset[str]) -> Replies:
    """Return the replies `keep`, in that order, without a copy where that is all of them.

    The messages of the parts `summed` are sums, and stay as they are.
    """
    if np.array_equal(keep, np.arange(len(replies.clients))):
        return replies
    index = torch.from_numpy(keep)
    single = {part: sent for part, sent in replies.uploads.items() if part not in summed}

    def taken(rows: Tree) -> Tree:
        return {k: v[index.to(v.device)] for k, v in rows.items()}

    return Replies(
        clients=replies.clients[keep],
        examples=replies.examples[keep],
        processed=replies.processed[keep],
        finite=replies.finite[keep],
        update=replies.update if replies.summed else taken(replies.update),
        buffers=taken(replies.buffers),
        uploads={**replies.uploads, **_pick(single, keep)},
        summed=replies.summed,
    )


def _pick(states: ByPart, keep: Ints) -> ByPart:
    """Return the rows `keep` of stacked states."""
    index = torch.from_numpy(keep)
    return {k: tree.map_tensors(lambda t: t[index.to(t.device)], v) for k, v in states.items()}


def _mean_buffers(buffers: Tree, cohort: Cohort) -> Tree:
    """Return the weighted mean of floating buffers, and of counters the largest."""
    out: Tree = {}
    weights = torch.from_numpy(cohort.weights)
    for name, rows in buffers.items():
        if rows.is_floating_point():
            shaped = weights.to(rows.device, rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
            out[name] = (shaped * rows).sum(dim=0)
        else:
            out[name] = rows.amax(dim=0)
    return out
