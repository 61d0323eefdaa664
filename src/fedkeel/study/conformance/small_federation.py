"""A small federation for checks of methods: unequal clients, few classes each, float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel import config
from fedkeel.base.rng import generator
from fedkeel.base.values import rows_of
from fedkeel.config import Weights
from fedkeel.data import batches
from fedkeel.data.dataset import Dataset, dataset
from fedkeel.data.federation import Federation, federation
from fedkeel.engine import client_inputs
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.features.root.feature import root_for
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, ClientInfo, Message
from fedkeel.method.local_loop import (
    LocalState,
    client_finish,
    client_start,
    client_step,
)
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.round_values import Replies, Reply, Server, TableRows
from fedkeel.method.server_memory import copy_memory, initial_table_row
from fedkeel.method.server_round import server_message, server_round
from fedkeel.method.survey import add_mean_answers, client_survey
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.conformance.tasks import SmallTask
from fedkeel.task.batch import Batch
from fedkeel.task.task import Task
from fedkeel.tree import State, Tree, map_tensors, stack, substates, tensors

CLIENTS = 6
PER_ROUND = 3
ROUNDS = 4

SGD = config.Local(lr=0.05, epochs=2, batch_size=4, momentum=0.5)
"""Local training of all other checks."""
ADAMW = config.Local(
    lr=0.02, epochs=1, batch_size=2, accumulate=2, optimiser="adamw", clip_norm=0.5
)
"""Local training of the check that a method bears all of it."""


class SmallMLP(nn.Module):
    """Two layers, smooth everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 3] scores."""
        out: Tensor = self.fc2(torch.tanh(self.fc1(x)))
        return out


class Linear(nn.Module):
    """Softmax regression from zero, a convex problem, in two blocks that share the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 3, bias=False)
        self.fc2 = nn.Linear(3, 3)
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 3] scores."""
        out: Tensor = self.fc1(x[:, :2]) + self.fc2(x[:, 2:])
        return out


class RandomLinear(Linear):
    """The same problem from random weights."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)


def _data(clients: int = CLIENTS) -> tuple[Federation, tuple[np.ndarray, np.ndarray]]:
    """Three noisy classes, unequal clients of one to three classes each."""
    random = generator(0, "conformance")
    centres = random.normal(size=(3, 5)) * 1.5
    lists, labels, at = [], [], 0
    for k in range(clients):
        classes = random.choice(3, size=1 + k % 3, replace=False)
        size = 5 + 3 * k
        labels.append(random.choice(classes, size=size))
        lists.append(np.arange(at, at + size))
        at += size
    y = np.concatenate(labels)
    x = centres[y] + random.normal(size=(at, 5))
    test = random.integers(0, 3, size=60)
    held = centres[test] + random.normal(size=(60, 5))
    return federation(dataset(x, y, classes=3), lists), (held, test)


class SmallFederation:
    """A small federation, and a reference run of the method on it.

    Args:
        expression: the method.
        weights: how clients count; None for the weights that the parts state.
        local: local training.
    """

    def __init__(self, expression: str, weights: Weights | None, local: config.Local = SGD) -> None:
        self.expression, self.weights, self.local = expression, weights, local
        self._root = root_for(expression, 6)
        self.prepared = self.prepare()

    @cached_property
    def reference(self) -> Result:
        """A run of the method by the sequential engine."""
        return start(self.prepared)

    def prepare(
        self,
        model: type[nn.Module] = SmallMLP,
        clients: int = CLIENTS,
        rounds: int = ROUNDS,
        lr: float | None = None,
        **engine: object,
    ) -> Prepared:
        """Return a run of the method on this federation."""
        training_data, test = _data(clients)
        return self._prepare(
            Task(model), training_data, dataset(*test, classes=3), rounds, lr, **engine
        )

    def prepare_task(self, small: SmallTask, rounds: int = 2, **engine: object) -> Prepared:
        """Return a run of the method on another kind of task, with clients of the same sizes."""
        random = generator(0, "conformance.task")
        sizes = [5 + 3 * k for k in range(CLIENTS)]
        starts = np.cumsum([0, *sizes])
        clients = federation(
            small.draw(random, int(starts[-1])),
            [np.arange(a, b) for a, b in pairwise(starts)],
        )
        return self._prepare(small.task, clients, small.draw(random, 20), rounds, 0.05, **engine)

    def _prepare(
        self,
        task: Task,
        clients: Federation,
        test: Dataset,
        rounds: int,
        lr: float | None,
        **engine: object,
    ) -> Prepared:
        values = {"kind": "sequential", "dtype": "float64", "checkpoint_seconds": 0.0, **engine}
        settings = config.Run(
            method=self.expression,
            rounds=rounds,
            weights=self.weights,
            local=self.local if lr is None else self.local.model_copy(update={"lr": lr}),
            cohort=config.Cohort(clients=PER_ROUND),
            engine=config.build(config.Engine, values, "conformance"),
        ).model_copy(update={"root": self._root})
        return prepare(settings, Ingredients(task, lambda _: clients, test, "toy", public=test))

    @property
    def plan(self) -> Plan:
        """The composed method."""
        return self.prepared.plan

    @property
    def training(self) -> ClientTraining:
        """Method, model and settings of local training."""
        return self.prepared.setup.training

    def batch_positions(self, k: int, round: int) -> list[np.ndarray]:
        """Return the positions of each mini-batch of a client's round."""
        n = len(self.prepared.setup.federation.client(k))
        return batches.plan(self.training.local, n, 0, round, k)

    def processed(self, k: int, round: int) -> int:
        """Return the number of examples that a client processes in a round."""
        return sum(len(positions) for positions in self.batch_positions(k, round))

    def per_pass(self, k: int) -> int:
        """Return the number of mini-batches in one pass over a client's examples, or in a round."""
        n = len(self.prepared.setup.federation.client(k))
        passes = batches.batches_per_pass(self.training.local, n)
        return max(1, min(len(self.batch_positions(k, 0)), passes))

    def batch(self, k: int, positions: np.ndarray) -> Batch:
        """Return a client's examples at some positions."""
        data, rows = self.prepared.setup.federation.data, self.prepared.setup.federation.client(k)
        index = torch.from_numpy(rows[positions])
        return Batch(rows_of(data.x, index), rows_of(data.y, index))

    def client_info(self, k: int) -> ClientInfo:
        """Return what a client knows about itself."""
        return client_inputs.client_info(self.prepared.setup, k)

    def all_examples(self, k: int) -> Batch:
        """Return all examples of a client."""
        return self.batch(k, np.arange(len(self.prepared.setup.federation.client(k))))

    def noise(self, message: Message, k: int) -> Callable[[], Tree | None]:
        """Return a function that gives the random numbers of a client's next step."""
        return client_inputs.noise_source(self.prepared.setup, message, k)

    def message(self, server: Server) -> Message:
        """Return the message to the clients, after all of them have answered a survey."""
        message = server_message(self.plan, server, self.training.local.lr)
        if not self.plan.surveys:
            return message
        with torch.no_grad():
            answers = [self.survey(message, k) for k in range(CLIENTS)]
        return add_mean_answers(message, substates(stack(answers)), np.ones(CLIENTS))

    def survey(self, message: Message, k: int) -> ByPart:
        """Return a client's answers before training, nothing where it is asked nothing."""
        if not self.plan.surveys:
            return {}
        return client_survey(
            self.training, message, None, self.client_info(k), partial(self.all_examples, k)
        )

    def table_rows(self, clients: list[int]) -> TableRows:
        """Return server-side rows of clients, as after some rounds: different for each client."""
        fresh = initial_table_row(self.plan, self.prepared.server.params)
        rows = []
        for k in clients:
            source = torch.Generator().manual_seed(k)
            rows.append({part: map_tensors(partial(_near, source), s) for part, s in fresh.items()})
        return TableRows(substates(stack(rows)), np.array([k % 2 == 0 for k in clients]))

    def reply(
        self,
        server: Server,
        k: int,
        client_state: ByPart | None = None,
        padded: int = 0,
        before: Callable[[LocalState], None] = lambda _: None,
    ) -> Reply:
        """Return a client's reply after a round.

        Args:
            server: the server's state.
            k: the client.
            client_state: what it kept after its last round; None before its first.
            padded: number of inactive steps at the end, which must change nothing.
            before: called with the local state before each step and before the end of the round.
        """
        message = self.message(server)
        next_noise = self.noise(message, k)
        plan = self.batch_positions(k, server.round)
        with torch.no_grad():
            client, progress = client_start(
                self.training,
                message,
                client_state,
                self.client_info(k),
                partial(self.all_examples, k),
            )
            factors = self.training.step_factors(message.round, len(plan))
            phases = self.training.phases_of_steps(len(plan), message.round)
            for number, positions in enumerate(plan):
                rows = torch.from_numpy(positions)
                first = torch.from_numpy(plan[number % self.per_pass(k)])
                before(progress)
                step = partial(client_step, client, phase=phases[number] if phases else None)
                batch, noise = self.batch(k, positions), next_noise()
                lr = message.lr * factors[number] if factors else None
                progress = step(progress, batch, rows, first, noise=noise, lr=lr)
            inactive = torch.tensor(False)
            for _ in range(padded):
                batch, noise = self.batch(k, positions), next_noise()
                progress = step(progress, batch, rows, first, active=inactive, noise=noise)
            before(progress)
            return client_finish(client, progress, len(plan))

    def replies(self, server: Server, clients: list[int], padded: int = 0) -> Replies:
        """Return the replies of some clients on a leading axis, in the given order."""
        replies = [self.reply(server, k, padded=padded) for k in clients]
        sizes = self.prepared.setup.federation.sizes

        def rows(pick: Callable[[Reply], State]) -> State:
            return stack([pick(reply) for reply in replies])

        return Replies(
            clients=np.array(clients),
            examples=sizes[clients],
            processed=np.array([self.processed(k, server.round) for k in clients]),
            finite=np.array([bool(reply.finite) for reply in replies]),
            update=tensors(rows(lambda reply: dict(reply.update))),
            buffers=tensors(rows(lambda reply: dict(reply.buffers))),
            uploads=substates(rows(lambda reply: dict(reply.uploads))),
            root={} if self._root is None else self.reply(server, 0).update,
        )

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Return the server after a round; the given one stays as it is."""
        done = server_round(
            self.plan,
            copy_memory(server),
            self.message(server),
            replies,
            self.prepared.population,
            0,
            self.table_rows([int(k) for k in replies.clients]),
        )
        return done.server


def _near(source: torch.Generator, tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type with slightly different numbers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor + 0.01 * torch.randn(tensor.shape, generator=source, dtype=tensor.dtype)
