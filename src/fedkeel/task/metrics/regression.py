"""Metrics of quantities: of what a prediction answers, such as exp of the scores of `poisson`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.task.losses import predicted
from fedkeel.task.metrics.base import SumMetric, TaskInfo, Unit, divided, sum_by_group
from fedkeel.task.outputs import Outputs


def mae(info: TaskInfo) -> SumMetric:
    """Return the mean absolute error, over all quantities of an example."""
    return SumMetric("mae", lambda output, y: _mean(_error(info, output, y).abs()), None, False)


def rmse(info: TaskInfo) -> SumMetric:
    """Return the square root of the mean squared error, over all quantities of an example."""

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        return divided(sums[:, 0], examples).sqrt()

    return SumMetric("rmse", lambda output, y: _mean(_error(info, output, y) ** 2), finish, False)


class R2:
    """The share of the variance that is explained; of several quantities, their mean.

    A quantity that does not vary makes it 1 where it is predicted exactly and else 0, as in
    scikit-learn. A state has the number of examples, and the mean of each quantity, the sum of its
    squared distances from this mean, and that of its squared errors. States are merged by the
    formula of Chan, Golub and LeVeque 1979, so that nothing is lost where a mean is large.
    """

    name, higher_is_better = "r2", True
    unit: Unit = ""

    def __init__(self, info: TaskInfo) -> None:
        self._info = info

    def states(self, output: Outputs, target: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, 1 + 3 D]."""
        truth = target.detach().double().view(len(target), -1).cpu()
        error = _error(self._info, output, target).view(len(target), -1)
        errors = sum_by_group(error**2, group, groups)
        one, zero = torch.ones(len(truth), 1, dtype=torch.float64), torch.zeros_like(truth)
        centred = self.merge(torch.cat([one, truth, zero, zero], dim=1), group, groups)
        centred[:, -errors.shape[1] :] = errors
        return centred

    def merge(self, states: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, 1 + 3 D] the states of all rows of a group together."""
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
        value = torch.where(around == 0, constant, 1 - errors / around).mean(dim=1)
        return torch.where(count[:, 0] < 2, torch.nan, value)


def _parts(states: Tensor) -> tuple[Tensor, ...]:
    """Return the count [R, 1], and means, squared distances and squared errors, [R, D] each."""
    return (states[:, :1], *states[:, 1:].chunk(3, dim=1))


def _error(info: TaskInfo, output: Outputs, y: Tensor) -> Tensor:
    return info.quantity(predicted(output, y)).double() - y.double()


def _mean(values: Tensor) -> Tensor:
    return values if values.ndim == 1 else values.flatten(1).mean(dim=1)
