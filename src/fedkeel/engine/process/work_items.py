"""A round cut into pieces of work, which processes or machines take one after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedkeel.data import batches
from fedkeel.engine.base import ClientJob, Split, TrainingSetup
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.context import Message

ATTEMPTS = 3
"""How often the same clients may end their worker before the run is given up."""


@dataclass(frozen=True)
class Train:
    """Clients to be trained, or asked.

    Args:
        round: rounds completed.
        lr: local learning rate.
        jobs: the clients.
        survey: whether they answer the surveys and do not train.
    """

    round: int
    lr: float
    jobs: tuple[ClientJob, ...]
    survey: bool = False


@dataclass(frozen=True)
class Evaluate:
    """Shards of an evaluation, by the example that each begins with."""

    split: Split
    starts: tuple[int, ...]


Piece = Train | Evaluate


@dataclass
class Tasks:
    """Pieces of work that are still to be given out, largest first."""

    pieces: list[Piece]
    failures: dict[Piece, int] = field(default_factory=dict)

    def next(self) -> Piece | None:
        """Return the next piece, None where there is none left."""
        return self.pieces.pop(0) if self.pieces else None

    def again(self, piece: Piece, got: str, why: str | None) -> None:
        """Take back a piece whose worker died, to be given out first.

        Clients that were given out together are given out together again, with the same sums; the
        second time one by one, so that one which ends every worker is found.

        Args:
            piece: the piece.
            got: how the worker ended.
            why: what usually ends one so.

        Raises:
            TrainingError: it is not the first or second worker that died of this work.
        """
        failures = self.failures.get(piece, 0) + 1
        if failures >= ATTEMPTS:
            raise TrainingError(
                f"A worker process died {ATTEMPTS} times on the same work.",
                got=f"{got} on {named(piece)}",
                why=why,
                do="use fewer workers (engine.workers), or engine.kind = 'sequential' to see where",
            )
        pieces = [piece] if failures == 1 else _apart(piece)
        self.failures.update(dict.fromkeys(pieces, failures))
        self.pieces[:0] = pieces


def _apart(piece: Piece) -> list[Piece]:
    """Return the clients of a piece as pieces of their own."""
    if isinstance(piece, Train):
        return [replace(piece, jobs=(job,)) for job in piece.jobs]
    return [piece]


def named(piece: Piece) -> str:
    """Return a piece in words."""
    if isinstance(piece, Train):
        return "client " + ", ".join(str(job.client) for job in piece.jobs)
    return "an evaluation"


# ---- cutting ------------------------------------------------------------------------------------


def training(
    setup: TrainingSetup, message: Message, found: Sequence[ClientJob], workers: int, lanes: int
) -> list[Piece]:
    """Cut the training of a round: as many lanes in each piece as there are, or guided."""
    local, sizes = setup.training.local, setup.federation.sizes
    spent = [batches.count_examples(local, int(sizes[job.client]), job.steps_done) for job in found]
    order = sorted(range(len(found)), key=spent.__getitem__, reverse=True)  # stable
    jobs, costs = [found[i] for i in order], [spent[i] for i in order]
    if lanes == 1:
        cuts = guided(costs, workers)
    else:
        cuts = even(costs, max(workers, workers * math.ceil(len(costs) / (lanes * workers))))
    return [Train(message.round, message.lr, tuple(jobs[a:b])) for a, b in cuts]


def survey(message: Message, jobs: Sequence[ClientJob], workers: int) -> list[Piece]:
    """Cut the survey of a round."""
    cuts = guided([1] * len(jobs), workers)
    return [Train(message.round, message.lr, tuple(jobs[a:b]), survey=True) for a, b in cuts]


def evaluation(setup: TrainingSetup, split: Split, count: int, workers: int) -> list[Piece]:
    """Cut an evaluation of `count` examples."""
    starts = range(0, count, setup.shard)
    cuts = guided([1] * len(starts), workers)
    return [Evaluate(split, tuple(starts[a:b])) for a, b in cuts]


def guided(costs: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into pieces that cost less and less, so that all workers end together.

    A piece takes the next ones up to half of a worker's share of what is left, and at least one.

    Args:
        costs: [n] of each, the largest first.
        workers: number of workers.

    >>> guided([1] * 10, 2)
    [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10)]
    >>> guided([9, 5, 2, 2, 1, 1], 2)
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


def even(costs: Sequence[int], pieces: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into at most so many pieces of about the same cost.

    >>> even([3, 3, 2, 2, 1, 1], 2)
    [(0, 2), (2, 6)]
    """
    if not costs:
        return []
    ends = np.cumsum(costs)
    cuts = [0]
    for i in range(1, pieces):
        cuts.append(int(np.searchsorted(ends, ends[-1] * i / pieces - 1e-9)) + 1)
    cuts.append(len(costs))
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


# ---- errors -------------------------------------------------------------------------------------

Plain = dict[str, Any]
"""An error as plain values, which pass from one process to another."""


def plain(error: Exception, piece: Piece) -> Plain:
    """Return what a piece raised as plain values."""
    if not isinstance(error, FedkeelError):
        error = TrainingError(f"A worker failed on {named(piece)}.", got=error)
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "got": None if error.got is None else str(error.got),
        "expected": None if error.expected is None else str(error.expected),
        "why": error.why,
        "do": error.do,
    }


def raised(error: Plain) -> FedkeelError:
    """Make an error again of its plain values."""
    kinds = {kind.__name__: kind for kind in FedkeelError.__subclasses__()}
    return kinds.get(error["kind"], TrainingError)(
        **{name: value for name, value in error.items() if name != "kind"}
    )
