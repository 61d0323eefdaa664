"""The server's half of a method as a Flower strategy, for apps with their own local training."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedkeel.base.rng import generator
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import CompositionError, ConfigError, RunError, TrainingError, printable
from fedkeel.flower.server.outliers import Outliers, message_sizes, norms, without
from fedkeel.flower.wire import WireError, pack, unpack
from fedkeel.method import context
from fedkeel.method.compose import Plan, roles_of
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import all_finite
from fedkeel.method.roles import (
    ROLES,
    AggregateTransform,
    CohortTransform,
    Dispatch,
    Reduction,
    ServerOptimiser,
    ServerState,
    Table,
)
from fedkeel.method.round_values import Replies, Server
from fedkeel.method.server_memory import copy_memory
from fedkeel.method.server_round import server_message
from fedkeel.method.server_round import server_round as run_server_round
from fedkeel.runner.server_table import ServerTable
from fedkeel.tree import Tree, clone, walk

LOG = logging.getLogger("flwr")
"""Flower's own log, which the user who submits the app sees."""

SERVER_ROLES = (
    Dispatch,
    Table,
    CohortTransform,
    Reduction,
    AggregateTransform,
    ServerOptimiser,
    ServerState,
)
"""Roles that need nothing of the clients but their models."""


@dataclass(frozen=True)
class _NodeReply:
    """A usable reply: its node, its content, the node's model and its number of examples."""

    node: int
    content: RecordDict
    model: Tree
    examples: int


class Method(FedAvg):
    """Aggregates with a method of fedkeel, in place of a Flower strategy, with the same messages.

    Clients send the model they trained and ``num-examples``, as they do for `FedAvg`. So the method
    may only have parts that act at the server: `fedgh`, `fedadam`, `momentum`, `median`,
    `globalgc`, `fedvarp`, ... A method that changes local training needs `fedkeel.flower.apps`.

    The model's parameters are the floating-point arrays, except the running statistics of batch
    normalisation (``running_mean``, ``running_var``): these are averaged with the clients' weights.
    Of other arrays, such as counters, the largest value is taken. A reply that is not finite, has
    another shape, or is an outlier is left out, together with its metrics. A
    warning says so, and the attribute ``faults``: {round: {node id: reason}}. A round without any
    usable reply changes nothing. `start` begins the method anew each time, from the arrays that it
    is given; each node remains the same client.

    Args:
        expression: the method.
        clients: C, the number of clients. Each node is one, in the order in which they come. A node
            that comes back has another id, and replaces one that is gone.
        lr: learning rate of the clients, for methods that look ahead.
        seed: seed of the sampling, which is the same for the same nodes.
        outlier_factor: see `fedkeel.config.Flower`.
        wait: seconds that a round waits for `min_available_nodes`.
        **options: arguments of Flower's `FedAvg`.

    Raises:
        CompositionError: the method changes local training, or cannot be composed.

    >>> Method("fedgh+momentum", clients=3).plan.expression
    'fedgh+momentum'
    """

    def __init__(
        self,
        expression: str,
        clients: int,
        lr: float = 1.0,
        seed: int = 0,
        outlier_factor: float = 1000.0,
        wait: float = 600.0,
        **options: Any,  # noqa: ANN401 - whatever FedAvg takes
    ) -> None:
        if "screen" in options:
            warnings.warn("'screen' is now called 'outlier_factor'", FutureWarning, stacklevel=2)
            outlier_factor = options.pop("screen")
        super().__init__(**options)
        if clients < 1:
            raise ConfigError("A federation needs clients.", got=clients, expected="at least 1")
        self.plan = parse(expression)
        _refuse_client_roles(self.plan)
        self._clients, self._lr, self._seed = clients, lr, seed
        self._outliers, self._wait = Outliers(outlier_factor, clients), wait
        self._population = Population(clients, clients)
        self._client_by_node: dict[int, int] = {}
        self._server: Server | None = None
        self._message: context.Message | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._table: ServerTable | None = None
        self.faults: dict[int, dict[int, str]] = {}  # round -> node -> reason

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the round's nodes, drawn by the seed among those that are connected.

        Round 1 begins the method anew from the arrays; later rounds go on from the last one's.

        Raises:
            RunError: too few nodes are connected.
        """
        if self._server is None or server_round == 1:  # `start` counts from 1 each time
            self._server, self.faults = self._begin(arrays), {}
            self._outliers = self._outliers.begun_anew()
        server = self._server
        count = max(
            int(self._clients * self.fraction_train), min(self.min_train_nodes, self._clients)
        )
        nodes = self._connected_nodes(grid)
        random = generator(self._seed, "cohort", server_round - 1)
        chosen = sorted(nodes[i] for i in random.permutation(len(nodes))[:count])
        self._message = server_message(self.plan, server, self._lr)
        config["server-round"] = server_round
        model = {**self._message.params, **server.buffers}
        content = RecordDict(
            {
                self.arrayrecord_key: pack({name: model[name] for name in self._specs}),
                self.configrecord_key: config,
            }
        )
        return [Message(content, node, MessageType.TRAIN) for node in chosen]

    def _connected_nodes(self, grid: Grid) -> list[int]:
        """Return the connected nodes that are clients, ascending; wait for enough of them."""
        needed, end = min(self.min_available_nodes, self._clients), time.monotonic() + self._wait
        while len(nodes := sorted(grid.get_node_ids())) < needed:
            if time.monotonic() > end:
                raise RunError(
                    "The nodes of the federation are not there.",
                    got=f"{len(nodes)} after {self._wait:g} s",
                    expected=f"at least {needed} (min_available_nodes)",
                    do="start the SuperNodes, then submit the app again",
                )
            time.sleep(0.2)
        gone = [node for node in self._client_by_node if node not in nodes]
        for node in nodes:
            if node in self._client_by_node:
                continue
            if len(self._client_by_node) < self._clients:
                self._client_by_node[node] = len(self._client_by_node)
            elif gone:
                self._client_by_node[node] = self._client_by_node.pop(gone.pop(0))
        return [node for node in nodes if node in self._client_by_node]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make a round of the method from the usable replies."""
        messages, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        usable = self._read(server_round, messages)
        if self._server is None or self._message is None:
            return None, None
        received = self._received(self._server, self._message, usable)
        reasons = dict.fromkeys(np.flatnonzero(~received.finite).tolist(), "sent NaN or infinity")
        for row, reason in {**reasons, **self._outlying(received, self._message.params)}.items():
            received.finite[row] = False
            self._add_fault(server_round, usable[row].node, reason)
        table = self._table
        remembered = None
        if table is not None:
            remembered = table.remembered(self._server.params, received.clients)
        try:
            result = run_server_round(
                self.plan,
                self._server,
                self._message,
                received,
                self._population,
                self._seed,
                remembered,
            )
        except TrainingError as error:  # the model stays as it is, and the app goes on
            LOG.warning("round %d changes nothing: %s", server_round, error.what)
            return self._arrays(), None
        self._server = result.server
        if table is not None:
            table.put(result)
        contents = [
            reply.content for reply, is_used in zip(usable, received.finite, strict=True) if is_used
        ]
        metrics = None
        if contents:
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        return self._arrays(), metrics

    def _received(
        self, server: Server, message: context.Message, usable: list[_NodeReply]
    ) -> Replies:
        """Return the replies as the method's server half takes them."""
        examples = np.array([reply.examples for reply in usable], dtype=np.int64)
        start, models = message.params, [reply.model for reply in usable]

        def stacked(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
            return torch.stack(rows) if rows else like.new_zeros((0, *like.shape))

        return Replies(
            clients=np.array([self._client_by_node[r.node] for r in usable], dtype=np.int64),
            examples=examples,
            processed=examples,
            finite=np.array([bool(all_finite({"model": dict(m)})) for m in models], dtype=np.bool_),
            update={k: stacked([m[k] - v for m in models], v) for k, v in start.items()},
            buffers={k: stacked([m[k] for m in models], v) for k, v in server.buffers.items()},
            uploads={},
        )

    def _outlying(self, received: Replies, sent: Tree) -> dict[int, str]:
        """Return the rows that are outliers, each with the reason; the first by the model."""
        scale = np.ones(len(received.clients))
        sizes = message_sizes(received.update, received.buffers, received.uploads, scale)
        first = norms([tensor[None] for tensor in sent.values()]) * scale
        return self._outliers.judge(received.clients, without(sizes, ~received.finite), first)

    def _arrays(self) -> ArrayRecord | None:
        """Return the model as it is, None where there is none yet."""
        if self._server is None:
            return None
        model = {**self._server.params, **self._server.buffers}
        return pack({name: model[name] for name in self._specs})

    def _begin(self, arrays: ArrayRecord) -> Server:
        """Return the server that starts from the app's arrays."""
        model = {k: torch.from_numpy(a.numpy().copy()) for k, a in arrays.items()}
        self._specs = specs_of(dict(model))
        params: Tree = {
            k: v for k, v in model.items() if v.is_floating_point() and not _is_statistic(k)
        }
        if not params:
            raise RunError("The app's arrays hold no floating-point numbers.", got=list(model)[:4])
        memory = {p.name: p.init_server(params, self._population) for p in self.plan.server_states}
        optimiser = self.plan.server_optimiser
        memory[optimiser.name] = optimiser.init_optimiser(params, self._population)
        buffers = {k: v for k, v in model.items() if k not in params}
        self._table = ServerTable(self.plan, params, self._clients, self._clients)
        return copy_memory(Server(clone(params), buffers, memory))

    def _read(self, server_round: int, messages: list[Message]) -> list[_NodeReply]:
        """Return the usable replies, in the order of their clients."""
        usable = []
        for message in messages:
            node = message.metadata.src_node_id
            try:
                usable.append(self._read_one(node, message.content))
            except WireError as error:
                self._add_fault(server_round, node, error.what)
        return sorted(usable, key=lambda reply: self._client_by_node[reply.node])

    def _read_one(self, node: int, content: RecordDict) -> _NodeReply:
        if node not in self._client_by_node:
            raise WireError("a node that nobody asked")
        names = list(content.array_records)
        if len(names) != 1 or len(content.metric_records) != 1:
            raise WireError("a reply has to hold one ArrayRecord and one MetricRecord")
        model = dict(walk(unpack(content, names[0], self._specs)))
        count = next(iter(content.metric_records.values())).get(self.weighted_by_key)
        if not isinstance(count, int | float) or not 0 < count < 2**40 or count != int(count):
            raise WireError(
                f"{self.weighted_by_key!r} is {count!r}, which is not a number of examples"
            )
        return _NodeReply(node, content, model, int(count))

    def _add_fault(self, server_round: int, node: int, reason: str) -> None:
        """Record why a node's reply is left out, and write it into Flower's log."""
        reason = printable(reason)
        self.faults.setdefault(server_round, {})[node] = reason
        LOG.warning("round %d: node %d is left out: %s", server_round, node, reason)


def _is_statistic(name: str) -> bool:
    """Return whether an array is a running statistic of one of torch's normalisations."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _refuse_client_roles(plan: Plan) -> None:
    """Refuse a method that changes what clients do or send, or when the server makes a step."""
    if plan.policy is not None:
        raise CompositionError(
            f"{plan.policy.name!r} does not wait for the clients, and Flower's rounds do.",
            got=plan.expression,
            do="use fedkeel.flower.apps at both ends, or a method of rounds",
        )
    allowed = {name for role, name in ROLES.items() if role in SERVER_ROLES}
    for part in plan.parts:
        others = [role for role in roles_of(part) if role not in allowed]
        if others:
            raise CompositionError(
                f"{part.name!r} needs more of the clients than their models.",
                got=f"the role {others[0]!r}",
                why="the app's own local training does not carry out this role",
                do="use fedkeel.flower.apps at both ends, or a method that acts only at the server",
            )
