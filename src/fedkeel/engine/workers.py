"""The workers engine: processes of one thread each, which share buffers with this process.

They train on processors, or each on a device of its own.

The server's message is written into shared memory once. Each worker trains its clients and writes
their rows, so the server finds the updates stacked; only a few numbers go through pipes. A worker
that dies is replaced and its clients are trained again: rows and states of a round are taken only
when the whole round is done.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from fedkeel.engine.base import ReportProgress, Split, TrainedCohort, TrainingSetup
from fedkeel.engine.buffers import TensorBuffers
from fedkeel.engine.client_states import KeepsClientStates
from fedkeel.engine.evaluation import cut_into_shards, evaluate_shard, metrics_of, most_states
from fedkeel.engine.message_state import (
    evaluated_params,
    evaluation_state,
    message_from_state,
    message_state,
    shared_state,
)
from fedkeel.engine.process.affinity import current_core, free_core, woken_on_core
from fedkeel.engine.process.forking import (
    ChildProcess,
    StartMethod,
    exit_reason,
    start_child,
    start_method,
    wait_for_children,
)
from fedkeel.engine.process.interrupts import ignore_ctrl_c, is_end_requested
from fedkeel.engine.process.malloc import keep_freed_memory
from fedkeel.engine.process.numerics import set_numerics, use_device
from fedkeel.engine.process.shared_memory import Allocate, fork_shared_memory, shared_segment
from fedkeel.engine.process.work_items import (
    DEVICE_SUMS,
    MAX_SUMS,
    EvaluateItem,
    TrainItem,
    WorkItem,
    WorkQueue,
    evaluation_items,
    survey_items,
    training_items,
    work_error,
)
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.shared_message import SharedMessage
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.record import RowCodec
from fedkeel.engine.trainer import MovableTrainer, SequentialTrainer, Trainer
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree


@dataclass
class _Worker:
    """A worker process, its device, the core on which it wakes, and its present item."""

    child: ChildProcess
    device: str
    core: int | None
    item: WorkItem | None = None


@dataclass(frozen=True)
class _Shared:
    """What this process and its workers both hold."""

    setup: TrainingSetup
    message: SharedMessage
    round_buffers: RoundBuffers
    states: TensorBuffers
    kept: TensorBuffers
    pictures: TensorBuffers
    trainer: MovableTrainer

    def states_of(self, split: Split) -> Tensor:
        return (self.pictures if split == "pictures" else self.states).tensors["rows"]


class Workers(KeepsClientStates):
    """Trains clients in several processes.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, from `rehearse`.
        capacity: the largest cohort.
        message: any message of this run, for the shapes.
        workers: number of processes.
        start: how processes start, None for `start_method`. ``spawn`` pickles the model once for
            each process.
        file: file of client state; None keeps it in memory.
        trainer: trains clients side by side, on the processor in this process; None trains them
            one by one.
        codec: stores some of the clients' state in compact form; None stores it as it is.
        devices: where processes train, in turn; of one type.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        message: Message,
        workers: int,
        start: StartMethod | None = None,
        *,
        file: Path | None = None,
        trainer: MovableTrainer | None = None,
        codec: RowCodec | None = None,
        devices: Sequence[str] = ("cpu",),
    ) -> None:
        self._start_method: StartMethod = start or start_method()
        allocate = fork_shared_memory if self._start_method == "fork" else shared_segment
        sums = trainer is not None
        rows, kept = most_states(setup)
        shared = shared_state(message, setup.training.personal_params)
        self._shared = _Shared(
            setup=setup,
            message=SharedMessage(specs_of(shared), allocate),
            round_buffers=RoundBuffers(setup, spec, capacity, allocate, file, sums, codec=codec),
            states=_table(rows, setup.metrics.state_size, allocate),
            kept=_table(kept, setup.metrics.kept_size, allocate),
            pictures=_table(
                len(cut_into_shards(setup, "pictures").group),
                setup.metrics.of_pictures().state_size,
                allocate,
            ),
            trainer=trainer or SequentialTrainer(setup),
        )
        self.clients = self._shared.round_buffers.clients
        self.reasons: list[str] = []
        self._devices = [devices[index % len(devices)] for index in range(workers)]
        self._on_gpu = torch.device(devices[0]).type != "cpu"
        self._workers: list[_Worker] = []
        try:
            for device in self._devices:
                self._workers.append(self._start_worker(device))
        except BaseException:
            self._end(patience=0.0)
            raise

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message."""
        setup, buffers = self._shared.setup, self._shared.round_buffers
        self._shared.message.write(message_state(message))
        jobs = self.clients.begin_round(clients)
        parallel_clients = self._shared.trainer.parallel_clients
        sums, most_sums = buffers.rows.summed, DEVICE_SUMS if self._on_gpu else MAX_SUMS
        items = training_items(
            setup, message, jobs, len(self._workers), parallel_clients, sums, most_sums
        )
        self._work(items, report_progress)
        return buffers.gather(clients)

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        buffers = self._shared.round_buffers
        self._shared.message.write(message_state(message))
        self._work(survey_items(message, self.clients.jobs(clients), len(self._workers)))
        return buffers.answers(clients)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split."""
        setup = self._shared.setup
        message = evaluation_state(params, setup.training.personal)
        if setup.training.buffers == "average":  # otherwise the workers have them
            message["buffers"] = dict(buffers)
        self._shared.message.write(message)
        shards = cut_into_shards(setup, split)
        # a GPU has room for more examples in a forward pass than a processor's cache
        of_pass = max(1, setup.eval_batch // setup.shard) if self._on_gpu else 1
        self._work(evaluation_items(shards, split, len(self._workers), of_pass))
        kept = shards.examples if metrics_of(setup, split).kept_size else 0
        return Measured(
            self._shared.states_of(split)[: len(shards.group)].clone(),
            self._shared.kept.tensors["rows"][:kept].clone(),
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """End the workers."""
        self._end(patience=0.2 if error[0] is None else 0.0)

    # ---- worker processes -----------------------------------------------------------------------

    def _start_worker(self, device: str) -> _Worker:
        child = start_child(
            _serve,
            [self._shared, device, self._devices.count(device)],
            siblings=[worker.child.pipe for worker in self._workers],
            what="The model or its loss cannot be sent to worker processes.",
            do="define it at the top level of a module, or set engine.kind = 'sequential'",
            method=self._start_method,
        )
        return _Worker(child, device, free_core(taken={worker.core for worker in self._workers}))

    def _end(self, patience: float) -> None:
        for worker in self._workers:
            worker.child.pipe.close()  # all of them, before one is waited for
        for worker in self._workers:
            worker.child.end(patience)
        self._workers.clear()

    def _work(
        self, items: Sequence[WorkItem], report_progress: ReportProgress = lambda _: None
    ) -> None:
        """Give out work items until all are done."""
        queue = WorkQueue(list(items))
        core = current_core()
        # a worker that wakes on this process's core comes last; `_replace` changes `_workers`
        for worker in sorted(self._workers, key=lambda worker: worker.core == core):
            self._give(worker, queue)
        while busy := [worker for worker in self._workers if worker.item is not None]:
            children = [worker.child for worker in busy]
            ready = wait_for_children(children, end_stopped=is_end_requested())
            for worker in busy:
                if worker.child not in ready:
                    continue
                try:
                    error, reasons = worker.child.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker, queue)
                    continue
                if error is not None:
                    raise error
                self.reasons += [reason for reason in reasons if reason not in self.reasons]
                if isinstance(worker.item, TrainItem):
                    report_progress(len(worker.item.jobs))
                worker.item = None
                self._give(worker, queue)

    def _give(self, worker: _Worker, queue: WorkQueue) -> None:
        worker.item = queue.next()
        if worker.item is None:
            return
        try:
            with woken_on_core(worker.core, worker.child.process.pid):
                worker.child.pipe.send(worker.item)
        except OSError:
            self._replace(worker, queue)

    def _replace(self, worker: _Worker, queue: WorkQueue) -> None:
        """Start a new process in place of one that died, and give out its work again."""
        worker.child.end(patience=5.0)
        code = worker.child.exit_code
        self._workers.remove(worker)
        if worker.item is not None:
            queue.retry(worker.item, f"exit code {code}", exit_reason(code))
        replacement = self._start_worker(worker.device)
        self._workers.append(replacement)
        self._give(replacement, queue)


# ---- in a worker process ------------------------------------------------------------------------


def _serve(shared: _Shared, device: str, processes: int, pipe: Connection) -> None:
    """Do work items until the pipe is closed; some processes share the device."""
    ignore_ctrl_c()
    set_numerics(shared.setup.precision)
    keep_freed_memory()
    place = _Place(shared, torch.device(device), processes)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            item = pipe.recv()
            try:
                place.work(item)
                pipe.send((None, place.trainer.reasons))
            except Exception as error:
                pipe.send((work_error(error, item), []))
    os._exit(0)


class _Place:
    """Does work items on the device of a worker process, which some processes share."""

    def __init__(self, shared: _Shared, device: torch.device, processes: int) -> None:
        self._shared, self._device, self._processes = shared, device, processes

    @cached_property
    def trainer(self) -> Trainer:
        """What trains on the device, from the first item on."""
        use_device(self._device)
        return self._shared.trainer.on(self._device, self._processes)

    def work(self, item: WorkItem) -> None:
        """Do a work item, and write what comes of it into the shared memory."""
        if isinstance(item, EvaluateItem):
            self._evaluate(item)
        elif item.is_survey:
            state = self._shared.message.on(torch.device("cpu"))
            received = message_from_state(state, item.round, item.lr)
            for job in item.jobs:
                self._shared.round_buffers.answer_survey(received, job)
        else:
            trainer = self.trainer
            received = message_from_state(
                self._shared.message.on(self._device), item.round, item.lr
            )
            self._shared.round_buffers.train(trainer, received, item.jobs)

    def _evaluate(self, item: EvaluateItem) -> None:
        shared, setup, split = self._shared, self.trainer.placed, item.split
        message = shared.message.on(self._device)
        params = evaluated_params(message)
        buffers = message_from_state(message, 0, 0.0).buffers or setup.training.network.buffers
        shards = cut_into_shards(shared.setup, split)
        for first in range(0, len(item.starts), item.shards):
            starts = item.starts[first : first + item.shards]
            of_pass = shards.size, len(starts)
            measured = evaluate_shard(setup, params, buffers, split, starts[0], of_pass)
            rows = slice(shards.rows(starts[0]).start, shards.rows(starts[-1]).stop)
            shared.states_of(split)[rows] = measured.states
            if metrics_of(setup, split).kept_size:
                kept = slice(starts[0], starts[0] + len(measured.kept))
                shared.kept.tensors["rows"][kept] = measured.kept


def _table(rows: int, columns: int, allocate: Allocate) -> TensorBuffers:
    return TensorBuffers({"rows": TensorSpec((columns,), torch.float64)}, rows, allocate)
