"""The workers engine: processes of one thread each, which share buffers with this one.

The server's message is written once into shared memory, each worker trains its clients and writes
their rows, and the server finds the updates stacked. What goes through pipes is a few numbers. A
worker that dies is replaced and its clients are trained again: their rows and states are only
taken over when the whole round is done.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, multiprocessing

from fedkeel.data import batches
from fedkeel.engine import heap
from fedkeel.engine.buffers import Buffers, Spec, segment, shared, specs
from fedkeel.engine.loop import OneByOne, Trainer, evaluate_shard, examples
from fedkeel.engine.rounds import RoundBuffers, flat, unflat
from fedkeel.engine.world import Job, Split, Tick, Trained, World
from fedkeel.errors import FedkeelError, RunError, TrainingError
from fedkeel.method.context import ByPart, Ints, Message
from fedkeel.tree import State, Tree

if TYPE_CHECKING:
    from fedkeel.engine.chunks import Chunks

ATTEMPTS = 3
"""How often the same clients may end their worker before the run is given up."""


Start = Literal["fork", "spawn"]
START: Start = "fork" if sys.platform.startswith("linux") else "spawn"
"""How workers begin: forked where that is safe, which needs no pickling and copies no data."""


@dataclass
class _Worker:
    """A process, our end of its pipe, and what it is working on."""

    process: Any
    pipe: Connection
    busy: Any = None


@dataclass(frozen=True)
class _Shared:
    """What this process and its workers both see."""

    world: World
    message: Buffers
    rounds: RoundBuffers
    measured: Buffers
    train: Trainer
    lanes: int = 1


@dataclass(frozen=True)
class _Train:
    round: int
    lr: float
    jobs: tuple[Job, ...]
    survey: bool = False


@dataclass(frozen=True)
class _Evaluate:
    split: Split
    starts: tuple[int, ...]


@dataclass
class _Tasks:
    """Pieces of work that are still to be given out, largest first."""

    pieces: list[Any]
    failures: dict[Any, int] = field(default_factory=dict)

    def next(self) -> Any:  # noqa: ANN401
        return self.pieces.pop(0) if self.pieces else None


class Workers:
    """Trains clients in several processes.

    Args:
        world: method, model, data and seed.
        spec: what a reply looks like, from `rounds.rehearse`.
        capacity: the largest cohort.
        message: any message of this run, for the shapes.
        workers: number of processes.
        start: how they begin. ``spawn`` pickles the model once for each process.
        file: where client state lies; None for memory.
        chunks: what trains clients side by side; None trains them one by one.
    """

    def __init__(
        self,
        world: World,
        spec: Mapping[str, Spec],
        capacity: int,
        message: Message,
        workers: int,
        start: Start = START,
        *,
        file: Path | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        memory = shared if start == "fork" else segment
        most = max(examples(world, "test"), examples(world, "clients"))
        self._shared = _Shared(
            world=world,
            message=Buffers(specs(flat(message)), None, memory),
            rounds=RoundBuffers(world, spec, capacity, memory, file, sums=chunks is not None),
            train=chunks or OneByOne(world),
            measured=Buffers({"rows": Spec((3,), torch.float64)}, most, memory),
            lanes=1 if chunks is None else chunks.lanes,
        )
        self._method = start
        self._context: Any = multiprocessing.get_context(start)
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
        return _Worker(process, ours)

    def train(self, message: Message, clients: Ints, tick: Tick) -> Trained:
        """Train clients [K] from a message."""
        self._shared.message.write(flat(message))
        world = self._shared.world
        local, sizes = world.bench.local, world.federation.sizes
        found = self._shared.rounds.jobs(clients)
        costs = {job: batches.processed(local, int(sizes[job.client]), job.done) for job in found}
        jobs = sorted(found, key=lambda job: costs[job], reverse=True)
        pieces = [
            _Train(message.round, message.lr, tuple(jobs[a:b]))
            for a, b in self._cut([costs[job] for job in jobs])
        ]
        self._work(pieces, tick)
        return self._shared.rounds.gather(clients)

    def _cut(self, costs: Sequence[int]) -> list[tuple[int, int]]:
        """Cut a round's clients into pieces: as many lanes in each as there are, or guided."""
        lanes, workers = self._shared.lanes, len(self._workers)
        if lanes == 1:
            return _guided(costs, workers)
        return _even(costs, max(workers, workers * math.ceil(len(costs) / (lanes * workers))))

    def survey(self, message: Message, clients: Ints) -> ByPart:
        """Return the answers of clients [K] to the surveys."""
        self._shared.message.write(flat(message))
        jobs = self._shared.rounds.jobs(clients)
        pieces = [
            _Train(message.round, message.lr, tuple(jobs[a:b]), survey=True)
            for a, b in _guided([1] * len(jobs), len(self._workers))
        ]
        self._work(pieces, lambda _: None)
        return self._shared.rounds.answers(clients)

    def commit(self, trained: Trained, keep: Ints) -> None:
        """Write the state of the clients `keep`."""
        self._shared.rounds.commit(trained, keep)

    def evaluate(self, params: Tree, buffers: Tree, split: Split) -> Tensor:
        """Return [N, 3] of the examples of a split."""
        world = self._shared.world
        sent: State = {"params": dict(params)}
        if world.bench.buffers == "average":  # otherwise the workers have them
            sent["buffers"] = dict(buffers)
        self._shared.message.write(sent)
        starts = range(0, examples(world, split), world.eval_batch)
        pieces = [
            _Evaluate(split, tuple(starts[a:b]))
            for a, b in _guided([1] * len(starts), len(self._workers))
        ]
        self._work(pieces, lambda _: None)
        return self._shared.measured.tensors["rows"][: examples(world, split)].clone()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return client state as arrays."""
        return self._shared.rounds.state()

    def saved(self) -> None:
        """Hear that the checkpoint of the last state is complete."""
        self._shared.rounds.store.saved()

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

    def _work(self, pieces: Sequence[Any], tick: Tick) -> None:
        """Give out pieces of work until all are done."""
        tasks = _Tasks(list(pieces))
        for worker in list(self._workers):  # a worker found dead is replaced while we go
            self._give(worker, tasks)
        while busy := [w for w in self._workers if w.busy is not None]:
            ready = wait([w.pipe for w in busy])
            for worker in busy:
                if worker.pipe not in ready:
                    continue
                try:
                    error = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker, tasks)
                    continue
                if error is not None:
                    raise _raised(error)
                if isinstance(worker.busy, _Train):
                    tick(len(worker.busy.jobs))
                worker.busy = None
                self._give(worker, tasks)

    def _give(self, worker: _Worker, tasks: _Tasks) -> None:
        piece = tasks.next()
        if piece is None:
            return
        worker.busy = piece
        try:
            worker.pipe.send(piece)
        except OSError:
            self._replace(worker, tasks)

    def _replace(self, worker: _Worker, tasks: _Tasks) -> None:
        """Start a new process in place of one that died, and give it the same work.

        Clients that were given out together are given out together again, with the same sums; the
        second time one by one, so that one which ends every worker is found.
        """
        worker.pipe.close()
        _collect(worker, patience=5.0)
        code = worker.process.exitcode
        self._workers.remove(worker)
        piece = worker.busy
        failures = tasks.failures.get(piece, 0) + 1
        if failures >= ATTEMPTS:
            raise TrainingError(
                f"A worker process died {ATTEMPTS} times on the same work.",
                got=f"exit code {code} on {_named(piece)}",
                why=_DEATHS.get(code),
                do="use fewer workers (engine.workers), or engine.kind = 'sequential' to see where",
            )
        again = [piece] if failures == 1 else _apart(piece)
        tasks.failures.update(dict.fromkeys(again, failures))
        tasks.pieces[:0] = again
        fresh = self._start()
        self._workers.append(fresh)
        self._give(fresh, tasks)


def _collect(worker: _Worker, patience: float) -> None:
    """Wait for a worker to end, and make it end where it does not within some seconds."""
    worker.process.join(timeout=patience)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _guided(costs: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into pieces that cost less and less, so that all workers end together.

    A piece takes the next ones up to half of a worker's share of what is left, and at least one.

    Args:
        costs: [n] of each, the largest first.
        workers: number of workers.

    >>> _guided([1] * 10, 2)
    [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10)]
    >>> _guided([9, 5, 2, 2, 1, 1], 2)
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    """
    pieces, start, left = [], 0, sum(costs)
    while start < len(costs):
        stop, spent = start + 1, costs[start]
        while stop < len(costs) and (spent + costs[stop]) * 2 * workers <= left:
            spent += costs[stop]
            stop += 1
        pieces.append((start, stop))
        start, left = stop, left - spent
    return pieces


def _even(costs: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into at most so many pieces of about the same cost.

    >>> _even([3, 3, 2, 2, 1, 1], 2)
    [(0, 2), (2, 6)]
    """
    ends = np.cumsum(costs)
    cuts = [0]
    for i in range(1, pieces):
        cuts.append(int(np.searchsorted(ends, ends[-1] * i / pieces - 1e-9)) + 1)
    cuts.append(len(costs))
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


_DEATHS = {
    -9: "-9 is usually the system's answer to a lack of memory",
    1: "where processes are spawned, a script's own calls have to stand under "
    "`if __name__ == '__main__':`",
}
"""Why a worker may have died, by its exit code."""


def _apart(piece: _Train | _Evaluate) -> list[_Train | _Evaluate]:
    """Return the clients of a piece as pieces of their own."""
    if isinstance(piece, _Train):
        return [replace(piece, jobs=(job,)) for job in piece.jobs]
    return [piece]


def _named(piece: object) -> str:
    if isinstance(piece, _Train):
        return "client " + ", ".join(str(job.client) for job in piece.jobs)
    return "an evaluation"


def _raised(error: dict[str, Any]) -> FedkeelError:
    """Make the error again that a worker sent as plain values."""
    kinds = {kind.__name__: kind for kind in FedkeelError.__subclasses__()}
    return kinds.get(error.pop("kind"), TrainingError)(**error)


def _serve(state: _Shared, pipe: Connection, others: Sequence[Connection]) -> None:
    """Work until the pipe is closed. Runs in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    torch.set_num_threads(1)
    heap.keep()
    parent = os.getppid()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while os.getppid() == parent:
            piece = pipe.recv()
            try:
                _do(state, piece)
                pipe.send(None)
            except FedkeelError as error:
                pipe.send(_plain(error))
            except Exception as error:
                pipe.send(_plain(TrainingError(f"A worker failed on {_named(piece)}.", got=error)))
    os._exit(0)


def _plain(error: FedkeelError) -> dict[str, Any]:
    """Return an error as plain values, which pass through a pipe."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "got": None if error.got is None else str(error.got),
        "expected": None if error.expected is None else str(error.expected),
        "why": error.why,
        "do": error.do,
    }


def _do(state: _Shared, piece: _Train | _Evaluate) -> None:
    world, message = state.world, state.message.nested()
    if isinstance(piece, _Train):
        received = unflat(message, piece.round, piece.lr)
        if not piece.survey:
            state.rounds.run(state.train, received, piece.jobs, lambda _: None)
            return
        for job in piece.jobs:
            state.rounds.ask(world, received, job)
        return
    received = unflat(message, 0, 0.0)
    buffers = received.buffers or world.bench.network.buffers
    for start in piece.starts:
        rows = evaluate_shard(world, received.params, buffers, piece.split, start)
        state.measured.tensors["rows"][start : start + len(rows)] = rows
