"""What a Ray actor does: pieces of work, as a worker process does them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.buffers import Buffers, RowBytes
from fedkeel.engine.evaluation import evaluate_shard
from fedkeel.engine.message_state import message_from_state
from fedkeel.engine.process import malloc, work_items
from fedkeel.engine.process.numerics import settle
from fedkeel.engine.process.shared_memory import allocate_aligned, private_memory
from fedkeel.engine.process.work_items import Evaluate, Piece, Train
from fedkeel.engine.ray.cluster import Carried, opened
from fedkeel.engine.rehearsal import client_state_spec
from fedkeel.engine.reply_rows import Packed, Rows
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.layout import RowLayout
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import ReadRecord, SequentialTrainer, Trainer
from fedkeel.method.context import Message


@dataclass(frozen=True)
class Cohort:
    """What the n clients of a piece keep.

    Args:
        block: [n * bytes of a row] their rows, as `RowLayout` has them.
        known: [n] whether each has a row.
    """

    block: NDArray[np.uint8]
    known: NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """What came of a piece.

    Args:
        rows: of its clients, in their order.
        scores: of an evaluation, [n, 3] by the example that each shard begins with.
        error: what was raised.
        reasons: why clients are trained in a plainer way than was asked for.
    """

    rows: Packed = field(default_factory=dict)
    scores: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    error: work_items.Plain | None = None
    reasons: list[str] = field(default_factory=list)


class Actor:
    """Trains and evaluates in one thread, and keeps nothing but the last message.

    Args:
        setup: method, model, data and seed.
        spec: what a reply looks like.
        message: shapes and types of a message.
        capacity: the most clients of a piece.
        chunk: clients trained side by side; None trains them one by one.
    """

    def __init__(
        self,
        setup: Carried,
        spec: Mapping[str, TensorSpec],
        message: Mapping[str, TensorSpec],
        capacity: int,
        chunk: int | None,
    ) -> None:
        with suppress(ValueError):  # Ctrl-C is for the process that gives out the work
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        malloc.keep()
        self._setup = opened(setup)
        settle(self._setup.precision)
        self._train: Trainer = SequentialTrainer(self._setup)
        if chunk is not None:
            from fedkeel.engine.vectorized.engine import (
                VectorizedTrainer,
            )  # takes half a second to import

            self._train = VectorizedTrainer(self._setup, chunk)
        self._rows = Rows(self._setup, spec, capacity, private_memory, sums=chunk is not None)
        self._layout = RowLayout(client_state_spec(spec))
        self._message = Buffers(message, None, private_memory)
        self._read = 0

    def ready(self) -> None:
        """Say that the actor has started."""

    def do(self, piece: Piece, sent: tuple[int, RowBytes], cohort: Cohort | None) -> Found:
        """Do a piece of work.

        Args:
            piece: the work.
            sent: number and bytes of the message.
            cohort: what the clients keep; None where they keep nothing.
        """
        number, raw = sent
        if number != self._read:
            self._message.write_bytes(raw)
            self._read = number
        try:
            if isinstance(piece, Evaluate):
                return Found(scores=self._scores(piece))
            return Found(rows=self._trained(piece, cohort), reasons=self._train.reasons)
        except Exception as error:
            return Found(error=work_items.plain(error, piece))

    def _received(self, round: int, lr: float) -> Message:
        return message_from_state(self._message.state(), round, lr)

    def _scores(self, piece: Evaluate) -> dict[int, NDArray[np.float64]]:
        received, setup = self._received(0, 0.0), self._setup
        buffers = received.buffers or setup.training.network.buffers
        return {
            start: evaluate_shard(setup, received.params, buffers, piece.split, start).numpy()
            for start in piece.starts
        }

    def _trained(self, piece: Train, cohort: Cohort | None) -> Packed:
        message, kept = self._received(piece.round, piece.lr), self._kept(piece, cohort)
        jobs = [replace(job, row=row) for row, job in enumerate(piece.jobs)]
        if piece.survey:
            for job in jobs:
                record = kept(job.client)
                self._rows.ask(message, job, None if record is None else record.state)
        else:
            self._rows.run(self._train, message, jobs, kept, lambda _: None)
        return self._rows.packed(len(jobs), piece.survey)

    def _kept(self, piece: Train, cohort: Cohort | None) -> ReadRecord:
        """Return what gives each client's row, aligned as in the store."""
        if cohort is None:
            return lambda _: None
        block = allocate_aligned(len(cohort.block), private_memory)
        block.numpy()[:] = cohort.block
        rows = self._layout.rows(block, len(piece.jobs))
        own = {
            job.client: ClientRecord({path: tensor[i] for path, tensor in rows.items()})
            for i, job in enumerate(piece.jobs)
            if cohort.known[i]
        }
        return own.get
