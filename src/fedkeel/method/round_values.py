"""The values of a round: a client's reply, all replies, the server and the round's result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.method.compose import Plan
from fedkeel.method.context import Bools, ByPart, Floats, Ints, RoundCohort
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import State, Tree, map_tensors


@dataclass(frozen=True)
class Reply:
    """What a client gives back. All but `client_state` and `diagnostics` is sent to the server.

    Args:
        update: end - start, as the update transforms left it. Where there is a codec, it is what
            the server decodes from the codec's upload, and is not sent itself.
        buffers: the buffers after training, where they are averaged.
        uploads: further messages, by part.
        client_state: what the parts keep for the client's next round, by part.
        loss: [] mean recorded loss of the steps.
        finite: [] whether everything that is sent is finite.
        diagnostics: 0-d tensors by ``part.name``.
    """

    update: Tree
    buffers: Tree
    uploads: ByPart
    client_state: ByPart
    loss: Tensor
    finite: Tensor
    diagnostics: dict[str, Tensor]


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

    def on(self, device: torch.device) -> Server:
        """Return it with parameters and memory on a device.

        Buffers stay where they are, beside those that clients send: they are small.
        """

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        params = {name: move(tensor) for name, tensor in self.params.items()}
        memory = {part: map_tensors(move, state) for part, state in self.memory.items()}
        return replace(self, params=params, memory=memory)


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
            `Plan.sum_only_uploads` G sums.
        summed: whether only sums of updates were kept, of the clients that are finite and count.
        staleness: [K] steps of the server since each was sent the model; None where there is none.
        noisy: whether clients have added the noise of the reduction to these sums.
        root: the server's own update, of its own examples; for methods that need ROOT_EXAMPLES.
    """

    clients: Ints
    examples: Ints
    processed: Ints
    finite: Bools
    update: Tree
    buffers: Tree
    uploads: ByPart
    summed: bool = False
    staleness: Ints | None = None
    noisy: bool = False
    root: Tree = field(default_factory=dict)

    def updates(self, weights: Floats) -> Span:
        """Return the updates of clients with weights [K], or the sums that were kept of them."""
        if self.summed:
            return Sums(self.update, weights=weights, noisy=self.noisy)
        return Span(self.update)


@dataclass(frozen=True)
class TableRows:
    """What the server's tables hold of the clients of a round.

    Args:
        rows: by part, tensors [K, ...], in the order of the replies.
        is_known: [K] whether each client has taken part before.
    """

    rows: ByPart
    is_known: Bools


@dataclass(frozen=True)
class RoundResult:
    """What a server round returns.

    Args:
        server: the server after the round.
        excluded: clients whose update was not finite, and was left out.
        diagnostics: numbers by ``part.name``.
        clients: [K] clients that counted, ascending.
        rows: the new table rows of these clients, by part, tensors [K, ...].
    """

    server: Server
    excluded: list[int]
    diagnostics: dict[str, float]
    clients: Ints
    rows: ByPart


def reply_state(reply: Reply) -> State:
    """Return what a client sends, keeps and logs, as one state."""
    return {
        "update": dict(reply.update),
        "buffers": dict(reply.buffers),
        "uploads": dict(reply.uploads),
        "client_state": dict(reply.client_state),
        "diagnostics": dict(reply.diagnostics),
    }


def uploaded_state(plan: Plan, reply: Reply) -> State:
    """Return what a reply sends: the update, or a codec's upload in its place, and the rest."""
    rest: State = {"buffers": dict(reply.buffers), "uploads": dict(reply.uploads)}
    return rest if plan.codec is not None else {"update": dict(reply.update), **rest}


def hidden_updates(update: Tree, cohort: RoundCohort) -> tuple[Span, RoundCohort]:
    """Return updates and cohort as they are if each of K expected clients sent the aggregate."""
    count = cohort.population.per_round
    clients, weights = np.full(count, -1), np.ones(count)
    updates = Sums({name: count * t[None] for name, t in update.items()}, weights=weights)
    return updates, replace(cohort, clients=clients, weights=weights / count)


def mean_buffers(buffers: Tree, cohort: RoundCohort) -> Tree:
    """Return the weighted mean of floating-point buffers, and the largest value of counters."""
    means: Tree = {}
    weights = torch.from_numpy(cohort.weights)
    for name, rows in buffers.items():
        if rows.is_floating_point():
            shaped = weights.to(rows.device, rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
            means[name] = (shaped * rows).sum(dim=0)
        else:
            means[name] = rows.amax(dim=0)
    return means
