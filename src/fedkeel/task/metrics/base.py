"""What a metric is: a state of sums for each group of examples, and the result of a state.

States add: those of two shards, workers or nodes make the state of both. So a metric never needs
more than one batch of outputs at a time, and only sums cross a network. There are two exceptions:
`PooledMetric` has to see all examples of a group at once, and a metric with `merge` adds its states
in a way of its own.

Scores that are not numbers (NaN) count as wrong. Of classes with equal scores, the one with the
smaller index ranks first; of examples with equal scores, none ranks before the other. Examples all
of whose targets are -100, or quantities that are NaN, do not count. Neither do examples for which a
user's function returns NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED
from fedkeel.task.outputs import Outputs, Target

Unit = str
"""``%``: the metric is a share, which is shown times 100. Else a short text, such as ``mm``, or
none."""


def _same(scores: Tensor) -> Tensor:
    return scores


@dataclass(frozen=True)
class TaskInfo:
    """What a metric may know of a task before it measures.

    Args:
        scores: shape of the scores of one example, without the leading B.
        target: shape of the target of one example.
        classes: Y, the number of classes; 0 where the target is not a label.
        quantity: what makes of scores the quantity that a prediction answers.
    """

    scores: tuple[int, ...]
    target: tuple[int, ...]
    classes: int
    quantity: Callable[[Tensor], Tensor] = _same

    @property
    def outputs(self) -> int:
        """Number of classes that the scores tell apart: 2 for a single score, of a binary task."""
        return max(2, self.scores[0]) if len(self.scores) > len(self.target) else 2

    def need_classes(self, metric: str) -> None:
        """Refuse a target that is not a label.

        Raises:
            ModelError: it is not a label.
        """
        if not self.classes:
            raise ModelError(
                f"The metric {metric!r} needs labels, and the targets are not labels.",
                got=f"targets of shape {list(self.target)} for one example",
                do="take a metric of quantities, such as 'mae', 'rmse' or 'r2'",
            )


@runtime_checkable
class Metric(Protocol):
    """A metric whose states add up.

    It has a name, under which it stands in the rows; a direction; and a unit.
    """

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def higher_is_better(self) -> bool:
        """Its direction."""

    @property
    def unit(self) -> Unit:
        """Its unit."""

    def states(self, output: Outputs, target: Target, group: Tensor, groups: int) -> Tensor:
        """Return [groups, S] in float64, on the processor: the state of each group of a batch.

        Args:
            output: what the module returned for the batch.
            target: [B, ...] its targets, or several by name.
            group: [B] int64, the group of each example, on the processor.
            groups: number of groups.
        """

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G] the metric of each group, NaN where it is not defined.

        Args:
            states: [G, S] its states.
            examples: [G] its numbers of examples.
        """


@runtime_checkable
class Merging(Protocol):
    """A metric whose states do not add up, but are merged, however the examples are cut."""

    def merge(self, states: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, S] the states of all rows of a group together.

        Args:
            states: [R, S] states; a row of zeros is that of no example.
            group: [R] int64, the group of each row.
            groups: number of groups.
        """


def sum_by_group(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return [groups, m] sums of values [B, m] or [B], added in their order, in float64."""
    rows = values.detach().to("cpu", torch.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    return torch.zeros(groups, rows.shape[1], dtype=torch.float64).index_add_(0, group, rows)


def count_by_group(cells: Tensor, size: int, group: Tensor, groups: int) -> Tensor:
    """Return [groups, size]: how often each of `size` cells occurs among cells [B, ...] >= 0.

    A cell < 0 counts nowhere.
    """
    flat = cells.detach().cpu().flatten(1) if cells.ndim > 1 else cells.detach().cpu()[:, None]
    places = group[:, None] * size + flat
    counts = torch.bincount(places[flat >= 0], minlength=groups * size)
    return counts.view(groups, size).double()


def are_counted(y: Tensor) -> Tensor:
    """Return [B] whether an example has a target that is not ignored: -100, or NaN."""
    counted = ~y.isnan() if y.is_floating_point() else y != IGNORED
    return counted if counted.ndim == 1 else counted.flatten(1).any(dim=1)


def divided(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a quotient, NaN where the denominator is 0."""
    return torch.where(denominator == 0, torch.nan, numerator / denominator)


def mean_of_counted(sums: Tensor, examples: Tensor) -> Tensor:
    """Return the mean of the examples that count, by sums [G, 2] of values and of those."""
    return divided(sums[:, 0], sums[:, 1])


@dataclass(frozen=True)
class SumMetric:
    """A metric of sums over examples.

    Args:
        name: its name.
        function: (output, target) -> a value for each example, [B] or [B, m].
        finish: (sums [G, m], examples [G]) -> [G]; None divides the first sum by the number of
            examples.
        higher_is_better: its direction.
        unit: its unit.
        leaves_out_nan: whether an example whose value is NaN does not count in the mean. It holds
            for a metric without `finish`.
    """

    name: str
    function: Callable[[Outputs, Target], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor] | None = None
    higher_is_better: bool = True
    unit: Unit = ""
    leaves_out_nan: bool = False

    def states(self, output: Outputs, target: Target, group: Tensor, groups: int) -> Tensor:
        """Return [groups, m] sums; of a metric that leaves out NaN, sum and count of the others."""
        values: object = self.function(output, target)
        if not isinstance(values, Tensor) or values.ndim not in (1, 2) or len(values) != len(group):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ModelError(
                f"The metric {self.name!r} is not one number for each example.",
                got=shape,
                expected=f"[{len(group)}] for {len(group)} examples",
                do="return the values before their mean; a measure of all examples at once is a "
                "metric of torchmetrics",
            )
        if self.leaves_out_nan:
            rows = values if values.ndim == 1 else values[:, 0]
            unknown = rows.isnan()
            values = torch.stack([rows.masked_fill(unknown, 0), (~unknown).to(rows)], dim=1)
        return sum_by_group(values, group, groups)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G], the mean or what `finish` makes of the sums."""
        if self.leaves_out_nan:
            return mean_of_counted(states, examples)
        if self.finish is None:
            return divided(states[:, 0], examples)
        return self.finish(states, examples)


@dataclass(frozen=True)
class CountMetric:
    """A metric of counts in cells, such as those of a confusion matrix or of a histogram.

    Args:
        name: its name.
        size: number of cells.
        cells: (output, target) -> [B] or [B, ...] the cells of each example, < 0 for none.
        finish: counts [G, size] -> [G].
        higher_is_better: its direction.
        unit: its unit.
    """

    name: str
    size: int
    cells: Callable[[Outputs, Target], Tensor]
    finish: Callable[[Tensor], Tensor]
    higher_is_better: bool = True
    unit: Unit = "%"

    def states(self, output: Outputs, target: Target, group: Tensor, groups: int) -> Tensor:
        """Return [groups, size] counts."""
        return count_by_group(self.cells(output, target), self.size, group, groups)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G], what `finish` makes of the counts."""
        return self.finish(states)


@dataclass(frozen=True)
class NodeSums:
    """What a node sends in place of the values that a pooled metric keeps of each example.

    Args:
        size: S, how many sums.
        sums: (kept values [n, m] of a client, the client's own metric) -> [S].
        finish: (sums [G, S], examples [G]) -> the metric of each group, [G].
    """

    size: int
    sums: Callable[[Tensor, float], Tensor]
    finish: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PooledMetric:
    """A metric that has to see all examples of a group at once, such as a rank correlation.

    Its values are kept for each example on one machine. Nodes send sums that come close to it,
    where there are such.

    Args:
        name: its name.
        values: (output, target) -> [B, m] what is kept of each example.
        of_all: kept values [n, m] -> the metric.
        higher_is_better: its direction.
        unit: its unit.
        on_nodes: the sums that nodes send; None where the metric is refused there.
    """

    name: str
    values: Callable[[Outputs, Target], Tensor]
    of_all: Callable[[Tensor], float]
    higher_is_better: bool = True
    unit: Unit = ""
    on_nodes: NodeSums | None = None
