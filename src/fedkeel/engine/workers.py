"""The workers engine: processes of one thread each, which share buffers with this one.

The server's message is written once into shared memory, each worker trains its clients and writes
their rows, and the server finds the updates stacked. What goes through pipes is a few numbers. A
worker that dies is replaced and its clients are trained again: their rows and states are only
taken over when the whole round is done.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing

from fedkeel.engine.base import ReportProgress, Split, TrainedCohort, TrainingSetup
from fedkeel.engine.buffers import Buffers
from fedkeel.engine.evaluation import count_examples, evaluate_shard
from fedkeel.engine.message_state import message_from_state, message_state
from fedkeel.engine.process import malloc, work_items
from fedkeel.engine.process.affinity import core, here, woken_on
from fedkeel.engine.process.numerics import settle
from fedkeel.engine.process.shared_memory import fork_shared_memory, shared_segment
from fedkeel.engine.process.work_items import Piece, Tasks, Train
from fedkeel.engine.round_buffers import RoundBuffers
from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.engine.store.record import RowCodec
from fedkeel.engine.trainer import SequentialTrainer, Trainer
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.tree import State, Tree

Start = Literal["fork", "spawn"]


@cache
def beginning() -> Start:
    """Return how processes begin: forked where that is safe, which pickles and copies nothing.

    It is not where torch sees a GPU: neither autograd nor CUDA works in a process that was forked
    from one that has used them.
    """
    on_linux = sys.platform.startswith("linux")
    return "fork" if on_linux and torch.cuda.device_count() == 0 else "spawn"


@dataclass
class _Worker:
    """A process, our end of its pipe, the core on which it wakes, and what it is working on."""

    process: Any
    pipe: Connection
    core: int | None
    busy: Piece | None = None


@dataclass(frozen=True)
class _Shared:
    """What this process and its workers both see."""

    setup: TrainingSetup
    message: Buffers
    rounds: RoundBuffers
    measured: Buffers
    train: Trainer


class Workers:
    """Trains clients in several processes.

    Args:
        setup: method, model, data and seed.
        spec: what a reply looks like, from `rounds.rehearse`.
        capacity: the largest cohort.
        message: any message of this run, for the shapes.
        workers: number of processes.
        start: how they begin, None for `beginning`. ``spawn`` pickles the model once for each
            process.
        file: where client state lies; None for memory.
        chunks: what trains clients side by side; None trains them one by one.
        codec: stores some of the clients' state in compact form; None stores it as it is.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        spec: Mapping[str, TensorSpec],
        capacity: int,
        message: Message,
        workers: int,
        start: Start | None = None,
        *,
        file: Path | None = None,
        chunks: Trainer | None = None,
        codec: RowCodec | None = None,
    ) -> None:
        start = start or beginning()
        memory = fork_shared_memory if start == "fork" else shared_segment
        most = max(count_examples(setup, "test"), count_examples(setup, "clients"))
        self._shared = _Shared(
            setup=setup,
            message=Buffers(specs_of(message_state(message)), None, memory),
            rounds=RoundBuffers(
                setup, spec, capacity, memory, file, sums=chunks is not None, codec=codec
            ),
            train=chunks or SequentialTrainer(setup),
            measured=Buffers({"rows": TensorSpec((3,), torch.float64)}, most, memory),
        )
        self._method = start
        self._context: Any = multiprocessing.get_context(start)
        self.reasons: list[str] = []
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._start())
        except BaseException:
            self._end(patience=0.0)
            raise

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [w.pipe for w in self._workers] + [ours] if self._method == "fork" else []
        process = self._context.Process(
            target=_serve, args=(self._shared, theirs, inherited), daemon=True
        )
        with warnings.catch_warnings():  # a progress bar's thread may be alive, and is not used
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise RunError(
                    "The model or its loss cannot be sent to worker processes.",
                    got=str(error).strip().splitlines()[0],
                    do="define it at the top level of a module, or set engine.kind = 'sequential'",
                ) from error
        theirs.close()
        return _Worker(process, ours, core(taken={worker.core for worker in self._workers}))

    def train(self, message: Message, clients: Ints, tick: ReportProgress) -> TrainedCohort:
        """Train clients [K] from a message."""
        self._shared.message.write(message_state(message))
        setup, lanes = self._shared.setup, self._shared.train.parallel_clients
        jobs = self._shared.rounds.begin(clients)
        self._work(work_items.training(setup, message, jobs, len(self._workers), lanes), tick)
        return self._shared.rounds.gather(clients)

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        self._shared.message.write(message_state(message))
        jobs = self._shared.rounds.jobs(clients)
        self._work(work_items.survey(message, jobs, len(self._workers)), lambda _: None)
        return self._shared.rounds.answers(clients)

    def done(self, clients: Ints) -> Ints:
        """Return [K] local steps that clients have made in earlier rounds."""
        return self._shared.rounds.done(clients)

    def commit(self, trained: TrainedCohort, keep: Ints) -> None:
        """Take the state of the clients `keep`."""
        self._shared.rounds.commit(trained, keep)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Tensor:
        """Return [N, 3] of the examples of a split."""
        setup = self._shared.setup
        sent: State = {"params": dict(params)}
        if setup.training.buffers == "average":  # otherwise the workers have them
            sent["buffers"] = dict(buffers)
        self._shared.message.write(sent)
        count = count_examples(setup, split)
        work = work_items.evaluation(setup, split, count, len(self._workers))
        self._work(work, lambda _: None)
        return self._shared.measured.tensors["rows"][:count].clone()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays."""
        return self._shared.rounds.state()

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self._shared.rounds.store.snapshot_saved()

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take client state from a checkpoint."""
        self._shared.rounds.restore(arrays)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """End the workers."""
        self._end(patience=0.2 if error[0] is None else 0.0)

    def _end(self, patience: float) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            _collect(worker, patience)
        self._workers.clear()

    def _work(self, work: Sequence[Piece], tick: ReportProgress) -> None:
        """Give out pieces of work until all are done."""
        tasks = Tasks(list(work))
        own = here()
        # one that wakes on this core may keep it; and a worker found dead is replaced while we go
        for worker in sorted(self._workers, key=lambda one: one.core == own):
            self._give(worker, tasks)
        while busy := [w for w in self._workers if w.busy is not None]:
            ready = wait([w.pipe for w in busy])
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                try:
                    error, reasons = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker, tasks)
                    continue
                if error is not None:
                    raise work_items.raised(error)
                self.reasons += [one for one in reasons if one not in self.reasons]
                if isinstance(worker.busy, Train):
                    tick(len(worker.busy.jobs))
                worker.busy = None
                self._give(worker, tasks)

    def _give(self, worker: _Worker, tasks: Tasks) -> None:
        piece = tasks.next()
        if piece is None:
            return
        worker.busy = piece
        try:
            with woken_on(worker.core, worker.process.pid):
                worker.pipe.send(piece)
        except OSError:
            self._replace(worker, tasks)

    def _replace(self, worker: _Worker, tasks: Tasks) -> None:
        """Start a new process in place of one that died, and give out its work again."""
        worker.pipe.close()
        _collect(worker, patience=5.0)
        code = worker.process.exitcode
        self._workers.remove(worker)
        if worker.busy is not None:
            tasks.again(worker.busy, f"exit code {code}", _DEATHS.get(code))
        fresh = self._start()
        self._workers.append(fresh)
        self._give(fresh, tasks)


def _collect(worker: _Worker, patience: float) -> None:
    """Wait for a worker to end, and make it end where it does not within some seconds."""
    worker.process.join(timeout=patience)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


_DEATHS = {
    -9: "-9 is usually the system's answer to a lack of memory",
    1: "where processes are spawned, a script's own calls have to stand under "
    "`if __name__ == '__main__':`",
}
"""Why a worker may have died, by its exit code."""


def _serve(state: _Shared, pipe: Connection, others: Sequence[Connection]) -> None:
    """Work until the pipe is closed. Runs in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    settle(state.setup.precision)
    malloc.keep()
    parent = os.getppid()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while os.getppid() == parent:
            piece = pipe.recv()
            try:
                _do(state, piece)
                pipe.send((None, state.train.reasons))
            except Exception as error:
                pipe.send((work_items.plain(error, piece), []))
    os._exit(0)


def _do(state: _Shared, piece: Piece) -> None:
    setup, message = state.setup, state.message.state()
    if isinstance(piece, Train):
        received = message_from_state(message, piece.round, piece.lr)
        if not piece.survey:
            state.rounds.run(state.train, received, piece.jobs, lambda _: None)
            return
        for job in piece.jobs:
            state.rounds.ask(received, job)
        return
    received = message_from_state(message, 0, 0.0)
    buffers = received.buffers or setup.training.network.buffers
    for start in piece.starts:
        rows = evaluate_shard(setup, received.params, buffers, piece.split, start)
        state.measured.tensors["rows"][start : start + len(rows)] = rows
