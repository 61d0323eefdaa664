"""Evaluation of a model on a split, shard by shard, as every engine does it; and its scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.rng import seed_torch, torch_seed
from fedkeel.base.values import Values, copy_of, rows_of
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import Split, TrainingSetup
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.context import Ints
from fedkeel.records.rows import Scores
from fedkeel.task.metrics.metric_set import Measured, MetricSet, scores_of_columns
from fedkeel.task.outputs import Outputs
from fedkeel.tree import Tree

EXAMPLES = "examples"
"""Name of the column of numbers of examples beside columns of scores."""

Predict = Callable[[Values], Outputs]
"""Inputs [B, ...] -> what a model returns."""


@dataclass(frozen=True)
class SplitExamples:
    """The examples of a split, in the order in which they are evaluated.

    Args:
        data: where they are.
        rows: [N] rows of the data; None for all of them in order.
        group_count: G, number of groups: sources of the test set, or clients.
        source: [N] group of each example; None where `offsets` tell.
        offsets: [G + 1]; the examples of group k are ``offsets[k]:offsets[k + 1]``.
        counts: [N] number of examples that each stands for, where only their numbers are known;
            None for one each. See `Dataset.counts`.
    """

    data: Dataset
    rows: Ints | None
    group_count: int
    source: Ints | None = None
    offsets: Ints | None = None
    counts: Ints | None = None

    def __len__(self) -> int:
        return len(self.data) if self.rows is None else len(self.rows)

    def groups(self, start: int = 0, stop: int | None = None) -> Ints:
        """Return the group of each of some examples."""
        stop = len(self) if stop is None else min(stop, len(self))
        if self.source is not None:
            return self.source[start:stop]
        if self.offsets is None:
            return np.zeros(stop - start, dtype=np.int64)
        if (start, stop) == (0, len(self)):
            return np.repeat(np.arange(self.group_count), np.diff(self.offsets))
        return np.searchsorted(self.offsets, np.arange(start, stop), side="right") - 1

    @property
    def sizes(self) -> Ints:
        """[G] number of examples of each group."""
        if self.offsets is not None and self.counts is None:
            return np.diff(self.offsets)
        counts = None if self.counts is None else self.counts.astype(np.float64)
        return np.bincount(self.groups(), counts, minlength=self.group_count).astype(np.int64)


def split_examples(setup: TrainingSetup, split: Split) -> SplitExamples:
    """Return the examples of a split."""
    federation, test = setup.federation, setup.test
    if split == "pictures" and test.counts is None:
        return SplitExamples(test, None, 1)
    if split == "test" or test.counts is not None:  # that counts what clients hold out
        return SplitExamples(test, None, len(test.sources), test.source, None, test.counts)
    data, count = federation.data, len(federation)
    if federation.holdout_rows is None or federation.holdout_offsets is None:
        return SplitExamples(data, federation.rows, count, None, federation.offsets)
    return SplitExamples(data, federation.holdout_rows, count, None, federation.holdout_offsets)


def metrics_of(setup: TrainingSetup, split: Split) -> MetricSet:
    """Return what is measured of a split."""
    return setup.metrics.of_pictures() if split == "pictures" else setup.metrics


def count_examples(setup: TrainingSetup, split: Split) -> int:
    """Return the number of examples of a split."""
    examples = split_examples(setup, split)
    return len(examples) if examples.counts is None else int(examples.counts.sum())


@dataclass(frozen=True)
class Shards:
    """How an evaluation is cut: into shards, and each shard into the groups that it touches.

    Args:
        starts: [P] first example of each shard.
        size: examples of a shard, at most.
        group: [R] group of each row of states, shard by shard, ascending in a shard.
        offsets: [P + 1]; the rows of shard p are ``offsets[p]:offsets[p + 1]``.
        examples: N, number of examples.
    """

    starts: range
    size: int
    group: Ints
    offsets: Ints
    examples: int

    def rows(self, start: int) -> slice:
        """Return the rows of states of the shard that begins at an example."""
        shard = start // self.size
        return slice(int(self.offsets[shard]), int(self.offsets[shard + 1]))


def cut_into_shards(setup: TrainingSetup, split: Split) -> Shards:
    """Return how the evaluation of a split is cut."""
    examples, size = split_examples(setup, split), setup.shard
    starts = range(0, len(examples), size)
    if examples.source is None and examples.offsets is not None:
        firsts = np.sort(np.append(examples.offsets[:-1][examples.sizes > 0], starts))
        firsts = firsts[np.diff(firsts, prepend=-1) > 0]
        group = np.searchsorted(examples.offsets, firsts, side="right") - 1
        offsets = np.append(np.searchsorted(firsts, starts), len(firsts))
        return Shards(starts, size, group, offsets, len(examples))
    groups = [np.unique(examples.groups(start, start + size)) for start in starts]
    offsets = np.cumsum([0, *map(len, groups)])
    group = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
    return Shards(starts, size, group, offsets, len(examples))


def most_states(setup: TrainingSetup) -> tuple[int, int]:
    """Return the largest number of rows of states, and of examples whose values are kept."""
    shards = [cut_into_shards(setup, "test"), cut_into_shards(setup, "clients")]
    kept = max(part.examples for part in shards) if setup.metrics.kept_size else 0
    return max(len(part.group) for part in shards), kept


def evaluate_shard(
    setup: TrainingSetup,
    params: Tree,
    buffers: Tree,
    split: Split,
    start: int,
    shards: tuple[int, int] | None = None,
) -> Measured:
    """Return what is measured of the examples from `start` on, at most `setup.shard` of them.

    See `measure_shard`.
    """
    network = setup.training.network

    def predict(x: Values) -> Outputs:
        return network.test_output(params, buffers, x)

    return measure_shard(setup, predict, split, start, shards)


def measure_shard(
    setup: TrainingSetup,
    predict: Predict,
    split: Split,
    start: int,
    shards: tuple[int, int] | None = None,
) -> Measured:
    """Return what is measured of the examples from `start` on, at most `setup.shard` of them.

    It has a row of states for each group that these examples belong to, ascending. A module that
    draws random numbers in evaluation draws the same ones for a shard each time.

    Args:
        setup: data, metrics and seed.
        predict: inputs -> what the model returns.
        split: which examples.
        start: the first one.
        shards: size of a shard, and how many are measured in one forward pass: their rows come
            one shard after the other. None is one of `setup.shard`.
    """
    size, count = shards or (setup.shard, 1)
    examples = split_examples(setup, split)
    shard = slice(start, start + size * count)
    of_example = examples.groups(shard.start, shard.stop)
    of_example = np.arange(len(of_example)) // size * examples.group_count + of_example
    groups, group = np.unique(of_example, return_inverse=True)
    if examples.rows is None:
        # a clone starts at a multiple of 64 bytes, so sums are added in the same order everywhere
        x, y = copy_of(rows_of(examples.data.x, shard)), rows_of(examples.data.y, shard)
    else:
        index = torch.from_numpy(examples.rows[shard])
        x, y = rows_of(examples.data.x, index), rows_of(examples.data.y, index)
    with torch.random.fork_rng(devices=[]):
        of_split = "test" if split == "pictures" else split  # the same draws for a model that draws
        seed_torch(torch_seed(setup.seed, f"evaluation.{of_split}", client=start))
        return metrics_of(setup, split).measure(predict, x, y, torch.from_numpy(group), len(groups))


def evaluate(
    setup: TrainingSetup, params: Tree, buffers: Tree, split: Split, size: int | None = None
) -> Measured:
    """Return what is measured of the examples of a split, shard by shard in this process.

    Args:
        setup: method, model and data.
        params: of the model.
        buffers: of the model.
        split: which examples.
        size: examples of a shard, where the setup is the copy on a GPU of one whose shards are
            smaller: as many are then measured in one forward pass as `setup.shard` has room for.
    """
    size = size or setup.shard
    count = max(1, setup.shard // size)
    starts = range(0, len(split_examples(setup, split)), size * count)
    shards = [
        evaluate_shard(setup, params, buffers, split, start, (size, count)) for start in starts
    ]
    return joined(metrics_of(setup, split), shards)


def joined(metrics: MetricSet, shards: Iterable[Measured]) -> Measured:
    """Return the measurements of all shards, in their order."""
    parts = list(shards)
    if not parts:
        return Measured(
            torch.zeros(0, metrics.state_size, dtype=torch.float64),
            torch.zeros(0, metrics.kept_size, dtype=torch.float64),
        )
    return Measured(
        torch.cat([part.states for part in parts]), torch.cat([part.kept for part in parts])
    )


def scores_by_group(
    setup: TrainingSetup, split: Split, measured: Measured, *, of_all: bool = False
) -> list[Scores]:
    """Return the scores of each group of a split, or of all its examples as one group.

    Args:
        setup: with the model on the processor.
        split: which examples were evaluated.
        measured: what an engine measured of them.
        of_all: whether all examples are one group.
    """
    columns = columns_by_group(setup, split, measured, of_all=of_all)
    return scores_of_columns(columns.pop(EXAMPLES), columns)


def columns_by_group(
    setup: TrainingSetup, split: Split, measured: Measured, *, of_all: bool = False
) -> dict[str, list[float]]:
    """Return as columns [G] how many examples each group of a split has, and their scores.

    Examples that nobody measured, NaN, do not count: a node may not have answered. For the
    arguments see `scores_by_group`.
    """
    examples, metrics = split_examples(setup, split), setup.metrics
    if examples.counts is None:
        group = torch.from_numpy(cut_into_shards(setup, split).group)
        sizes, states = torch.from_numpy(examples.sizes), measured.states
    else:  # a row for each client that has examples
        metrics = metrics.on_nodes()
        is_measured = ~measured.states.isnan().all(dim=1)
        of_example = torch.from_numpy(examples.groups())
        group, states = of_example[is_measured], measured.states[is_measured]
        counts = torch.from_numpy(examples.counts)[is_measured]
        sizes = torch.zeros(examples.group_count, dtype=torch.int64).index_add_(0, group, counts)
    kept_group = torch.from_numpy(examples.groups()) if metrics.pooled else group[:0]
    count = examples.group_count
    if of_all:
        group, kept_group = torch.zeros_like(group), torch.zeros_like(kept_group)
        sizes, count = sizes.sum()[None], 1
    totals = metrics.merged(states, group, count)
    with use_numerics(setup.precision), torch.random.fork_rng(devices=[]):
        seed_torch(torch_seed(setup.seed, f"evaluation.{split}"))  # a loss may draw numbers
        scores = metrics.columns(totals, sizes, measured.kept, kept_group)
    return {EXAMPLES: sizes.tolist(), **scores}


def states_by_client(setup: TrainingSetup, measured: Measured) -> Tensor:
    """Return [C, S] the states of each client, of an evaluation of the clients."""
    group = torch.from_numpy(cut_into_shards(setup, "clients").group)
    return setup.metrics.merged(measured.states, group, len(setup.federation))


def node_states(setup: TrainingSetup, measured: Measured) -> Tensor:
    """Return [C, S] what a node sends of the evaluation of its clients."""
    states, scores = (
        states_by_client(setup, measured),
        scores_by_group(setup, "clients", measured),
    )
    kept_group = torch.from_numpy(split_examples(setup, "clients").groups())
    return setup.metrics.node_states(states, measured.kept, kept_group, scores)
