"""The Ray actor, which does work items as a worker process does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.buffers import RowBytes, TensorBuffers
from fedkeel.engine.evaluation import evaluate_shard
from fedkeel.engine.message_state import evaluated_params, message_from_state
from fedkeel.engine.process.interrupts import ignore_ctrl_c
from fedkeel.engine.process.malloc import keep_freed_memory
from fedkeel.engine.process.numerics import set_numerics
from fedkeel.engine.process.shared_memory import allocate_aligned, private_memory
from fedkeel.engine.process.work_items import EvaluateItem, TrainItem, WorkItem, work_error
from fedkeel.engine.ray.cluster import PickledSetup, unpickled
from fedkeel.engine.ray.watch import Machine, this_machine
from fedkeel.engine.rehearsal import client_state_spec
from fedkeel.engine.reply_rows import PackedRows, ReplyRows
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.layout import RowLayout
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import ReadRecord, SequentialTrainer, Trainer
from fedkeel.errors import FedkeelError
from fedkeel.method.context import Message
from fedkeel.task.metrics.metric_set import Measured


@dataclass(frozen=True)
class StateRows:
    """The stored states of a work item's n clients.

    Args:
        block: [n * bytes of a row] their rows, laid out by `RowLayout`.
        has_row: [n] whether each client has a row.
    """

    block: NDArray[np.uint8]
    has_row: NDArray[np.bool_]


@dataclass(frozen=True)
class WorkResult:
    """The result of a work item.

    Args:
        rows: rows of its clients, in their order.
        evaluated: of an evaluation, by the example with which each shard begins.
        error: what was raised.
        reasons: why clients are trained in a plainer way than was asked for.
    """

    rows: PackedRows = field(default_factory=dict)
    evaluated: dict[int, Measured] = field(default_factory=dict)
    error: FedkeelError | None = None
    reasons: list[str] = field(default_factory=list)


class Actor:
    """Trains and evaluates in one thread; between work items it only keeps the last message.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, by path.
        message: shapes and types of a message.
        capacity: largest number of clients of a work item.
        parallel_clients: clients trained side by side; None trains them one by one.
    """

    def __init__(
        self,
        setup: PickledSetup,
        spec: Mapping[str, TensorSpec],
        message: Mapping[str, TensorSpec],
        capacity: int,
        parallel_clients: int | None,
    ) -> None:
        with suppress(ValueError):  # not in the main thread
            ignore_ctrl_c()
        keep_freed_memory()
        self._setup = unpickled(setup)
        set_numerics(self._setup.precision)
        self._trainer: Trainer = SequentialTrainer(self._setup)
        if parallel_clients is not None:
            from fedkeel.engine.vectorized.engine import VectorizedTrainer  # slow to import

            self._trainer = VectorizedTrainer(self._setup, parallel_clients)
        sums = parallel_clients is not None
        self._rows = ReplyRows(self._setup, spec, capacity, private_memory, sums)
        self._layout = RowLayout(client_state_spec(spec))
        self._message = TensorBuffers(message, None, private_memory)
        self._message_number = 0

    def ready(self) -> Machine:
        """Tell that the actor has started, and where."""
        return this_machine()

    def do(
        self, item: WorkItem, message: tuple[int, RowBytes], states: StateRows | None
    ) -> WorkResult:
        """Do a work item.

        Args:
            item: the work.
            message: number and bytes of the message.
            states: what the clients keep; None where they keep nothing.
        """
        number, row_bytes = message
        if number != self._message_number:
            self._message.write_bytes(row_bytes)
            self._message_number = number
        try:
            if isinstance(item, EvaluateItem):
                return WorkResult(evaluated=self._evaluate(item))
            return WorkResult(rows=self._train(item, states), reasons=self._trainer.reasons)
        except Exception as error:
            return WorkResult(error=work_error(error, item))

    def _received(self, round: int, lr: float) -> Message:
        return message_from_state(self._message.state(), round, lr)

    def _evaluate(self, item: EvaluateItem) -> dict[int, Measured]:
        received, setup = self._received(0, 0.0), self._setup
        params = evaluated_params(self._message.state())
        buffers = received.buffers or setup.training.network.buffers
        return {
            start: evaluate_shard(setup, params, buffers, item.split, start)
            for start in item.starts
        }

    def _train(self, item: TrainItem, states: StateRows | None) -> PackedRows:
        message, read_record = self._received(item.round, item.lr), self._reader(item, states)
        jobs = [replace(job, row=row) for row, job in enumerate(item.jobs)]
        if item.is_survey:
            for job in jobs:
                record = read_record(job.client)
                self._rows.answer_survey(message, job, None if record is None else record.state)
        else:
            self._rows.train(self._trainer, message, jobs, read_record, lambda _: None)
        return self._rows.pack(len(jobs), item.is_survey)

    def _reader(self, item: TrainItem, states: StateRows | None) -> ReadRecord:
        """Return a function that reads clients' records, which are aligned as in the store."""
        if states is None:
            return lambda _: None
        block = allocate_aligned(len(states.block), private_memory)
        block.numpy()[:] = states.block
        rows = self._layout.rows(block, len(item.jobs))
        records = {
            job.client: ClientRecord({path: tensor[i] for path, tensor in rows.items()})
            for i, job in enumerate(item.jobs)
            if states.has_row[i]
        }
        return records.get
