"""A metric of the library torchmetrics, as one whose states add up or whose examples are kept."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fedkeel.errors import ModelError, first_line
from fedkeel.task.metrics.base import PooledMetric, TaskInfo, Unit
from fedkeel.task.outputs import Outputs, Target, scores_of


def is_torchmetric(value: object) -> bool:
    """Return whether a value is a metric of torchmetrics, without importing it."""
    return any(
        kind.__module__.partition(".")[0] == "torchmetrics" and kind.__name__ == "Metric"
        for kind in type(value).__mro__
    )


def from_torchmetrics(metric: Any, info: TaskInfo) -> SummedTorchMetric | PooledTorchMetric:  # noqa: ANN401
    """Return a metric of torchmetrics as one of ours.

    One whose states are all sums works everywhere. One that keeps examples works on one machine.
    Its name is that of its class. It receives `scores_of` the output, of quantities what a
    prediction answers, and the target; one score of an example without an axis of its own where the
    target has none. It has to give one number: a curve, or a value for each class, is refused.
    """
    name = type(metric).__name__
    higher = True if metric.higher_is_better is None else bool(metric.higher_is_better)
    reductions = metric._reductions.values()
    if all(reduction is torch.sum or _is_sum(reduction) for reduction in reductions):
        return SummedTorchMetric(name, metric, higher, info)
    twin, width = copy.deepcopy(metric).cpu(), math.prod(info.scores)

    def values(output: Outputs, y: Tensor) -> Tensor:
        scores = scores_of(output).reshape(len(y), -1).double()
        return torch.cat([scores, y.reshape(len(y), -1).double()], dim=1)

    def of_all(kept: Tensor) -> float:
        y = kept[:, width:].reshape(len(kept), *info.target)
        twin.reset()
        scores = _answered(kept[:, :width].reshape(len(kept), *info.scores), info)
        twin.update(_paired(scores, y), y.long() if info.classes else y)
        return one_number(name, twin.compute())

    return PooledTorchMetric(name, values, of_all, higher)


def one_number(name: str, value: object) -> float:
    """Return what a metric of torchmetrics has computed, if it is one number.

    Raises:
        ModelError: it is several, such as one for each class, or a curve.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, int | float):
        return float(value)
    shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    raise ModelError(
        f"The metric {name} of torchmetrics does not give one number.",
        got=shape or f"a {type(value).__name__}",
        expected="one number for all examples of a group",
        do="take a mean over the classes, e.g. average='macro', or the area under a curve",
    )


def _tried(compute: Callable[[], object]) -> None:
    """Let a metric compute something, for the error about what it gives.

    Other errors are not of interest: it may not be defined for a few examples.
    """
    with warnings.catch_warnings(), suppress(ValueError, RuntimeError, TypeError, IndexError):
        warnings.simplefilter("ignore")
        compute()


class PooledTorchMetric(PooledMetric):
    """A metric of torchmetrics that keeps examples."""

    def try_on(self, output: Outputs, y: Target) -> None:
        """Refuse it where it does not give one number for a few examples.

        Raises:
            ModelError: it does not.
        """
        _tried(lambda: self.of_all(self.values(output, y).detach().cpu().double()))


def _answered(scores: Tensor, info: TaskInfo) -> Tensor:
    """Return what a prediction answers where it is a quantity."""
    return scores if info.classes else info.quantity(scores)


def _paired(scores: Tensor, target: Tensor) -> Tensor:
    """Return scores without their axis of one score, where the target has no such axis."""
    is_wider = scores.ndim == target.ndim + 1 and scores.shape[1] == 1
    return scores.squeeze(1) if is_wider else scores


def _is_sum(reduction: object) -> bool:
    return getattr(reduction, "__name__", "") == "dim_zero_sum"


class SummedTorchMetric:
    """A metric of torchmetrics whose states are all sums.

    Args:
        name: its name.
        metric: the metric, which is copied.
        higher_is_better: its direction.
        info: the task.
    """

    unit: Unit = ""

    def __init__(
        self,
        name: str,
        metric: Any,  # noqa: ANN401
        higher_is_better: bool,
        info: TaskInfo,
    ) -> None:
        self.name, self.higher_is_better, self._info = name, higher_is_better, info
        self._metric = copy.deepcopy(metric).cpu()
        self._metric.reset()
        self._names = sorted(self._metric._defaults)

    def states(self, output: Outputs, target: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, S], the flattened states of each group."""
        scores, target = _answered(scores_of(output).detach().cpu(), self._info), target.cpu()
        rows = []
        for index in range(groups):
            chosen = group == index
            self._metric.reset()
            if bool(chosen.any()):
                try:
                    self._metric.update(_paired(scores[chosen], target[chosen]), target[chosen])
                except Exception as error:  # of a library that the user has set up
                    raise ModelError(
                        f"The metric {self.name} of torchmetrics cannot take outputs and targets.",
                        got=f"outputs {list(scores.shape)}, targets {list(target.shape)}: "
                        + first_line(error),
                        do="check its arguments, or give a function of (output, target)",
                    ) from error
            values = [getattr(self._metric, name).reshape(-1).double() for name in self._names]
            rows.append(torch.cat(values))
        self._metric.reset()
        return torch.stack(rows)

    def try_on(self, output: Outputs, y: Target) -> None:
        """Refuse it where it does not give one number for a few examples.

        Raises:
            ModelError: it does not.
        """
        group = torch.zeros(len(y), dtype=torch.int64)
        count = torch.tensor([len(y)])
        _tried(lambda: self.result(self.states(output, y, group, 1), count))

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G]."""
        values = []
        for row, count in zip(states, examples.tolist(), strict=True):
            if not count:
                values.append(float("nan"))
                continue
            self._metric.reset()
            start = 0
            for name in self._names:
                like = getattr(self._metric, name)
                part = row[start : start + like.numel()].view(like.shape).to(like.dtype)
                setattr(self._metric, name, part)
                start += like.numel()
            self._metric._update_count = 1
            values.append(one_number(self.name, self._metric.compute()))
        self._metric.reset()
        return torch.tensor(values, dtype=torch.float64)
