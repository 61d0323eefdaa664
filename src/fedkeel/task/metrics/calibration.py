"""How far the probabilities of a model can be trusted: the share of right answers beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED, predicted
from fedkeel.task.metrics.base import TaskInfo, Unit, divided, sum_by_group
from fedkeel.task.metrics.classification import classes_of
from fedkeel.task.outputs import Outputs, scores_of


class CalibrationError:
    """The expected calibration error: of the probability of the predicted class, in equal bins.

    It is the mean over examples of the distance, in the bin of an example, between the share of
    right answers and the mean probability. A prediction that is NaN counts as a wrong one of
    probability 1. Source: Guo et al. 2017, equation 3.
    """

    name, higher_is_better = "calibration_error", False
    unit: Unit = "%"

    def __init__(self, info: TaskInfo, bins: int = 15) -> None:
        info.need_classes(self.name)
        self._bins = need_bins(bins)

    def states(self, output: Outputs, target: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, bins * 3]: places, right answers and probabilities of each bin."""
        scores = scores_of(output).double()
        if scores.ndim == target.ndim + 1 and scores.shape[1] > 1:
            confidence = scores.softmax(dim=1).amax(dim=1)
        else:
            share = predicted(output, target).double().sigmoid()
            confidence = torch.maximum(share, 1 - share)
        confidence = confidence.nan_to_num(1.0)
        right, counted = classes_of(output, target) == target, target != IGNORED
        bins = (confidence * self._bins).ceil().long().sub(1).clamp(0, self._bins - 1)
        owner = group.to(target.device).view(-1, *[1] * (target.ndim - 1)).expand_as(target)
        place = (owner * self._bins + bins)[counted].cpu()
        rows = torch.stack([torch.ones_like(confidence), right, confidence], dim=-1)[counted]
        return sum_by_group(rows, place, groups * self._bins).view(groups, -1)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G]."""
        table = states.view(len(states), self._bins, 3)
        gaps = (table[..., 1] - table[..., 2]).abs().sum(dim=1)
        return divided(gaps, table[..., 0].sum(dim=1))


def need_bins(bins: object) -> int:
    """Refuse a number of bins that cannot be one.

    Raises:
        ModelError: it is not a whole number from 1 on.
    """
    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 1:
        raise ModelError("'bins' is a number of bins.", got=bins, expected="a whole number >= 1")
    return bins
