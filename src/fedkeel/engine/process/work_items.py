"""Work items: a round or an evaluation cut into pieces, which processes or machines do in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedkeel.data import batches
from fedkeel.engine.base import ClientJob, Split, TrainingSetup
from fedkeel.engine.evaluation import Shards
from fedkeel.engine.process.forking import portable_error
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.method.context import Message

ATTEMPTS = 3
"""A run is given up after so many workers died on the same clients."""

MAX_SUMS = 128
"""Sums of updates that a round leaves, at most, where clients are trained one by one. It bounds the
memory, and leaves enough work items for as many workers."""


DEVICE_SUMS = 24
"""The same where GPUs train them, from which each sum is copied: 24 are cut evenly for 2, 3, 4, 6
and 8 GPUs."""


@dataclass(frozen=True)
class TrainItem:
    """Clients to train, or to survey.

    Args:
        round: rounds completed.
        lr: local learning rate.
        jobs: the clients.
        is_survey: whether the clients answer the surveys and do not train.
        is_divisible: whether the clients may be trained apart from each other. It would change the
            rounding of those that are trained side by side or added up.
    """

    round: int
    lr: float
    jobs: tuple[ClientJob, ...]
    is_survey: bool = False
    is_divisible: bool = True

    def __str__(self) -> str:
        return "client " + ", ".join(str(job.client) for job in self.jobs)


@dataclass(frozen=True)
class EvaluateItem:
    """Shards of an evaluation, each by the index of its first example.

    Args:
        split: what is evaluated.
        starts: of the shards, which follow one another.
        shards: how many are measured in one forward pass.
    """

    split: Split
    starts: tuple[int, ...]
    shards: int = 1

    def __str__(self) -> str:
        return "an evaluation"


WorkItem = TrainItem | EvaluateItem


@dataclass
class WorkQueue:
    """Work items that are still to be given out, largest first."""

    items: list[WorkItem]
    failures: dict[WorkItem, int] = field(default_factory=dict)

    def next(self) -> WorkItem | None:
        """Return the next item, None where there is none left."""
        return self.items.pop(0) if self.items else None

    def retry(self, item: WorkItem, got: str, why: str | None) -> None:
        """Take back the item of a worker that died; it is the next to be given out.

        After the second death its clients are given out one by one, where that changes no bit, to
        find the client that ends every worker.

        Args:
            item: the item.
            got: how the worker ended.
            why: what usually ends a worker this way.

        Raises:
            TrainingError: `ATTEMPTS` workers died on this work.
        """
        failures = self.failures.get(item, 0) + 1
        if failures >= ATTEMPTS:
            raise TrainingError(
                f"A worker process died {ATTEMPTS} times on the same work.",
                got=f"{got} on {item}",
                why=why,
                do="use fewer workers (engine.workers), or engine.kind = 'sequential' to see where",
            )
        items: list[WorkItem] = [item]
        if failures > 1 and isinstance(item, TrainItem) and item.is_divisible:
            items = [replace(item, jobs=(job,)) for job in item.jobs]
        self.failures.update(dict.fromkeys(items, failures))
        self.items[:0] = items


def work_error(error: Exception, item: WorkItem) -> FedkeelError:
    """Return what a work item raised as an error that can be sent to another process."""
    if not isinstance(error, FedkeelError):
        error = TrainingError(f"A worker failed on {item}.", got=error)
    return portable_error(error)


# ---- cutting ------------------------------------------------------------------------------------


def training_items(
    setup: TrainingSetup,
    message: Message,
    jobs: Sequence[ClientJob],
    workers: int,
    parallel_clients: int,
    sums: bool,
    most_sums: int = MAX_SUMS,
) -> list[TrainItem]:
    """Cut the training of a round: into client groups, or into decreasing parts of single clients.

    Where the cut decides how clients are rounded, it does not depend on the number of workers.

    Args:
        setup: method, model, data and seed.
        message: what the server sent.
        jobs: the clients of the round.
        workers: number of workers.
        parallel_clients: about how many clients are trained side by side.
        sums: whether the updates of a work item are added up.
        most_sums: sums that the round leaves, at most, where clients are trained one by one.
    """
    local, sizes = setup.training.local, setup.federation.sizes
    examples = [
        batches.count_examples(local, int(sizes[job.client]), job.steps_done) for job in jobs
    ]
    order = sorted(range(len(jobs)), key=examples.__getitem__, reverse=True)  # stable
    jobs, costs = [jobs[i] for i in order], [examples[i] for i in order]
    is_divisible = parallel_clients == 1 and not sums
    if is_divisible:
        cuts = decreasing_cuts(costs, workers)
    elif parallel_clients == 1:
        cuts = equal_cuts(costs, most_sums)
    else:
        cuts = equal_cuts(costs, math.ceil(len(costs) / parallel_clients))
    return [
        TrainItem(message.round, message.lr, tuple(jobs[a:b]), is_divisible=is_divisible)
        for a, b in cuts
    ]


def survey_items(message: Message, jobs: Sequence[ClientJob], workers: int) -> list[WorkItem]:
    """Cut the survey of a round."""
    cuts = decreasing_cuts([1] * len(jobs), workers)
    return [TrainItem(message.round, message.lr, tuple(jobs[a:b]), is_survey=True) for a, b in cuts]


def evaluation_items(
    shards: Shards, split: Split, workers: int, shards_of_pass: int = 1
) -> list[WorkItem]:
    """Cut an evaluation, between two forward passes."""
    passes = math.ceil(len(shards.starts) / shards_of_pass)
    return [
        EvaluateItem(
            split, tuple(shards.starts[a * shards_of_pass : b * shards_of_pass]), shards_of_pass
        )
        for a, b in decreasing_cuts([1] * passes, workers)
    ]


def decreasing_cuts(costs: Sequence[int], workers: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into ranges of decreasing cost, so that all workers end at the same time.

    A range costs at most half of a worker's share of what is left, or it has one element.

    Args:
        costs: [n] cost of each element, the largest first.
        workers: number of workers.

    >>> decreasing_cuts([1] * 10, 2)
    [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10)]
    >>> decreasing_cuts([9, 5, 2, 2, 1, 1], 2)
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    """
    cuts, start, left = [], 0, sum(costs)
    while start < len(costs):
        stop, cost = start + 1, costs[start]
        while stop < len(costs) and (cost + costs[stop]) * 2 * workers <= left:
            cost += costs[stop]
            stop += 1
        cuts.append((start, stop))
        start, left = stop, left - cost
    return cuts


def equal_cuts(costs: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Cut 0..n-1 into at most `count` ranges of about the same cost.

    >>> equal_cuts([3, 3, 2, 2, 1, 1], 2)
    [(0, 2), (2, 6)]
    """
    if not costs:
        return []
    ends = np.cumsum(costs)
    cuts = [0]
    for i in range(1, count):
        cuts.append(int(np.searchsorted(ends, ends[-1] * i / count - 1e-9)) + 1)
    cuts.append(len(costs))
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
