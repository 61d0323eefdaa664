"""The Ray engine: actors on one or several machines, which do what worker processes do.

The setup and each round's message are put into Ray's object store once, and every node reads them
there. With a work item an actor receives what its clients keep, and it sends their rows back.
Client state stays in this process. An actor that dies is replaced, and its clients are trained
again. So are those of a node that is lost, by the actors of others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeel.engine.base import ReportProgress, Split, TrainedCohort, TrainingSetup
from fedkeel.engine.buffers import TensorBuffers
from fedkeel.engine.client_states import KeepsClientStates
from fedkeel.engine.evaluation import cut_into_shards, joined, metrics_of
from fedkeel.engine.message_state import (
    PERSONAL_PARAMS,
    evaluation_state,
    message_state,
    shared_state,
)
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.process.work_items import (
    ATTEMPTS,
    TrainItem,
    WorkItem,
    WorkQueue,
    evaluation_items,
    survey_items,
    training_items,
)
from fedkeel.engine.ray.actor import Actor, StateRows, WorkResult
from fedkeel.engine.ray.cluster import connected, head_address, pickled, reason
from fedkeel.engine.ray.watch import CHECK_SECONDS, Machine, Watch
from fedkeel.engine.rehearsal import client_state_spec
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.layout import RowLayout
from fedkeel.engine.store.record import RowCodec
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree, walk

START_SECONDS = 60.0
"""Seconds in which an actor has to start while no actor is at work."""


@dataclass
class _Worker:
    """An actor, the handle of its next answer, and the item it works on; None while it starts."""

    actor: Any
    answer: Any
    item: WorkItem | None = None


class Ray(KeepsClientStates):
    """Trains clients in Ray actors of one thread each.

    Args:
        setup: method, model, data and seed.
        spec: shape and type of each tensor of a reply, from `rehearse`.
        capacity: the largest cohort.
        message: any message of this run, for the shapes.
        workers: number of actors.
        address: of a cluster; None starts Ray on this machine, and ends it with the run.
        file: file of client state; None keeps it in memory.
        parallel_clients: clients that an actor trains side by side; None trains them one by one.
        codec: stores some of the clients' state in compact form; None stores it as it is.

    Raises:
        RunError: Ray is not installed or not reached, has no free core for an actor, or the model
            cannot be sent.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        message: Message,
        workers: int,
        address: str | None = None,
        *,
        file: Path | None = None,
        parallel_clients: int | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        self._setup, self._worker_count = setup, workers
        self._parallel_clients = parallel_clients or 1
        message_spec = specs_of(shared_state(message, setup.training.personal_params))
        self._message = TensorBuffers(message_spec, None, private_memory)
        self._message_count = 0  # actors read each message once
        sums = parallel_clients is not None
        self._buffers = RoundBuffers(setup, spec, capacity, private_memory, file, sums, codec=codec)
        self.clients = self._buffers.clients
        self._layout = RowLayout(client_state_spec(spec))
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # in a row
        self.reasons: list[str] = []
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(address, workers))
            stack.callback(self._end)
            self._watch = Watch(self._ray, head_address(address))
            self.warnings = self._watch.warnings
            setup_handle = self._ray.put(pickled(setup))
            self._arguments = (setup_handle, dict(spec), message_spec, capacity, parallel_clients)
            self._class = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Actor)
            for _ in range(workers):
                self._start_worker()
            started = [worker.answer for worker in self._workers]
            self._ray.wait(started, timeout=START_SECONDS)  # most actors start before round 0
            self._exit_stack = stack.pop_all()

    # ---- what every engine does ---------------------------------------------------------------

    def train(
        self, message: Message, clients: Ints, report_progress: ReportProgress
    ) -> TrainedCohort:
        """Train clients [K] from a message."""
        self._message.write(message_state(message))
        jobs = self.clients.begin_round(clients)
        items = training_items(
            self._setup,
            message,
            jobs,
            self._worker_count,
            self._parallel_clients,
            self._buffers.rows.summed,
        )
        self._work(items, self._put_message("params", "buffers", "broadcast"), report_progress)
        return self._buffers.gather(clients)

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        self._message.write(message_state(message))
        items = survey_items(message, self.clients.jobs(clients), self._worker_count)
        self._work(items, self._put_message("params", "buffers", "broadcast"))
        return self._buffers.answers(clients)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Measured:
        """Return what is measured of the examples of a split."""
        self._message.write(evaluation_state(params, self._setup.training.personal))
        names = ["params", PERSONAL_PARAMS]
        if self._setup.training.buffers == "average":  # otherwise the actors have them
            self._message.write({"buffers": dict(buffers)})
            names.append("buffers")
        evaluated: dict[int, Measured] = {}
        shards = cut_into_shards(self._setup, split)
        items = evaluation_items(shards, split, self._worker_count)
        self._work(items, self._put_message(*names), evaluated=evaluated)
        return joined(metrics_of(self._setup, split), [evaluated[start] for start in shards.starts])

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *error: object) -> None:
        """End the actors, and Ray where it was started here."""
        self._exit_stack.close()

    # ---- actors ---------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        actor = self._class.remote(*self._arguments)
        self._workers.append(_Worker(actor, actor.ready.remote()))

    def _end(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers.clear()

    def _put_message(self, *names: str) -> Any:  # noqa: ANN401
        """Put the named fields of the message into the object store; return the handle."""
        self._message_count += 1
        row_bytes = {
            path: array
            for path, array in self._message.read_bytes().items()
            if path.split("/")[0] in names
        }
        return self._ray.put((self._message_count, row_bytes))

    def _work(
        self,
        items: Sequence[WorkItem],
        message: Any,  # noqa: ANN401
        report_progress: ReportProgress = lambda _: None,
        evaluated: dict[int, Measured] | None = None,
    ) -> None:
        """Give out work items until all are done.

        Args:
            items: the work.
            message: handle of the message in the object store.
            report_progress: is called with the number of clients that have been trained.
            evaluated: receives what is measured in an evaluation, by the start of the shard.
        """
        queue = WorkQueue(list(items))
        while True:
            for worker in self._workers:
                if worker.answer is None and (item := queue.next()) is not None:
                    worker.item = item
                    worker.answer = worker.actor.do.remote(item, message, self._states(item))
            if not queue.items and not any(worker.item for worker in self._workers):
                return
            for worker in self._answered():
                self._receive(worker, queue, report_progress, evaluated)

    def _answered(self) -> list[_Worker]:
        """Wait until an actor has answered, or several have."""
        waiting = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        at_work = any(worker.item for worker in self._workers)
        ready: list[Any] = []
        began = time.monotonic()
        while not ready and (at_work or time.monotonic() - began < START_SECONDS):
            self._watch.wait_for_head()
            ready, _ = self._ray.wait(list(waiting), timeout=min(CHECK_SECONDS, START_SECONDS))
        if not ready:
            raise RunError(
                "Ray has no free core for an actor.",
                got=f"{len(waiting)} actors of one core each, none started in "
                f"{START_SECONDS:.0f} s",
                do="wait until the cluster has a free core, or lower engine.workers",
            )
        return [waiting[answer] for answer in ready]

    def _receive(
        self,
        worker: _Worker,
        queue: WorkQueue,
        report_progress: ReportProgress,
        evaluated: dict[int, Measured] | None,
    ) -> None:
        """Take an actor's answer; replace the actor if it died."""
        item, errors = worker.item, self._ray.exceptions
        try:
            result: WorkResult | Machine = self._ray.get(worker.answer)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self._replace(worker, queue, error)
            return
        self._failed_starts = 0
        worker.item = worker.answer = None
        if isinstance(result, Machine):
            self._watch.add_machine(result)
            return
        if result.error is not None:
            raise result.error
        self.reasons += [reason for reason in result.reasons if reason not in self.reasons]
        if isinstance(item, TrainItem):
            self._buffers.rows.unpack(result.rows, item.jobs)
            if not item.is_survey:
                report_progress(len(item.jobs))
        elif evaluated is not None:
            evaluated.update(result.evaluated)

    def _replace(self, worker: _Worker, queue: WorkQueue, error: Exception) -> None:
        """Start a new actor in place of one that died, and give out its work again."""
        self._watch.wait_for_head(now=True)
        self._watch.count_nodes()
        self._workers.remove(worker)
        self._ray.kill(worker.actor)
        if worker.item is not None:
            queue.retry(worker.item, "an actor that ended", reason(error))
        else:
            self._failed_starts += 1
        if self._failed_starts >= ATTEMPTS:
            raise RunError(
                "A Ray actor cannot start.",
                got=reason(error),
                do="install fedkeel, and what the model needs, on every node of the cluster",
            ) from error
        self._start_worker()

    def _states(self, item: WorkItem) -> StateRows | None:
        """Return what the clients of a work item keep."""
        if not isinstance(item, TrainItem) or not self._layout.spec:
            return None
        count = len(item.jobs)
        block = torch.zeros(count * self._layout.nbytes, dtype=torch.uint8)
        rows, has_row = self._layout.rows(block, count), np.zeros(count, dtype=np.bool_)
        for i, job in enumerate(item.jobs):
            state = self.clients.store.read_state(job.client)
            has_row[i] = state is not None
            for path, tensor in walk(dict(state or {})):
                rows[path][i] = tensor
        return StateRows(block.numpy(), has_row)
