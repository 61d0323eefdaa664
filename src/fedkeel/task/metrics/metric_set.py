"""All that is measured of a model in one evaluation: the metrics of a task, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedkeel.base.fingerprint.reached_values import describe_value
from fedkeel.base.memory import format_bytes
from fedkeel.base.values import Values, count_of
from fedkeel.errors import ModelError, did_you_mean
from fedkeel.records.rows import Scores
from fedkeel.records.score import LOSS, MetricInfo
from fedkeel.task.losses import IGNORING, WITH_UNKNOWN, Loss
from fedkeel.task.metrics.base import (
    CountMetric,
    Merging,
    Metric,
    NodeSums,
    PooledMetric,
    SumMetric,
    TaskInfo,
    Unit,
    are_counted,
    divided,
    mean_of_counted,
    sum_by_group,
)
from fedkeel.task.metrics.classification import only_compares
from fedkeel.task.metrics.from_torchmetrics import PooledTorchMetric, SummedTorchMetric
from fedkeel.task.metrics.registry import MetricLike, default_metrics, make_metric
from fedkeel.task.network import Network
from fedkeel.task.outputs import Outputs, Target, scores_of

LARGEST_EVALUATION = 4_000_000_000
"""Bytes of the states and of the kept values of an evaluation, at most. They lie in memory up to
three times."""


def _check_size(metric: Metric) -> None:
    """Refuse a metric of which not even one state can be made.

    Raises:
        ModelError: it is one of too many counts.
    """
    if not isinstance(metric, CountMetric):
        return
    needed = metric.size * torch.float64.itemsize
    if 3 * needed > LARGEST_EVALUATION:
        raise ModelError(
            f"The metric {metric.name!r} keeps too much.",
            got=f"{metric.size:,} counts: {format_bytes(needed)} for each group of examples",
            expected=f"at most {format_bytes(LARGEST_EVALUATION // 3)}",
            do="take a metric that keeps less, such as 'macro_f1' or 'balanced_accuracy'",
        )


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
    """The mean loss, where each example has one; those that a named loss ignores do not count."""

    loss: Loss
    ignores: bool  # whether examples may have no target that counts
    name: str = LOSS
    higher_is_better: bool = False
    unit: Unit = ""

    def states(self, output: Outputs, target: Target, group: Tensor, groups: int) -> Tensor:
        losses = self.loss(output, target)
        if self.ignores:
            losses = torch.stack([losses, are_counted(target).to(losses)], dim=1)
        return sum_by_group(losses, group, groups)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        if self.ignores:
            return mean_of_counted(states, examples)
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
    def see_each_example(self) -> bool:
        """Whether no bit of what is measured of an example depends on the others of its batch.

        That is known of metrics that only compare. A function of the user's may look at the whole
        batch, and a processor may round the last numbers of a tensor in another way, which it does
        not compute several at a time. The loss is not looked at.
        """
        functions = [
            metric.cells if isinstance(metric, CountMetric) else getattr(metric, "function", None)
            for metric in self.summed
            if not isinstance(metric, _LossMetric)
        ]
        return not self.pooled and all(map(only_compares, functions))

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
        sent = [(m, m.on_nodes) for m in self.pooled if m.on_nodes is not None]
        sums = tuple(
            SumMetric(m.name, _not_here, sums.finish, m.higher_is_better, m.unit)
            for m, sums in sent
        )
        sizes = (*self.sizes, *(sums.size for _, sums in sent))
        return replace(self, summed=(*self.summed, *sums), pooled=(), sizes=sizes, widths=())

    def node_states(
        self, states: Tensor, kept: Tensor, kept_group: Tensor, scores: Sequence[Scores]
    ) -> Tensor:
        """Return [G, S] what a node sends of its clients, as `on_nodes` has it.

        Args:
            states: [G, S] their states.
            kept: [N, M] values of all examples.
            kept_group: [N] client of each example, ascending.
            scores: their scores.
        """
        count = torch.bincount(kept_group, minlength=len(states)).tolist()
        columns = [
            torch.stack(
                [
                    metric.on_nodes.sums(rows, score[metric.name])
                    for rows, score in zip(torch.split(values, count), scores, strict=True)
                ]
            )
            for metric, values in zip(
                self.pooled, torch.split(kept, list(self.widths), dim=1), strict=True
            )
            if metric.on_nodes is not None
        ]
        return torch.cat([states, *columns], dim=1)

    @property
    def score_cells(self) -> dict[str, int]:
        """Metrics of which nodes send counts by score and true label, and in how many cells."""
        sums = {m.name: m.on_nodes for m in self.pooled if m.name != LOSS}
        return {name: one.size for name, one in sums.items() if one is not None}

    def why_not_on_nodes(self) -> str:
        """Return the name of a metric that nodes cannot send as sums, "" where there is none."""
        return next((metric.name for metric in self.pooled if metric.on_nodes is None), "")

    def merged(self, states: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, S] the states of all rows of a group together, in the rows' order.

        Args:
            states: [R, S] states; a row of zeros is that of no example.
            group: [R] int64, the group of each row.
            groups: number of groups.
        """
        total = torch.zeros(groups, self.state_size, dtype=torch.float64)
        total.index_add_(0, group, states)
        parts = zip(
            self.summed,
            torch.split(states, list(self.sizes), dim=1),
            torch.split(total, list(self.sizes), dim=1),
            strict=True,
        )
        for metric, rows, merged in parts:
            if isinstance(metric, Merging):
                merged.copy_(metric.merge(rows, group, groups))
        return total

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
        return self.measure_output(predict(x), y, group, groups)

    @torch.no_grad()
    def measure_output(self, output: Outputs, y: Values, group: Tensor, groups: int) -> Measured:
        """Return what is measured of what a model has returned; arguments as in `measure`."""
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
            f"The score {score!r} is not a metric of the task.",
            do=did_you_mean(score, names),
        )
    summed = tuple(m for m in (*metrics, loss) if not isinstance(m, PooledMetric))
    pooled = tuple(m for m in (*metrics, loss) if isinstance(m, PooledMetric))
    for metric in summed:
        _check_size(metric)
    group = torch.zeros(count_of(y), dtype=torch.int64)
    with torch.no_grad():
        output = network.test_output(network.params, network.buffers, x)
        sizes = tuple(m.states(output, y, group, 1).shape[1] for m in summed)
        widths = tuple(m.values(output, y).shape[1] for m in pooled)
        for of_library in (*summed, *pooled):
            if isinstance(of_library, SummedTorchMetric | PooledTorchMetric):
                of_library.try_on(output, y)
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
        leaves_out = bool(info.target) and network.task_loss in IGNORING | WITH_UNKNOWN
        return _LossMetric(network.task_losses, leaves_out)
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

    of_clients = NodeSums(
        1, lambda kept, own: torch.tensor([own * len(kept)], dtype=torch.float64), _mean_of_clients
    )
    return PooledMetric(LOSS, values, of_all, higher_is_better=False, on_nodes=of_clients)


def _mean_of_clients(sums: Tensor, examples: Tensor) -> Tensor:
    return divided(sums[:, 0], examples)
