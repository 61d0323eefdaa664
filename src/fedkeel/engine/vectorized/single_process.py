"""The vectorized engine in one process: it trains groups of clients side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedkeel.engine.base import (
    ClientJob,
    ReportProgress,
    ServerModel,
    Split,
    TrainedCohort,
    TrainingSetup,
)
from fedkeel.engine.client_states import KeepsClientStates
from fedkeel.engine.compiler.cache import CompileCache
from fedkeel.engine.evaluation import evaluate
from fedkeel.engine.personal import ReadState
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.process.work_items import training_items
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.record import RowCodec
from fedkeel.engine.trainer import Trainer
from fedkeel.engine.vectorized.batching import TrainingExamples
from fedkeel.engine.vectorized.begun import begun_before, stepped_start
from fedkeel.engine.vectorized.starts import Starts
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree, map_tensors, substates


class SingleProcess(KeepsClientStates):
    """Trains the clients of a round in this process with a trainer.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path, from `rehearse`.
        capacity: the largest cohort.
        trainer: trains the clients.
        file: where client state is stored; None for memory.
        codec: stores some of the clients' state in compact form; None stores it as it is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        trainer: Trainer,
        *,
        file: Path | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        self._buffers = RoundBuffers(
            setup, spec, capacity, private_memory, file, sums=True, codec=codec
        )
        self.clients = self._buffers.clients
        self._trainer, self._parallel_clients = trainer, trainer.parallel_clients
        self._precision, self._shard = setup.precision, setup.shard
        self._compiled: CompileCache | None = None

    @property
    def device(self) -> torch.device:
        """Where clients are trained."""
        return next(iter(self._trainer.placed.training.network.params.values())).device

    @property
    def sums_replies(self) -> bool:
        """Whether the server gets only sums of what clients send."""
        return self._buffers.rows.summed

    def keep_sums_on_device(self) -> None:
        """Leave sums where clients are trained, for a server that is there too."""
        self._buffers.rows.keep_sums_on(self.device)

    @property
    def reasons(self) -> list[str]:
        """Why clients were trained in a plainer way than was asked for."""
        return self._trainer.reasons

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message."""
        buffers, jobs = self._buffers, self.clients.begin_round(clients)
        with use_numerics(self._precision):
            for item in self._items(message, jobs):
                buffers.train(self._trainer, message, item, report_progress)
        return buffers.gather(clients)

    def _items(self, message: Message, jobs: Sequence[ClientJob]) -> list[Sequence[ClientJob]]:
        """Cut the clients of a round into work items; a GPU gets one, and so the model once."""
        if self._trainer.queue_length:
            return [jobs]
        setup, summed = self._trainer.placed, self._buffers.rows.summed
        items = training_items(setup, message, jobs, 1, self._parallel_clients, summed)
        return [item.jobs for item in items]

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        with use_numerics(self._precision):
            for job in self.clients.jobs(clients):
                self._buffers.answer_survey(message, job)
        return self._buffers.answers(clients)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split."""
        setup, device = self._trainer.placed, self.device
        params = {name: tensor.to(device) for name, tensor in params.items()}
        buffers = {name: tensor.to(device) for name, tensor in buffers.items()}
        with use_numerics(self._precision):
            return evaluate(setup, params, buffers, split, self._shard)

    def _personal(
        self, setup: TrainingSetup, server: ServerModel
    ) -> tuple[TrainingSetup, ServerModel, ReadState]:
        """Return what personal models are made of, on the device."""
        setup, device = self._trainer.placed, self.device

        def state_there(client: int) -> ByPart | None:
            state = self.client_state(client)
            return state and substates(map_tensors(lambda t: t.to(device), dict(state)))

        params = {name: tensor.to(device) for name, tensor in server.params.items()}
        buffers = {name: tensor.to(device) for name, tensor in server.buffers.items()}
        broadcast = substates(map_tensors(lambda t: t.to(device), dict(server.broadcast)))
        server = ServerModel(params, buffers, server.round, broadcast)
        part = stepped_start(setup)
        if part is None:
            return setup, server, state_there
        examples = TrainingExamples(setup.federation.data, setup.training.network.dtype)
        self._compiled = self._compiled or CompileCache(self._precision, ())
        starts = Starts(setup, part, examples, self._compiled)
        training = begun_before(setup.training, part)
        most = self._trainer.parallel_clients
        read = starts.before_evaluation(server, state_there, most)
        return replace(setup, training=training), server, read

    def __enter__(self) -> SingleProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there are no other processes to end."""
