"""All that is measured of a model in one evaluation: the metrics of a task, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedkeel.data.values import Values, count_of
from fedkeel.errors import ModelError, did_you_mean
from fedkeel.reached_values import describe_value
from fedkeel.records.rows import Scores
from fedkeel.records.score import LOSS, MetricInfo
from fedkeel.task.losses import Loss
from fedkeel.task.metrics.base import (
    CountMetric,
    Metric,
    PooledMetric,
    SumMetric,
    TaskInfo,
    Unit,
    sum_by_group,
)
from fedkeel.task.metrics.registry import MetricLike, default_metrics, make_metric
from fedkeel.task.network import Network
from fedkeel.task.outputs import Outputs, Target, scores_of


@dataclass(frozen=True)
class Measured:
    """What an evaluation has measured of some groups of examples.

    Args:
        states: [R, S] float64, sums: one row for each group of each shard.
        kept: [N, M] float64, values of each example, for metrics that have to see all at once; M is
            0 where there is none.
    """

    states: Tensor
    kept: Tensor


@dataclass(frozen=True)
class _LossMetric:
    """The mean loss, where each example has one."""

    loss: Loss
    name: str = LOSS
    higher_is_better: bool = False
    unit: Unit = ""

    def states(self, output: Outputs, target: Target, group: Tensor, groups: int) -> Tensor:
        return sum_by_group(self.loss(output, target), group, groups)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        return states[:, 0] / examples.clamp(min=1)


def _not_here(output: Outputs, target: object) -> Tensor:
    raise RuntimeError("a server has no examples of its nodes to measure")


@dataclass(frozen=True)
class MetricSet:
    """The metrics of a task, its loss last.

    Args:
        summed: metrics whose states add up.
        pooled: metrics that have to see all examples of a group at once.
        sizes: [len(summed)] length of the state of each.
        widths: [len(pooled)] number of values that each keeps of an example.
        score_name: name of the metric by which a model is judged.
        order: names in the order in which they are shown.
        code: a text of the user's own functions among them.
        unseen: where values are in reach of these that could not be read.
        pictures: counts for the pictures of a report, which are measured when a run ends.
    """

    summed: tuple[Metric, ...]
    pooled: tuple[PooledMetric, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    score_name: str
    order: tuple[str, ...]
    code: str = ""
    unseen: tuple[str, ...] = ()
    pictures: tuple[CountMetric, ...] = ()

    @property
    def score(self) -> MetricInfo:
        """The metric by which a model is judged."""
        return next(info for info in self.infos if info.name == self.score_name)

    def describe(self) -> str:
        """Return a text of all that decides what is measured."""
        infos = [(info.name, info.higher_is_better, info.unit) for info in self.infos]
        return f"{infos} score={self.score_name} {self.code}"

    @property
    def state_size(self) -> int:
        """S, the length of a state."""
        return sum(self.sizes)

    @property
    def kept_size(self) -> int:
        """M, the number of values that are kept of each example."""
        return sum(self.widths)

    @cached_property
    def infos(self) -> list[MetricInfo]:
        """Name, direction and unit of each metric, in order."""
        metrics: dict[str, Metric | PooledMetric] = {m.name: m for m in self.summed}
        metrics |= {m.name: m for m in self.pooled}
        return [
            MetricInfo(name, metrics[name].higher_is_better, metrics[name].unit)
            for name in self.order
        ]

    def of_pictures(self) -> MetricSet:
        """Return the counts for the pictures of a report as metrics of their own."""
        sizes = tuple(metric.size for metric in self.pictures)
        names = tuple(metric.name for metric in self.pictures)
        return MetricSet(self.pictures, (), sizes, (), "", names)

    def on_nodes(self) -> MetricSet:
        """Return the metrics as a server knows them whose nodes measure: only sums reach it.

        A loss that is a mean over the batch is each client's own there, and counts by its number of
        examples.
        """
        sums = tuple(SumMetric(m.name, _not_here, None, False, m.unit) for m in self.pooled)
        sizes = (*self.sizes, *(1 for _ in sums))
        return replace(self, summed=(*self.summed, *sums), pooled=(), sizes=sizes, widths=())

    def node_states(self, states: Tensor, scores: Sequence[Scores]) -> Tensor:
        """Return [G, S] what a node sends of its clients, as `on_nodes` has it.

        Args:
            states: [G, S] their states.
            scores: their scores, of which those of pooled metrics are sent.
        """
        columns = [
            torch.tensor([score[m.name] * score.examples for score in scores], dtype=torch.float64)
            for m in self.pooled
        ]
        return torch.cat([states, *(column[:, None] for column in columns)], dim=1)

    def why_not_on_nodes(self) -> str:
        """Return the name of a metric that nodes cannot send as sums, "" where there is none."""
        return next((metric.name for metric in self.pooled if metric.name != LOSS), "")

    @torch.no_grad()
    def measure(
        self,
        predict: Callable[[Values], Outputs],
        x: Values,
        y: Values,
        group: Tensor,
        groups: int,
    ) -> Measured:
        """Evaluate examples.

        Args:
            predict: inputs -> what the model returns.
            x: [B, ...] inputs.
            y: [B, ...] targets.
            group: [B] int64 on the processor, the group of each example.
            groups: number of groups.

        Returns:
            The states [groups, S] of the groups, and the values [B, M] that are kept.
        """
        output = predict(x)
        states = [metric.states(output, y, group, groups) for metric in self.summed]
        kept = [metric.values(output, y).detach().cpu().double() for metric in self.pooled]
        return Measured(
            torch.cat(states, dim=1) if states else torch.zeros(groups, 0, dtype=torch.float64),
            torch.cat(kept, dim=1) if kept else torch.zeros(len(group), 0, dtype=torch.float64),
        )

    def columns(
        self, states: Tensor, examples: Tensor, kept: Tensor, kept_group: Tensor
    ) -> dict[str, list[float]]:
        """Return the scores of all groups, a column [G] for each metric.

        Args:
            states: [G, S] states of the groups.
            examples: [G] numbers of examples.
            kept: [N, M] values of all examples.
            kept_group: [N] group of each example.
        """
        columns: dict[str, list[float]] = {}
        for metric, state in zip(
            self.summed, torch.split(states, list(self.sizes), dim=1), strict=True
        ):
            columns[metric.name] = metric.result(state, examples).tolist()
        if self.pooled:
            count = torch.bincount(kept_group, minlength=len(states))
            rows = torch.split(torch.argsort(kept_group, stable=True), count.tolist())
            for pooled, values in zip(
                self.pooled, torch.split(kept, list(self.widths), dim=1), strict=True
            ):
                columns[pooled.name] = [
                    pooled.of_all(values[index]) if len(index) else float("nan") for index in rows
                ]
        return {name: columns[name] for name in self.order}

    def scores(
        self, states: Tensor, examples: Tensor, kept: Tensor, kept_group: Tensor
    ) -> list[Scores]:
        """Return the scores of each group; for the arguments see `columns`."""
        columns = self.columns(states, examples, kept, kept_group)
        return scores_of_columns(examples.tolist(), columns)


def scores_of_columns(
    examples: Sequence[float], columns: Mapping[str, Sequence[float]]
) -> list[Scores]:
    """Return the scores of each group.

    Args:
        examples: [G] numbers of examples.
        columns: [G] values of each metric.
    """
    return [
        Scores(int(count), {name: column[index] for name, column in columns.items()})
        for index, count in enumerate(examples)
    ]


def make_metric_set(
    network: Network,
    given: Sequence[MetricLike] | None,
    score: str | None,
    info: TaskInfo,
    x: Values,
    y: Values,
) -> MetricSet:
    """Make the metrics of a task, and try them on a few examples.

    Args:
        network: the model and its loss.
        given: what the user has given, None for the defaults of the task.
        score: name of the metric by which a model is judged; None takes the first one.
        info: facts of the task.
        x: [B, ...] a few inputs.
        y: [B, ...] their targets.

    Raises:
        ModelError: a metric is unknown, does not fit the task or fails, or has no name of its own.
    """
    wanted = default_metrics(info) if given is None else given
    metrics = [make_metric(item, info) for item in wanted if item != LOSS]
    loss = _loss_metric(network, info, y)
    names = [*(metric.name for metric in metrics), LOSS]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ModelError(
            f"Two metrics have the name {repeated!r}.",
            do="give one a name of its own: fk.metric(function, name='...')",
        )
    if score is not None and score not in names:
        raise ModelError(
            f"The score {score!r} is no metric of the task.",
            do=did_you_mean(score, names),
        )
    summed = tuple(m for m in (*metrics, loss) if not isinstance(m, PooledMetric))
    pooled = tuple(m for m in (*metrics, loss) if isinstance(m, PooledMetric))
    group, count = torch.arange(count_of(y)), count_of(y)
    with torch.no_grad():
        output = network.test_output(network.params, network.buffers, x)
        sizes = tuple(m.states(output, y, group, count).shape[1] for m in summed)
        widths = tuple(m.values(output, y).shape[1] for m in pooled)
    functions = [item for item in wanted if callable(item) and not isinstance(item, type)]
    code = [describe_value(item, "metric") for item in functions]
    return MetricSet(
        summed,
        pooled,
        sizes,
        widths,
        score or names[0],
        tuple(names),
        " ".join(item.text for item in code),
        tuple(place for item in code for place in item.unseen),
    )


def _loss_metric(network: Network, info: TaskInfo, example: Values) -> Metric | PooledMetric:
    """Return the loss as a metric.

    A loss that is a mean over the batch, [], cannot be put together from batches: class weights,
    or targets that it ignores, decide how much an example counts. So it is taken of the outputs of
    all examples at once.
    """
    if not network.has_mean_loss:
        return _LossMetric(network.task_losses)
    if isinstance(example, dict):
        raise ModelError(
            "The loss is one number for the batch, and the targets are several tensors.",
            why="an evaluation keeps all outputs and targets, which have to be one tensor each",
            do="return one loss for each example, [B]",
        )
    width, target_dtype = 1, example.dtype
    for size in info.scores:
        width *= size

    def values(output: Outputs, y: Tensor) -> Tensor:
        scores = scores_of(output).reshape(len(y), -1).double()
        return torch.cat([scores, y.reshape(len(y), -1).double()], dim=1)

    def of_all(kept: Tensor) -> float:
        scores = kept[:, :width].reshape(len(kept), *info.scores).to(network.dtype)
        y = kept[:, width:].reshape(len(kept), *info.target).to(target_dtype)
        return float(network.task_losses(scores, y))

    return PooledMetric(LOSS, values, of_all, higher_is_better=False)
