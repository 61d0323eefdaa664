"""Evaluation of a model on a split, shard by shard, as every engine does it; and its scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkeel.engine.base import Split, TrainingSetup
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.context import Ints
from fedkeel.records.rows import Scores
from fedkeel.rng import seed_torch, torch_seed
from fedkeel.task import metrics
from fedkeel.tree import Tree


@dataclass(frozen=True)
class SplitExamples:
    """The examples of a split, in the order in which they are evaluated.

    Args:
        rows: [N] rows of the training set; None for the whole test set.
        groups: [N] group of each example: its source in the test set, or its client.
        group_count: number of groups.
        counts: [N] number of examples that each stands for, whose measurements are their sums then;
            None for one each. See `Dataset.counts`.
    """

    rows: Ints | None
    groups: Ints
    group_count: int
    counts: Ints | None = None


def split_examples(setup: TrainingSetup, split: Split) -> SplitExamples:
    """Return the examples of a split."""
    federation, test = setup.federation, setup.test
    if split == "test" or test.counts is not None:  # that counts what clients hold out
        return SplitExamples(None, test.source_ids, len(test.sources), test.counts)
    if federation.holdout_rows is None or federation.holdout_offsets is None:
        return SplitExamples(federation.rows, federation.client_of_row(), len(federation))
    sizes = np.diff(federation.holdout_offsets)
    owners = np.repeat(np.arange(len(federation)), sizes)
    return SplitExamples(federation.holdout_rows, owners, len(federation))


def count_examples(setup: TrainingSetup, split: Split) -> int:
    """Return the number of examples of a split."""
    examples = split_examples(setup, split)
    return len(examples.groups) if examples.counts is None else int(examples.counts.sum())


def evaluate_shard(
    setup: TrainingSetup, params: Tree, buffers: Tree, split: Split, start: int
) -> Tensor:
    """Return [n, columns] of the examples from `start` on, at most `setup.shard` of them.

    A module that draws random numbers in evaluation draws the same ones for a shard each time.
    """
    examples = split_examples(setup, split)
    shard = slice(start, start + setup.shard)
    if examples.rows is None:
        # a clone starts at a multiple of 64 bytes, so sums are added in the same order everywhere
        x, y = setup.test.x[shard].clone(), setup.test.y[shard]
    else:
        index = torch.from_numpy(examples.rows[shard])
        x, y = setup.federation.data.x[index], setup.federation.data.y[index]
    with torch.random.fork_rng(devices=[]):
        seed_torch(torch_seed(setup.seed, f"evaluation.{split}", client=start))
        return metrics.measure(setup.training.network, params, buffers, x, y)


def evaluate(setup: TrainingSetup, params: Tree, buffers: Tree, split: Split) -> Tensor:
    """Return [N, columns] of the examples of a split, shard by shard in this process."""
    starts = range(0, count_examples(setup, split), setup.shard)
    shards = [evaluate_shard(setup, params, buffers, split, start) for start in starts]
    return torch.cat(shards).cpu() if shards else empty_measurements(setup, 0)


def empty_measurements(setup: TrainingSetup, count: int) -> Tensor:
    """Return [count, columns] in float64, not filled, for what an evaluation measures."""
    return torch.empty(count, measured_columns(setup), dtype=torch.float64)


def measured_columns(setup: TrainingSetup) -> int:
    """Return the number of columns that `task.metrics.measure` returns."""
    return len(metrics.COLUMNS) + setup.training.network.mean_loss_outputs


def mean_scores(
    setup: TrainingSetup, split: Split, measured: Tensor, *, of_all: bool = False
) -> list[Scores]:
    """Return the scores of each group of a split, or of all its examples as one group.

    Examples that nobody measured, NaN, do not count: a node may not have answered.

    Args:
        setup: with the model on the processor.
        split: which examples were evaluated.
        measured: [N, columns] of them.
        of_all: whether all examples are one group.
    """
    examples = split_examples(setup, split)
    is_measured = ~measured[:, 0].isnan()
    group, count = torch.from_numpy(examples.groups)[is_measured], examples.group_count
    counts = None if examples.counts is None else torch.from_numpy(examples.counts)[is_measured]
    if of_all:
        group, count = torch.zeros_like(group), 1
    rows = None if examples.rows is None else torch.from_numpy(examples.rows)
    y = setup.test.y if rows is None else setup.federation.data.y[rows]
    with use_numerics(setup.precision), torch.random.fork_rng(devices=[]):
        seed_torch(torch_seed(setup.seed, f"evaluation.{split}"))  # a loss may draw numbers
        network = setup.training.network
        return metrics.by_group(
            network, measured[is_measured], y[is_measured], group, count, counts
        )
