"""Metrics of masks: how far the predicted and the true area overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED
from fedkeel.task.metrics.base import SumMetric, TaskInfo, divided, mean_of_counted
from fedkeel.task.metrics.classification import classes_of
from fedkeel.task.outputs import Outputs

Parts = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(common area, joint area) -> numerator and denominator."""


def dice(info: TaskInfo, pooled: bool = False) -> SumMetric:
    """Return the Dice coefficient, twice the common area over the sum of both areas.

    Args:
        info: the task, with masks [H, W] of 0 and 1 or of classes. Class 0 is the background and
            does not count; others are averaged. A score that is NaN counts as a wrong class: at a
            place of the background, as each of the others.
        pooled: whether the areas of all examples are added first; else each example has a
            coefficient, 1 where neither area has a place, and their mean counts; without those of
            which no place counts.
    """
    return _overlap(info, "dice", pooled, lambda both, either: (2 * both, both + either))


def iou(info: TaskInfo, pooled: bool = False) -> SumMetric:
    """Return the common area over the joint area; arguments as in `dice`."""
    return _overlap(info, "iou", pooled, lambda both, either: (both, either))


def _overlap(info: TaskInfo, name: str, pooled: bool, parts: Parts) -> SumMetric:
    if not info.target:
        raise ModelError(
            f"The metric {name!r} is of masks.",
            got="one target for each example",
            expected="targets [N, H, W]",
            do="take 'accuracy' or 'macro_f1'",
        )
    classes = info.outputs - 1
    areas = partial(_areas, classes=classes)
    label = f"{name}(pooled=True)" if pooled else name

    def of_each(output: Outputs, y: Tensor) -> Tensor:
        above, below = parts(*areas(output, y))
        share = torch.where(below == 0, 1.0, above / below.clamp(min=1)).mean(dim=1)
        counts = (y != IGNORED).flatten(1).any(dim=1).double()
        return torch.stack([share * counts, counts], dim=1)

    def sums(output: Outputs, y: Tensor) -> Tensor:
        return torch.cat(areas(output, y), dim=1)

    def finish(sums: Tensor, examples: Tensor) -> Tensor:
        above, below = parts(sums[:, :classes], sums[:, classes:])
        return divided(above, below).nanmean(dim=1)

    if pooled:
        return SumMetric(label, sums, finish, unit="%")
    return SumMetric(label, of_each, mean_of_counted, unit="%")


def _areas(output: Outputs, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return [B, classes] places that both have and that either has, of each class from 1 on."""
    predictions, counts = classes_of(output, y), (y != IGNORED).flatten(1)
    labels = torch.arange(1, classes + 1, device=y.device)[:, None]
    wrong = ((predictions == -1) & (y == 0)).flatten(1)
    predictions = ((predictions.flatten(1)[:, None] == labels) | wrong[:, None]) & counts[:, None]
    truth = (y.flatten(1)[:, None] == labels) & counts[:, None]
    return (predictions & truth).sum(dim=2).double(), (predictions | truth).sum(dim=2).double()
