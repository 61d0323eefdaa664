"""The server's half of a method as a Flower strategy, for apps that train in a way of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import CompositionError, ConfigError, RunError, TrainingError
from fedkeel.flower.server.outliers import outliers
from fedkeel.flower.wire import WireError, pack, unpack
from fedkeel.method.compose import Plan, roles_of
from fedkeel.method.context import Message as Sent
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import finite
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
from fedkeel.method.server_round import Replies, Server, owned, server_message
from fedkeel.method.server_round import server_round as play
from fedkeel.rng import generator
from fedkeel.runner.server_table import ServerTable
from fedkeel.tree import Tree, clone, walk

LOG = logging.getLogger("flwr")
"""Flower's own log, which whoever submits the app sees."""

SERVER = (
    Dispatch,
    Table,
    CohortTransform,
    Reduction,
    AggregateTransform,
    ServerOptimiser,
    ServerState,
)
"""Roles that need nothing of the clients but their models."""


class Method(FedAvg):
    """Aggregates by a method of fedkeel, in place of a Flower strategy, with the same messages.

    Clients send the model they trained and ``num-examples``, as they do for `FedAvg`. So a method
    fits here whose parts act at the server alone: `fedgh`, `fedadam`, `momentum`, `median`,
    `globalgc`, `fedvarp`, ...; one that changes local training needs `fedkeel.flower.apps`.

    Floating-point arrays are the model, but for the running statistics of batch normalisation
    (``running_mean``, ``running_var``), which are averaged, as clients count; of others, such as
    counters, the largest is taken. A reply that is not finite, has another form, or a norm a
    thousand times the median is left out, and so are its metrics: a warning says it, and the
    attribute ``faults``, {round: {node id: words}}. A round that leaves none changes nothing.
    `start` begins anew each time, from the arrays that it is given; nodes keep their places.

    Args:
        expression: the method.
        clients: C, how many clients there are; each node is one, in the order in which they come. A
            node that comes back has another id, and takes the place of one that is gone.
        lr: learning rate of the clients, for methods that look ahead.
        seed: seed of the sampling, which is the same for the same nodes.
        screen: see `fedkeel.config.Flower`.
        wait: seconds that a round waits for `min_available_nodes`.
        **more: arguments of Flower's `FedAvg`.

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
        screen: float = 1000.0,
        wait: float = 600.0,
        **more: Any,  # noqa: ANN401 - whatever FedAvg takes
    ) -> None:
        super().__init__(**more)
        if clients < 1:
            raise ConfigError("A federation has clients.", got=clients, expected="at least 1")
        self.plan = parse(expression)
        _only_server(self.plan)
        self._clients, self._lr, self._seed, self._screen = clients, lr, seed, screen
        self._wait = wait
        self._population = Population(clients, clients)
        self._index: dict[int, int] = {}  # node -> client
        self._server: Server | None = None
        self._sent: Sent | None = None
        self._spec: dict[str, TensorSpec] = {}
        self._table: ServerTable | None = None
        self.faults: dict[int, dict[int, str]] = {}  # round -> node -> what went wrong

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the round's nodes, drawn by the seed among those that are there.

        Round 1 begins the method anew from the arrays; later rounds go on from the last one's.

        Raises:
            RunError: there are too few of them.
        """
        if self._server is None or server_round == 1:  # `start` counts from 1 each time
            self._server, self.faults = self._begin(arrays), {}
        server = self._server
        count = max(
            int(self._clients * self.fraction_train), min(self.min_train_nodes, self._clients)
        )
        known = self._there(grid)
        random = generator(self._seed, "cohort", server_round - 1)
        chosen = sorted(known[i] for i in random.permutation(len(known))[:count])
        self._sent = server_message(self.plan, server, self._lr)
        config["server-round"] = server_round
        whole = {**self._sent.params, **server.buffers}
        content = RecordDict(
            {
                self.arrayrecord_key: pack({k: whole[k] for k in self._spec}),
                self.configrecord_key: config,
            }
        )
        return [Message(content, node, MessageType.TRAIN) for node in chosen]

    def _there(self, grid: Grid) -> list[int]:
        """Return the nodes that are there and have a place among the clients, ascending."""
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
        gone = [node for node in self._index if node not in nodes]
        for node in nodes:
            if node not in self._index and len(self._index) < self._clients:
                self._index[node] = len(self._index)
            elif node not in self._index and gone:
                self._index[node] = self._index.pop(gone.pop(0))
        return [node for node in nodes if node in self._index]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make a round of the method of the replies that can be used."""
        good, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        found = self._read(server_round, good)
        if self._server is None or self._sent is None:
            return None, None
        if not found:
            return self._model(), None
        clients = np.array([self._index[node] for node, _, _, _ in found], dtype=np.int64)
        examples = np.array([count for _, _, _, count in found], dtype=np.int64)
        start = self._sent.params
        received = Replies(
            clients=clients,
            examples=examples,
            processed=examples,
            finite=np.array([bool(finite({"p": dict(model)})) for _, _, model, _ in found]),
            update={k: torch.stack([one[2][k] - v for one in found]) for k, v in start.items()},
            buffers={
                k: torch.stack([model[k] for _, _, model, _ in found]) for k in self._server.buffers
            },
            uploads={},
        )
        odd = dict.fromkeys(np.flatnonzero(~received.finite).tolist(), "sent NaN or infinity")
        for row, words in {**odd, **outliers(received, self._screen)}.items():
            received.finite[row] = False
            self._fault(server_round, found[row][0], words)
        table = self._table
        remembered = None if table is None else table.remembered(self._server.params, clients)
        population, seed = self._population, self._seed
        try:
            result = play(
                self.plan, self._server, self._sent, received, population, seed, remembered
            )
        except TrainingError as error:  # the model stays as it is, and the next round may do better
            LOG.warning("round %d changes nothing: %s", server_round, error.what)
            return self._model(), None
        self._server = result.server
        if table is not None:
            table.put(result)
        taken = [one[1] for one, good in zip(found, received.finite, strict=True) if good]
        metrics = self.train_metrics_aggr_fn(taken, self.weighted_by_key) if taken else None
        return self._model(), metrics

    def _model(self) -> ArrayRecord | None:
        """Return the model as it is, None where there is none yet."""
        if self._server is None:
            return None
        whole = {**self._server.params, **self._server.buffers}
        return pack({k: whole[k] for k in self._spec})

    def _begin(self, arrays: ArrayRecord) -> Server:
        """Return the server that starts from the arrays that the app gives."""
        found = {k: torch.from_numpy(a.numpy().copy()) for k, a in arrays.items()}
        self._spec = specs_of(dict(found))
        params: Tree = {
            k: v for k, v in found.items() if v.is_floating_point() and not _is_statistic(k)
        }
        if not params:
            raise RunError("The app's arrays hold no floating-point numbers.", got=list(found)[:4])
        memory = {p.name: p.init_server(params, self._population) for p in self.plan.server_states}
        optimiser = self.plan.server_optimiser
        memory[optimiser.name] = optimiser.init_optimiser(params, self._population)
        buffers = {k: v for k, v in found.items() if k not in params}
        self._table = ServerTable(self.plan, params, self._population)
        return owned(Server(clone(params), buffers, memory))

    def _read(
        self, server_round: int, replies: list[Message]
    ) -> list[tuple[int, RecordDict, Tree, int]]:
        """Return node, content, model and examples of each reply that has the right form."""
        found = []
        for message in replies:
            node = message.metadata.src_node_id
            try:
                found.append((node, *self._one(node, message.content)))
            except WireError as error:
                self._fault(server_round, node, error.what)
        return sorted(found, key=lambda one: self._index[one[0]])

    def _fault(self, server_round: int, node: int, words: str) -> None:
        """Write down why a node's reply is left out, and say it in Flower's log."""
        self.faults.setdefault(server_round, {})[node] = words
        LOG.warning("round %d: node %d is left out: %s", server_round, node, words)

    def _one(self, node: int, content: RecordDict) -> tuple[RecordDict, Tree, int]:
        if node not in self._index:
            raise WireError("a node that nobody asked")
        names = list(content.array_records)
        if len(names) != 1 or len(content.metric_records) != 1:
            raise WireError("a reply has to hold one ArrayRecord and one MetricRecord")
        state = unpack(content, names[0], self._spec)
        count = next(iter(content.metric_records.values())).get(self.weighted_by_key)
        if not isinstance(count, int | float) or not 0 < count < 2**40 or count != int(count):
            raise WireError(
                f"{self.weighted_by_key!r} is {count!r}, which is no number of examples"
            )
        return content, dict(walk(state)), int(count)


def _is_statistic(name: str) -> bool:
    """Return whether an array is a running statistic of one of torch's normalisations."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _only_server(plan: Plan) -> None:
    """Refuse a method that changes what clients do or send."""
    names = {name for role, name in ROLES.items() if role in SERVER}
    for part in plan.parts:
        other = [role for role in roles_of(part) if role not in names]
        if other:
            raise CompositionError(
                f"{part.name!r} needs more of the clients than their models.",
                got=f"the role {other[0]!r}",
                why="the app's own training knows nothing of it",
                do="use fedkeel.flower.apps at both ends, or a method of the server alone",
            )
