"""A federation played by hand: batches are given, nothing is drawn, every value can be looked at.

It calls the same client functions and the same server round as the engines do, so what it shows
holds for them. The engines are compared with each other in tests/engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.compose import SIMULATION
from fedkeel.method.context import ClientInfo, Message, Population
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import client_finish, client_start, client_step
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.round_values import Replies, Reply, Server, TableRows
from fedkeel.method.server_memory import initial_table_row, server_start
from fedkeel.method.server_round import server_message, server_round
from fedkeel.method.survey import add_mean_answers, client_survey
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree

ORACLES = Path(__file__).parent / "oracles"
EVERYTHING = SIMULATION | {
    Capability.HEAD,
    Capability.FEATURES,
    Capability.BLOCKS,
    Capability.INPUT_GRADIENT,
    Capability.EXAMPLE_LOSSES,
    Capability.LOSS_BY_EXAMPLE,
    Capability.PLAIN_LOSS,
    Capability.CLASSES,
    Capability.SOFT_TARGETS,
    Capability.PUBLIC_INPUTS,
}


class ToyMLP(nn.Module):
    """The network of the oracle vectors: 8 inputs, 6 hidden units, 3 classes."""

    def __init__(self, inputs: int = 8, hidden: int = 6, classes: int = 3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def toy_network(params: Tree | None = None, seed: int = 0, **kwargs: object) -> Network:
    """The toy network in float64, with given or random parameters."""
    torch.manual_seed(seed)
    network = Network(ToyMLP(), head="fc2", dtype=torch.float64, **kwargs)
    if params is not None:
        network.params = tree.clone(params)
    return network


def consecutive(n: int, size: int, epochs: int = 1) -> list[np.ndarray]:
    """Mini-batches as consecutive slices, the same in every epoch."""
    return [np.arange(n)[i : i + size] for _ in range(epochs) for i in range(0, n, size)]


@dataclass
class Played:
    """A federation after some rounds."""

    server: Server
    deltas: dict[int, Tree] = field(default_factory=dict)
    client_state: dict[int, dict[str, State]] = field(default_factory=dict)
    diagnostics: dict[str, float] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)


Batches = Callable[[int, int], Sequence[np.ndarray]]
"""(client, round) -> positions of each batch"""


class Federation:
    """Clients with arrays of their own, stepped by hand."""

    classes = 3

    def __init__(
        self,
        expression: str,
        network: Network,
        clients: Sequence[tuple[np.ndarray, np.ndarray]],
        local: Local,
        batches: Batches,
        *,
        weights: str | None = None,
        seed: int = 0,
        autograd: str = "eager",
        buffers: str = "refuse",
        per_round: int | None = None,
        root: int = 0,
        public: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.plan = parse(expression, EVERYTHING, weights)
        self.training = ClientTraining(
            self.plan,
            network,
            self.plan.work(local),
            buffers,
            autograd,
            personal=self.plan.personal_names(network.layout),
            public=Batch(*map(torch.as_tensor, public or clients[0])),
        )
        self.network, self.batches, self.seed = network, batches, seed
        self.root = root  # the client whose examples are also at the server
        self.data = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in clients]
        population = Population.of(network, len(clients), per_round or len(clients))
        self.population = replace(population, public=len(self.training.public))
        server = server_start(self.training, self.population)
        self.played = Played(server)
        self.rows: dict[int, dict[str, State]] = {}

    def message(self, selected: Sequence[int]) -> Message:
        """What the selected clients receive, with the mean of their answers to surveys."""
        message = server_message(self.plan, self.played.server, self.training.local.lr)
        if not self.plan.surveys:
            return message
        with torch.no_grad():
            found = [self.survey(k, message) for k in selected]
        sizes = [len(self.data[k][1]) for k in selected]
        weights = np.ones(len(sizes)) if self.plan.weights == "uniform" else np.array(sizes)
        return add_mean_answers(message, tree.substates(tree.stack(found)), weights / 1.0)

    def survey(self, k: int, message: Message) -> dict[str, State]:
        x, y = self.data[k]
        client_state = self.played.client_state.get(k)
        return client_survey(
            self.training, message, client_state, self.client_info(k), lambda: Batch(x, y)
        )

    def client_info(self, k: int) -> ClientInfo:
        y = self.data[k][1]
        if Capability.CLASS_COUNTS not in self.plan.needs:
            return ClientInfo(k, len(y))
        return ClientInfo(k, len(y), torch.bincount(y, minlength=self.classes))

    def noise(self, k: int) -> Callable[[], Tree | None]:
        """Gives the random numbers of each step; tests may replace it."""
        if Capability.NOISE not in self.plan.needs:
            return lambda: None
        source = torch.Generator().manual_seed(1000 * self.played.server.round + k)
        params = self.network.params
        return lambda: {
            name: torch.randn(v.shape, generator=source, dtype=v.dtype)
            for name, v in params.items()
        }

    def remembered(self, clients: Sequence[int]) -> TableRows:
        """What the server remembers of the clients."""
        fresh = initial_table_row(self.plan, self.played.server.params)
        rows = tree.stack([fresh, *(self.rows.get(k, fresh) for k in clients)])
        seen = np.array([k in self.rows for k in clients], dtype=np.bool_)
        return TableRows(tree.substates(tree.map_tensors(lambda t: t[1:], rows)), seen)

    def reply(
        self, k: int, padded: int = 0, message: Message | None = None
    ) -> tuple[Reply, int, int]:
        """One client's round; `padded` steps are added that must change nothing."""
        message = message or self.message([k])
        x, y = self.data[k]
        normal = self.noise(k)
        positions = list(self.batches(k, self.played.server.round))
        client_info = self.client_info(k)
        with torch.no_grad():
            client, progress = client_start(
                self.training,
                message,
                self.played.client_state.get(k),
                client_info,
                lambda: Batch(x, y),
            )
            real = torch.tensor(True)
            factors = self.training.step_factors(message.round, len(positions))
            phases = self.training.phases_of_steps(len(positions), message.round)
            for step, index in enumerate(positions):
                rows = torch.as_tensor(index)
                batch = Batch(x[rows], y[rows])
                active = real if padded else None
                lr = message.lr * factors[step] if factors else None
                phase = phases[step] if phases else None
                step_of = partial(client_step, client, phase=phase)
                progress = step_of(progress, batch, rows, rows, active, normal(), lr)
            for _ in range(padded):
                progress = step_of(progress, batch, rows, rows, ~real, normal())
            steps = len(positions)
            return client_finish(client, progress, steps), steps, sum(map(len, positions))

    def with_root(self, replies: Replies, found: dict[int, tuple[Reply, int, int]]) -> Replies:
        """The replies with the update of the client whose examples are also at the server."""
        if Capability.ROOT_EXAMPLES not in self.plan.needs:
            return replies
        own = found.get(self.root) or self.reply(self.root)
        return replace(replies, root=own[0].update)

    def round(self, selected: Sequence[int] | None = None, padded: int = 0) -> Played:
        """One round of the selected clients, all of them where it is None, nobody where empty."""
        clients = list(range(len(self.data)) if selected is None else selected)
        asked = clients or [0]  # a reply shows the form of rows of which there are none
        answered = (self.message(asked),) if self.plan.surveys else ()
        found = {k: self.reply(k, padded, *answered) for k in asked}
        replies = stack(clients, found, [len(self.data[k][1]) for k in clients])
        replies = self.with_root(replies, found)
        server = self.played.server
        done = server_round(
            self.plan,
            server,
            self.message(asked),
            replies,
            self.population,
            self.seed,
            self.remembered(clients),
        )
        for i, k in enumerate(done.clients):
            self.rows[int(k)] = {
                part: tree.map_tensors(lambda t, i=i: t[i], rows)
                for part, rows in done.rows.items()
            }
        client_state = {
            **self.played.client_state,
            **{k: found[k][0].client_state for k in clients},
        }
        deltas = {k: found[k][0].update for k in clients}
        self.played = Played(
            done.server, deltas, client_state, done.diagnostics, {k: found[k][0] for k in clients}
        )
        return self.played

    @property
    def params(self) -> Tree:
        return self.played.server.params


def stack(
    clients: list[int], found: dict[int, tuple[Reply, int, int]], sizes: list[int]
) -> Replies:
    """Put replies on a leading axis, as an engine does."""

    def rows(pick: Callable[[Reply], State]) -> State:
        stacked = tree.stack([pick(found[k][0]) for k in clients or found])
        return stacked if clients else tree.map_tensors(lambda t: t[:0], stacked)

    return Replies(
        clients=np.array(clients, dtype=np.int64),
        examples=np.array(sizes, dtype=np.int64),
        processed=np.array([found[k][2] for k in clients], dtype=np.int64),
        finite=np.array([bool(found[k][0].finite) for k in clients], dtype=np.bool_),
        update=rows(lambda r: dict(r.update)),
        buffers=rows(lambda r: dict(r.buffers)),
        uploads=rows(lambda r: dict(r.uploads)),
    )


def oracle(name: str) -> dict[str, np.ndarray]:
    """Read a file of vectors from public code that is not ours."""
    with np.load(ORACLES / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def tensors(values: dict[str, np.ndarray], prefix: str) -> Tree:
    """The arrays under a prefix, as a tree in the toy network's order."""
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    return {n: torch.from_numpy(values[prefix + n]) for n in names}


def distance(a: Tree, b: Tree) -> float:
    """Largest absolute difference over all tensors."""
    assert list(a) == list(b)
    return max(float((a[k] - b[k]).abs().max()) for k in a)
