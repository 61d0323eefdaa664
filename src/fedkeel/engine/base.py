"""The protocol of engines, and the values that go into and come out of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.fingerprint.reached_values import Description
from fedkeel.base.values import map_values, tensors_of
from fedkeel.config import Precision
from fedkeel.data.augment import Transform
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.networks import OtherNetworks
from fedkeel.errors import RunError
from fedkeel.method.compose import Plan
from fedkeel.method.context import ByPart, Floats, Ints, Message
from fedkeel.method.local_loop import ClientRound, LocalState
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.round_values import Replies, Reply, Server
from fedkeel.method.server_round import raw_weights, server_message
from fedkeel.records.rows import Scores
from fedkeel.task.batch import Batch
from fedkeel.task.metrics.metric_set import Measured, MetricSet
from fedkeel.task.network import Network
from fedkeel.tree import Tree

Split = Literal["test", "clients", "pictures"]
"""What is evaluated: the test set; each client's own examples, one client after the other; or the
test set as a whole with the counts for the pictures of a report in place of the metrics."""

SMALL = 100
"""Examples in one forward pass of convolutions on a processor: what lies between two layers then
stays in its cache."""

ReportProgress = Callable[[int], None]
"""Called with the number of clients that have been trained since the last call."""


@dataclass(frozen=True)
class TrainingSetup:
    """Method, model, data and seed: all that decides what training does.

    Args:
        training: method, model and local training.
        federation: the training set and its clients.
        test: the test set.
        seed: seed of the run.
        augment: a transform of each batch in training; True crops and mirrors images at random.
        metrics: what is measured in an evaluation.
        eval_batch: examples in one forward pass of an evaluation, at most.
        precision: of the factors of products in training and evaluation.
        keeps_updates: whether the updates of single clients are kept where the method needs no more
            than their sum.
        own: the user's own local training, where the method's plan has no local steps.
        others: networks of clients that have another one than that of `training`; None where all
            have the same.
    """

    training: ClientTraining
    federation: Federation
    test: Dataset
    seed: int
    metrics: MetricSet
    augment: bool | Transform = False
    eval_batch: int = 1000
    precision: Precision = "float32"
    keeps_updates: bool = False
    own: OwnTraining | None = None
    others: OtherNetworks | None = None

    def of(self, client: int) -> TrainingSetup:
        """Return the setup as it is for one client: with its network, and with no others."""
        if self.others is None:
            return self
        return replace(self, training=self.others.training_of(client) or self.training, others=None)

    def with_networks(self, change: Callable[[Network], Network]) -> TrainingSetup:
        """Return the setup with what is made of each network."""
        trainings = (self.training, *(self.others.trainings if self.others else ()))
        first, *rest = (replace(one, network=change(one.network)) for one in trainings)
        others = self.others and replace(self.others, trainings=tuple(rest))
        return replace(self, training=first, others=others)

    def with_public_on(self, device: torch.device) -> TrainingSetup:
        """Return the setup with its public inputs on a device."""
        public = self.training.public
        if public is None:
            return self
        x, y = (map_values(lambda t: t.to(device), values) for values in (public.x, public.y))
        trainings = (self.training, *(self.others.trainings if self.others else ()))
        first, *rest = (replace(one, public=Batch(x, y)) for one in trainings)
        others = self.others and replace(self.others, trainings=tuple(rest))
        return replace(self, training=first, others=others)

    @cached_property
    def shard(self) -> int:
        """Examples in one forward pass of an evaluation."""
        network = self.training.network
        small = network.has_cpu_convolutions and not network.batch_statistics
        return min(self.eval_batch, SMALL) if small else self.eval_batch

    def on(self, device: torch.device) -> TrainingSetup:
        """Return the setup with network and data on a device.

        Raises:
            RunError: they do not fit into its memory.
        """
        try:
            return self._on(device)
        except torch.OutOfMemoryError as error:
            inputs = [*tensors_of(self.federation.data.x), *tensors_of(self.test.x)]
            raise RunError(
                "The examples do not fit into the GPU's memory.",
                got=f"{sum(t.nbytes for t in inputs) / 1e9:.1f} GB of inputs; "
                + str(error).split(". ")[0],
                do="set engine.device = 'cpu', or take fewer examples (data.limit)",
            ) from error

    def _on(self, device: torch.device) -> TrainingSetup:
        train = self.federation.data.on(device)
        return replace(
            self.with_networks(lambda network: network.on(device)).with_public_on(device),
            federation=replace(self.federation, data=train),
            test=self.test.on(device),
        )

    def raw_weights(self, jobs: Sequence[ClientJob], processed: Sequence[int]) -> Floats:
        """Return [n] weights of clients by the examples they processed, not yet scaled to sum 1."""
        sizes = self.federation.sizes[[job.client for job in jobs]]
        return raw_weights(self.training.plan.weights, sizes, np.array(processed))


class OwnTraining(Protocol):
    """Local training by the user, in place of the local steps."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def description(self) -> Description:
        """A text of all that decides what it does."""

    def train_client(
        self,
        setup: TrainingSetup,
        client: ClientRound,
        local: LocalState,
        job: ClientJob,
        make_batch: Callable[[int], Batch],
        work: tuple[int, int],
        is_trial: bool,
    ) -> tuple[Reply, int, int]:
        """Train a client, and end its round.

        Args:
            setup: method, model, data and seed.
            client: what stays the same during the round.
            local: where the client begins.
            job: the client.
            make_batch: number of a mini-batch, from 1 -> the mini-batch.
            work: steps and examples that the settings ask for.
            is_trial: whether it is a rehearsal.

        Returns:
            What the client sends, keeps and logs; steps made; examples processed.
        """


@dataclass(frozen=True)
class ClientJob:
    """One client of a round.

    Args:
        row: place in the cohort, 0..K-1, and so in the reply buffers.
        client: stable client index.
        steps_done: local steps that the client has made in earlier rounds.
    """

    row: int
    client: int
    steps_done: int


@dataclass(frozen=True)
class RemoteReport:
    """The traffic and the failures of a round whose clients are on other machines.

    Args:
        down: bytes sent to clients, by part.
        up: bytes received from clients, by part.
        faults: clients by the failure that they had, in words.
        lost: clients that no longer have their state.
    """

    down: dict[str, int]
    up: dict[str, int]
    faults: dict[str, list[int]]
    lost: list[int]


@dataclass(frozen=True)
class TrainedCohort:
    """The clients of a round after they have trained.

    Args:
        replies: what the server receives. The tensors may be buffers that the engine writes over
            in the next round.
        loss: [K] mean training loss of each client.
        steps: [K] local steps that each client made.
        diagnostics: diagnostics by ``part.name``, [K].
        seconds: by phase of local training, summed over clients, also where several trained at
            the same time.
        processor_seconds: as in `RoundRecord`.
        remote: traffic and failures, where clients are on other machines; K are then the clients
            that answered.
    """

    replies: Replies
    loss: NDArray[np.float64]
    steps: Ints
    diagnostics: dict[str, NDArray[np.float64]]
    seconds: dict[str, float] = field(default_factory=dict)
    processor_seconds: float | None = None
    remote: RemoteReport | None = None


@dataclass(frozen=True)
class ServerModel:
    """What the server holds when clients' personal models are made of it.

    Args:
        params: the shared parameters.
        buffers: the buffers, where they are averaged.
        round: rounds completed.
        broadcast: what the part has sent that says which model a client receives, by part.
    """

    params: Tree
    buffers: Tree
    round: int
    broadcast: ByPart = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, server: Server) -> ServerModel:
        """Return what a server holds, with the other models where it has several."""
        part, broadcast = plan.receiver, {}
        if part is not None:
            sent = server_message(plan, server, 0.0).broadcast
            broadcast = {name: state for name, state in sent.items() if name == part.name}
        return cls(server.params, server.buffers, server.round, broadcast)


@dataclass(frozen=True)
class PersonalScores:
    """The scores of personal models.

    Args:
        total: of all clients' own examples, each predicted by its client's model.
        per_client: [C] of each client's own examples; of 0 examples where it has none.
    """

    total: Scores
    per_client: list[Scores]


class TrainingEngine(Protocol):
    """Runs the clients of a round, and evaluations."""

    @property
    def reasons(self) -> list[str]:
        """Why clients were trained in a plainer way than was asked for."""

    @property
    def warnings(self) -> Sequence[str]:
        """What the run's record warns of: what has happened, and changed no number of a client."""

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message; their new state counts once it is committed."""

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys, tensors [K, ...] by part."""

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""

    def client_state(self, client: int) -> ByPart | None:
        """Return what a client keeps, by part, for reading; None where there is nothing here."""

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Make the new state of the clients `keep` count, after the server's round."""

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split, see `engine.evaluation`."""

    def measure_personal(self, setup: TrainingSetup, server: ServerModel) -> PersonalScores:
        """Return the scores of the clients' personal models, see `engine.personal`."""

    def count_personal(self, setup: TrainingSetup, server: ServerModel) -> Tensor:
        """Return [C, S] what personal models answer on own examples: `MetricSet.of_pictures`."""

    def personal_model(
        self, setup: TrainingSetup, server: ServerModel, client: int
    ) -> tuple[Tree, Tree]:
        """Return parameters and buffers of a client's personal model, see `engine.personal`."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays, for a checkpoint; what lies in a file stays there."""

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete, and the one before gone."""

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take client state from a checkpoint."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...
