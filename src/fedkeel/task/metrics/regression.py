"""Metrics of quantities: of what a prediction answers, such as exp of the scores of `poisson`.

Of several quantities of an example, those that are not known (NaN) do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.task.losses import are_known, predicted
from fedkeel.task.metrics.base import (
    SumMetric,
    TaskInfo,
    Unit,
    divided,
    mean_of_counted,
    sum_by_group,
)
from fedkeel.task.outputs import Outputs


def mae(info: TaskInfo) -> SumMetric:
    """Return the mean absolute error, over all quantities of an example."""

    def of_each(output: Outputs, y: Tensor) -> Tensor:
        error, known = _errors(info, output, y)
        return _mean(error.abs(), known)

    return SumMetric("mae", of_each, mean_of_counted, False)


def rmse(info: TaskInfo) -> SumMetric:
    """Return the square root of the mean squared error, over all quantities of an example."""

    def of_each(output: Outputs, y: Tensor) -> Tensor:
        error, known = _errors(info, output, y)
        return _mean(error**2, known)

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        return mean_of_counted(sums, examples).sqrt()

    return SumMetric("rmse", of_each, finish, False)


class R2:
    """The share of the variance that is explained; of several quantities, their mean.

    A quantity that does not vary makes it 1 where it is predicted exactly and else 0, as in
    scikit-learn. A quantity that fewer than two examples know is left out. A state has of each
    quantity the number of examples that know it, its mean, the sum of its squared distances from
    this mean, and that of its squared errors. States are merged by the
    formula of Chan, Golub and LeVeque 1979, so that nothing is lost where a mean is large.
    """

    name, higher_is_better = "r2", True
    unit: Unit = ""

    def __init__(self, info: TaskInfo) -> None:
        self._info = info

    def states(self, output: Outputs, target: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, 4 D]."""
        error, known = (t.view(len(target), -1) for t in _errors(self._info, output, target))
        errors = sum_by_group(error**2, group, groups)
        truth = target.detach().double().view(len(target), -1)
        truth, known = torch.where(known, truth, 0.0).cpu(), known.double().cpu()
        zero = torch.zeros_like(truth)
        centred = self.merge(torch.cat([known, truth, zero, zero], dim=1), group, groups)
        centred[:, -errors.shape[1] :] = errors
        return centred

    def merge(self, states: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, 4 D] the states of all rows of a group together."""
        count, mean, around, errors = _parts(states)
        total = sum_by_group(count, group, groups)
        middle = torch.nan_to_num(divided(sum_by_group(count * mean, group, groups), total))
        shift = sum_by_group(count * (mean - middle[group]), group, groups)  # what rounding left
        middle = middle + torch.nan_to_num(divided(shift, total))
        spread = around + count * (mean - middle[group]) ** 2
        sums = [sum_by_group(part, group, groups) for part in (spread, errors)]
        return torch.cat([total, middle, *sums], dim=1)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G], NaN of fewer than two examples."""
        count, mean, around, errors = _parts(states)
        rounding = count * (1e-15 * mean) ** 2  # of quantities that are all the same
        around = torch.where(around <= rounding, 0.0, around)
        constant = torch.where(errors == 0, 1.0, torch.where(errors.isnan(), torch.nan, 0.0))
        value = torch.where(around == 0, constant, 1 - errors / around)
        counts = count >= 2
        return divided(torch.where(counts, value, 0.0).sum(dim=1), counts.sum(dim=1))


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    """Return counts, means, squared distances and squared errors, [R, D] each."""
    return states.chunk(4, dim=1)


def _errors(info: TaskInfo, output: Outputs, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors, 0 of a target that is not known, and which targets are known."""
    error, known = info.quantity(predicted(output, y)).double() - y.double(), are_known(y)
    if known is None:
        return error, torch.ones_like(y, dtype=torch.bool)
    return torch.where(known, error, 0.0), known


def _mean(values: Tensor, known: Tensor) -> Tensor:
    """Return [B, 2] the mean over the known quantities of an example, and 1 where there are any."""
    if values.ndim == 1:
        return torch.stack([values, torch.ones_like(values)], dim=1)
    count = known.flatten(1).sum(dim=1)
    return torch.stack([values.flatten(1).sum(dim=1) / count.clamp(min=1), count > 0], dim=1)
