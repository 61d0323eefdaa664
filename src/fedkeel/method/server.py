"""The server round: the only file that updates the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.errors import TrainingError
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, Cohort, Floats, Ints, Message, Outcome, Population, of
from fedkeel.solve.span import Span
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree

Bools = NDArray[np.bool_]


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
        delta: updates, tensors [K, ...].
        buffers: buffers, tensors [K, ...], where they are averaged.
        uploads: further messages by part, tensors [K, ...].
    """

    clients: Ints
    examples: Ints
    processed: Ints
    finite: Bools
    delta: Tree
    buffers: Tree
    uploads: ByPart


@dataclass(frozen=True)
class Aggregated:
    """What a server round did.

    Args:
        server: the server after the round.
        excluded: clients whose update was not finite, and was left out.
        notes: diagnostics by ``part.name``.
    """

    server: Server
    excluded: list[int]
    notes: dict[str, float]


def server_start(plan: Plan, network: Network, population: Population, average: bool) -> Server:
    """Return the server before the first round.

    Args:
        plan: the method.
        network: the model, with its initial parameters.
        population: how many clients there are.
        average: whether buffers are averaged.
    """
    params = tree.clone(network.params)
    memory: ByPart = {p.name: p.init_server(params, population) for p in plan.server_states}
    optimiser = plan.server_optimiser
    memory[optimiser.name] = optimiser.init_optimiser(params, population)
    return Server(params, tree.clone(network.buffers) if average else {}, memory)


def owned(server: Server) -> Server:
    """Return a server whose memory is its own: parts may change what they remember in place."""
    memory = {name: tree.map_tensors(torch.clone, kept) for name, kept in server.memory.items()}
    return replace(server, memory=memory)


def server_message(plan: Plan, server: Server, lr: float) -> Message:
    """Return what the clients of the next round receive."""
    sent = {part.name: part.message(of(server.memory, part.name)) for part in plan.broadcasts}
    return Message(server.params, server.buffers, sent, server.round, lr)


def server_round(
    plan: Plan, server: Server, replies: Replies, lr: float, population: Population, seed: int
) -> Aggregated:
    """Aggregate the replies of a round.

    Replies are put in ascending client order first, and those that are not finite or weigh nothing
    are left out, so that neither their order nor their presence can change the result. A round
    without any reply changes nothing but the round number.

    Args:
        plan: the method.
        server: the server before the round.
        replies: what the clients gave back.
        lr: local learning rate of the round.
        population: how many clients there are.
        seed: seed of the run.

    Raises:
        TrainingError: there were replies and none of them is finite.
    """
    finite = replies.finite
    excluded = sorted(int(c) for c in replies.clients[~finite])
    if len(replies.clients) and not finite.any():
        raise TrainingError(
            f"Training diverged in round {server.round + 1}: no client's update is finite.",
            got=f"{len(excluded)} updates with NaN or infinity",
            do="lower local.lr (or the method's own step size), or clip gradients",
        )
    raw = _raw_weights(plan.weights, replies)
    keep = np.flatnonzero(finite & (raw > 0.0))
    keep = keep[np.argsort(replies.clients[keep], kind="stable")]
    if len(keep) == 0:
        return Aggregated(replace(server, round=server.round + 1), excluded, {})
    replies = _take(replies, keep)
    notes: dict[str, float] = {}
    cohort = Cohort(
        clients=replies.clients,
        weights=raw[keep] / raw[keep].sum(),
        lr=lr,
        round=server.round,
        population=population,
        names=tuple(server.params),
        seed=seed,
        notes=notes,
    )
    return Aggregated(_aggregate(plan, server, replies, cohort), excluded, notes)


def _aggregate(plan: Plan, server: Server, replies: Replies, cohort: Cohort) -> Server:
    """Run the server roles in their order."""

    def view(part: str) -> Cohort:
        return replace(
            cohort, uploads=of(replies.uploads, part), state=of(server.memory, part), part=part
        )

    updates = Span(replies.delta)
    for transform in plan.cohort_transforms:
        updates = transform.transform_cohort(updates, view(transform.name))
    delta = plan.reduction.reduce(updates, view(plan.reduction.name))
    for part in plan.aggregate_transforms:
        delta = part.transform_aggregate(delta, updates, view(part.name))
    optimiser = plan.server_optimiser
    params, state = optimiser.apply(server.params, delta, updates, view(optimiser.name))
    memory: ByPart = {optimiser.name: state}
    for keeper in plan.server_states:
        outcome = Outcome(server.params, params, updates, view(keeper.name))
        memory[keeper.name] = keeper.next_server(outcome)
    return Server(params, _mean_buffers(replies.buffers, cohort), memory, server.round + 1)


def _raw_weights(kind: Weights, replies: Replies) -> Floats:
    """Return [K] weights that do not yet sum to 1."""
    if kind == "uniform":
        return (replies.examples > 0).astype(np.float64)
    return (replies.examples if kind == "examples" else replies.processed).astype(np.float64)


def _take(replies: Replies, keep: Ints) -> Replies:
    """Return the replies `keep`, in that order, without a copy where that is all of them."""
    if np.array_equal(keep, np.arange(len(replies.clients))):
        return replies
    index = torch.from_numpy(keep)

    def pick(state: State) -> State:
        return tree.map_tensors(lambda t: t[index.to(t.device)], state)

    return Replies(
        clients=replies.clients[keep],
        examples=replies.examples[keep],
        processed=replies.processed[keep],
        finite=replies.finite[keep],
        delta={k: v[index.to(v.device)] for k, v in replies.delta.items()},
        buffers={k: v[index.to(v.device)] for k, v in replies.buffers.items()},
        uploads={k: pick(v) for k, v in replies.uploads.items()},
    )


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
