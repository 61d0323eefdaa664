"""Metrics of quantities: of what a prediction answers, such as exp of the scores of `poisson`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.task.losses import predicted
from fedkeel.task.metrics.base import SumMetric, TaskInfo, divided
from fedkeel.task.outputs import Outputs


def mae(info: TaskInfo) -> SumMetric:
    """Return the mean absolute error, over all quantities of an example."""
    return SumMetric("mae", lambda output, y: _mean(_error(info, output, y).abs()), None, False)


def rmse(info: TaskInfo) -> SumMetric:
    """Return the square root of the mean squared error, over all quantities of an example."""

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        return divided(sums[:, 0], examples).sqrt()

    return SumMetric("rmse", lambda output, y: _mean(_error(info, output, y) ** 2), finish, False)


def r2(info: TaskInfo) -> SumMetric:
    """Return the share of the variance that is explained; of several quantities, their mean.

    A quantity that does not vary makes it 1 where it is predicted exactly and else 0, as in
    scikit-learn.
    """

    def sums(output: Outputs, y: Tensor) -> Tensor:
        truth, error = y.double().view(len(y), -1), _error(info, output, y).view(len(y), -1)
        return torch.cat([truth, truth**2, error**2], dim=1)

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        total, squares, errors = sums.chunk(3, dim=1)
        count = examples[:, None]
        around = squares - divided(total**2, count)
        around = torch.where(around <= 1e-14 * squares, 0.0, around)  # what rounding leaves
        explained = 1 - errors / around
        constant = torch.where(errors == 0, 1.0, 0.0)
        value = torch.where(around == 0, constant, explained).mean(dim=1)
        return torch.where(examples < 2, torch.nan, value)

    return SumMetric("r2", sums, finish)


def _error(info: TaskInfo, output: Outputs, y: Tensor) -> Tensor:
    return info.quantity(predicted(output, y)).double() - y.double()


def _mean(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.flatten(1).mean(dim=1)
