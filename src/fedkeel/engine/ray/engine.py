"""The Ray engine: actors, on this machine or on several, that do what worker processes do.

The world and each round's message are put into Ray's object store once, and every node reads them
there. What crosses a network besides: with its work an actor gets what its clients keep, and it
gives their rows back. Client state stays in this process. An actor that dies is replaced, and its
clients are trained again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.engine.base import ReportProgress, Split, TrainedCohort, TrainingSetup
from fedkeel.engine.buffers import Buffers
from fedkeel.engine.evaluation import count_examples
from fedkeel.engine.message_state import message_state
from fedkeel.engine.process import work_items
from fedkeel.engine.process.shared_memory import private_memory
from fedkeel.engine.process.work_items import ATTEMPTS, Piece, Tasks, Train
from fedkeel.engine.ray.actor import Actor, Cohort, Found
from fedkeel.engine.ray.cluster import carried, connected, reason
from fedkeel.engine.rehearsal import client_state_spec
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.layout import RowLayout
from fedkeel.engine.store.record import RowCodec
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.tree import Tree, walk

PATIENCE = 60.0
"""Seconds in which an actor has to start where none is at work."""


@dataclass
class _Worker:
    """An actor, what it will answer, and what it is working on; None while it starts."""

    actor: Any
    answer: Any
    busy: Piece | None = None


class Ray:
    """Trains clients in Ray actors of one thread each.

    Args:
        setup: method, model, data and seed.
        spec: what a reply looks like, from `rounds.rehearse`.
        capacity: the largest cohort.
        message: any message of this run, for the shapes.
        workers: number of actors.
        address: of a cluster; None starts Ray on this machine, and ends it with the run.
        file: where client state lies; None for memory.
        chunk: clients that an actor trains side by side; None trains them one by one.
        codec: stores some of the clients' state in compact form; None stores it as it is.

    Raises:
        RunError: Ray is not installed or not reached, has no room for the actors, or the model
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
        chunk: int | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        self._setup, self._lanes, self._wanted = setup, chunk or 1, workers
        self._message = Buffers(specs_of(message_state(message)), None, private_memory)
        sums = chunk is not None
        self._rounds = RoundBuffers(setup, spec, capacity, private_memory, file, sums, codec=codec)
        self._kept = client_state_spec(spec)
        self._sent = 0  # messages so far: actors read each of them once
        self._workers: list[_Worker] = []
        self._failed = 0  # actors in a row that could not start
        self.reasons: list[str] = []
        with ExitStack() as open_now:
            self._ray = open_now.enter_context(connected(address, workers))
            open_now.callback(self._end)
            shapes = specs_of(message_state(message))
            self._given = (self._ray.put(carried(setup)), dict(spec), shapes, capacity, chunk)
            self._class = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Actor)
            for _ in range(workers):
                self._start()
            first = [worker.answer for worker in self._workers]
            self._ray.wait(first, timeout=PATIENCE)  # who can start does so before round 0
            self._open = open_now.pop_all()

    # ---- what every engine does ---------------------------------------------------------------

    def train(self, message: Message, clients: Ints, tick: ReportProgress) -> TrainedCohort:
        """Train clients [K] from a message."""
        self._message.write(message_state(message))
        jobs = self._rounds.begin(clients)
        work = work_items.training(self._setup, message, jobs, self._wanted, self._lanes)
        self._work(work, self._put("params", "buffers", "broadcast"), tick)
        return self._rounds.gather(clients)

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        self._message.write(message_state(message))
        work = work_items.survey(message, self._rounds.jobs(clients), self._wanted)
        self._work(work, self._put("params", "buffers", "broadcast"), lambda _: None)
        return self._rounds.answers(clients)

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._rounds.done(clients)

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Take the state of the clients `keep`."""
        self._rounds.commit(trained, keep)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Tensor:
        """Return [N, 3] of the examples of a split."""
        self._message.write({"params": dict(params)})
        sent = ["params"]
        if self._setup.training.buffers == "average":  # otherwise the actors have them
            self._message.write({"buffers": dict(buffers)})
            sent.append("buffers")
        count = count_examples(self._setup, split)
        scores = torch.empty(count, 3, dtype=torch.float64)
        work = work_items.evaluation(self._setup, split, count, self._wanted)
        self._work(work, self._put(*sent), lambda _: None, scores)
        return scores

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays."""
        return self._rounds.state()

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self._rounds.store.snapshot_saved()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take client state from a checkpoint."""
        self._rounds.restore(arrays)

    def __enter__(self) -> Ray:
        return self

    def __exit__(self, *error: object) -> None:
        """End the actors, and Ray where it was started here."""
        self._open.close()

    # ---- actors ---------------------------------------------------------------------------------

    def _start(self) -> None:
        actor = self._class.remote(*self._given)
        self._workers.append(_Worker(actor, actor.ready.remote()))

    def _end(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers.clear()

    def _put(self, *names: str) -> Any:  # noqa: ANN401
        """Put what is sent into the object store."""
        raw = self._message.read_bytes()
        self._sent += 1
        wanted = {path: one for path, one in raw.items() if path.split("/")[0] in names}
        return self._ray.put((self._sent, wanted))

    def _work(
        self,
        work: Sequence[Piece],
        sent: Any,  # noqa: ANN401
        tick: ReportProgress,
        scores: Tensor | None = None,
    ) -> None:
        """Give out pieces of work until all are done.

        Args:
            work: the pieces.
            sent: the message, in the object store.
            tick: hears how many clients have been trained.
            scores: [N, 3] where an evaluation is written.
        """
        tasks = Tasks(list(work))
        while True:
            for worker in self._workers:
                if worker.answer is None and (piece := tasks.next()) is not None:
                    worker.busy = piece
                    worker.answer = worker.actor.do.remote(piece, sent, self._cohort(piece))
            if not tasks.pieces and not any(worker.busy for worker in self._workers):
                return
            for worker in self._answered():
                self._hear(worker, tasks, tick, scores)

    def _answered(self) -> list[_Worker]:
        """Wait for an actor, or several."""
        waiting = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        at_work = any(worker.busy for worker in self._workers)
        ready, _ = self._ray.wait(list(waiting), timeout=None if at_work else PATIENCE)
        if not ready:
            raise RunError(
                "Ray has no room for an actor.",
                got=f"{len(waiting)} actors of one core each, none started in {PATIENCE:.0f} s",
                do="wait until the cluster has a free core, or lower engine.workers",
            )
        return [waiting[answer] for answer in ready]

    def _hear(
        self, worker: _Worker, tasks: Tasks, tick: ReportProgress, scores: Tensor | None
    ) -> None:
        """Take an actor's answer; replace it where it died."""
        piece, errors = worker.busy, self._ray.exceptions
        try:
            found: Found | None = self._ray.get(worker.answer)
        except (errors.RayActorError, errors.ObjectLostError) as error:
            self._replace(worker, tasks, error)
            return
        self._failed = 0
        worker.busy = worker.answer = None
        if piece is None or found is None:
            return
        if found.error is not None:
            raise work_items.raised(found.error)
        self.reasons += [one for one in found.reasons if one not in self.reasons]
        if isinstance(piece, Train):
            self._rounds.rows.unpack(found.rows, piece.jobs)
            if not piece.survey:
                tick(len(piece.jobs))
        elif scores is not None:
            for start, rows in found.scores.items():
                scores.numpy()[start : start + len(rows)] = rows

    def _replace(self, worker: _Worker, tasks: Tasks, error: Exception) -> None:
        """Start a new actor in place of one that died, and give out its work again."""
        self._workers.remove(worker)
        self._ray.kill(worker.actor)
        if worker.busy is not None:
            tasks.again(worker.busy, "an actor that ended", reason(error))
        else:
            self._failed += 1
        if self._failed >= ATTEMPTS:
            raise RunError(
                "A Ray actor cannot start.",
                got=reason(error),
                do="install fedkeel, and what the model needs, on every node of the cluster",
            ) from error
        self._start()

    def _cohort(self, piece: Piece) -> Cohort | None:
        """Return what the clients of a piece keep."""
        if not isinstance(piece, Train) or not self._kept:
            return None
        layout, count = RowLayout(self._kept), len(piece.jobs)
        block = torch.zeros(count * layout.nbytes, dtype=torch.uint8)
        rows, known = layout.rows(block, count), np.zeros(count, dtype=np.bool_)
        for i, job in enumerate(piece.jobs):
            own = self._rounds.store.read_state(job.client)
            known[i] = own is not None
            for path, tensor in walk(dict(own or {})):
                rows[path][i] = tensor
        return Cohort(block.numpy(), known)
