"""Metrics of labels, of several labels for each example, and of probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED, predicted
from fedkeel.task.metrics.base import (
    CountMetric,
    SumMetric,
    TaskInfo,
    Unit,
    divided,
    mean_of_counted,
    sum_by_group,
)
from fedkeel.task.outputs import Outputs, scores_of

Finish = Callable[[Tensor], Tensor]
"""Counts [G, size] -> the metric of each group, [G]."""


def accuracy(info: TaskInfo) -> SumMetric:
    """Return the share of right answers: of labels, of places of a mask, or of several labels."""
    info.need_classes("accuracy")
    is_score = info.scores in ((), (1,)) and info.classes == 2  # of the second class
    if info.target:
        return SumMetric("accuracy", _shares_of_hits, mean_of_counted, unit="%")
    ranked = len(info.scores) == 1 and not is_score
    hits = partial(_hits_within, k=1) if ranked else _hits
    return SumMetric("accuracy", hits, unit="%")


def top(info: TaskInfo, k: int = 3) -> SumMetric:
    """Return the share of examples whose label is among the k highest scores."""
    info.need_classes(f"top{k}")
    if k < 1 or len(info.scores) != 1:
        raise ModelError(
            f"The metric 'top{k}' needs k >= 1, and one label for each example.",
            got=f"scores of shape {list(info.scores)}",
        )
    return SumMetric(f"top{k}", partial(_hits_within, k=k), unit="%")


def _hits_within(output: Outputs, y: Tensor, k: int) -> Tensor:
    """Return [B] whether the label is among the k highest scores; never where one is NaN."""
    scores = scores_of(output)
    best = scores.topk(min(k, scores.shape[1]), dim=1).indices == y[:, None]
    return (best & ~scores.isnan().any(dim=1, keepdim=True)).any(dim=1)


def _hits(output: Outputs, y: Tensor) -> Tensor:
    return (classes_of(output, y) == y).double()


def _shares_of_hits(output: Outputs, y: Tensor) -> Tensor:
    """Return [B, 2] the share of right answers among the targets that count; whether any does."""
    counted = (y != IGNORED).flatten(1)
    right = ((classes_of(output, y) == y).flatten(1) & counted).double()
    share = right.sum(dim=1) / counted.sum(dim=1).clamp(min=1)
    return torch.stack([share, counted.any(dim=1).double()], dim=1)


def classes_of(output: Outputs, y: Tensor) -> Tensor:
    """Return the predicted class of each target: of the highest score, or of a score above 0.

    A class of -1, which none has, stands where a score is NaN.
    """
    scores = scores_of(output)
    if scores.ndim == y.ndim + 1 and scores.shape[1] > 1:
        found = scores.argmax(dim=1)
        return found.masked_fill(scores.isnan().any(dim=1), -1)
    scores = predicted(output, y)
    return (scores > 0).to(torch.int64).masked_fill(scores.isnan(), -1)


def _table(info: TaskInfo) -> int:
    return max(info.outputs, info.classes)


def confusion_cells(output: Outputs, y: Tensor, classes: int) -> Tensor:
    """Return [B, ...] true class * classes + predicted class, -1 where a place does not count."""
    predictions, truth = classes_of(output, y), y.to(torch.int64)
    cells = truth * classes + predictions.clamp(min=0)
    return torch.where((truth < 0) | (predictions < 0), -1, cells)


def _matrix(counts: Tensor) -> Tensor:
    """Return [G, Y, Y] counts by true and predicted class."""
    classes = round(counts.shape[1] ** 0.5)
    return counts.view(len(counts), classes, classes)


def confusion(info: TaskInfo, name: str = "confusion") -> CountMetric:
    """Return the counts of true and predicted classes, and the share on their diagonal."""
    info.need_classes(name)
    classes = _table(info)

    def share(counts: Tensor) -> Tensor:
        matrix = _matrix(counts)
        return divided(matrix.diagonal(dim1=1, dim2=2).sum(dim=1), matrix.sum(dim=(1, 2)))

    return CountMetric(name, classes**2, partial(confusion_cells, classes=classes), share)


def balanced_accuracy(info: TaskInfo) -> CountMetric:
    """Return the mean over the classes that occur of the share of their examples that are right."""

    def finish(counts: Tensor) -> Tensor:
        matrix = _matrix(counts)
        recall = divided(matrix.diagonal(dim1=1, dim2=2), matrix.sum(dim=2))
        return recall.nanmean(dim=1)

    return _of_confusion(info, "balanced_accuracy", finish)


def macro_f1(info: TaskInfo) -> CountMetric:
    """Return the mean F1 over the classes that occur or are predicted.

    With several labels for each example it is the mean over the labels, 0 for one without any
    positive, as scikit-learn has it.
    """
    info.need_classes("macro_f1")
    if info.scores == info.target and info.target:
        return _multilabel_f1(info)

    def finish(counts: Tensor) -> Tensor:
        matrix = _matrix(counts)
        right = matrix.diagonal(dim1=1, dim2=2)
        return divided(2 * right, matrix.sum(dim=1) + matrix.sum(dim=2)).nanmean(dim=1)

    return _of_confusion(info, "macro_f1", finish)


def _multilabel_f1(info: TaskInfo) -> CountMetric:
    labels = info.target[-1]

    def cells(output: Outputs, y: Tensor) -> Tensor:
        found, truth = classes_of(output, y).clamp(min=0), y.to(torch.int64)
        places = torch.arange(labels, device=y.device) * 4 + truth * 2 + found
        return places.masked_fill(truth == IGNORED, -1)

    def finish(counts: Tensor) -> Tensor:
        table = counts.view(len(counts), labels, 4)
        right, wrong = table[..., 3], table[..., 1] + table[..., 2]
        return divided(2 * right, 2 * right + wrong).nan_to_num(0.0).mean(dim=1)

    return CountMetric("macro_f1", labels * 4, cells, finish)


def sensitivity(
    info: TaskInfo, at_specificity: float | None = None, bins: int = 1000
) -> CountMetric:
    """Return the share of positives that are found.

    Args:
        info: the task, with two classes.
        at_specificity: choose the threshold of the scores at which at least this share of negatives
            is recognised and the sensitivity is highest; None takes the highest score.
        bins: number of bins of the probability, where a threshold is chosen.
    """
    _need_binary(info, "sensitivity")
    if at_specificity is None:
        return _of_confusion(info, "sensitivity", partial(_recall, label=1))
    if not 0 <= at_specificity <= 1:
        raise ModelError("'at_specificity' is a share.", got=at_specificity, expected="0..1")

    def finish(counts: Tensor) -> Tensor:
        hits, false_alarms = _curve(counts.view(len(counts), 1, bins, 2))
        allowed = 1 - false_alarms[:, 0] >= at_specificity - 1e-12
        best = torch.where(allowed, hits[:, 0], -torch.inf).amax(dim=1)
        return torch.where(best.isinf(), torch.nan, best)

    name = f"sensitivity(at_specificity={at_specificity:g})"
    return _of_probabilities(info, name, bins, finish)


def specificity(info: TaskInfo) -> CountMetric:
    """Return the share of negatives that are recognised."""
    _need_binary(info, "specificity")
    return _of_confusion(info, "specificity", partial(_recall, label=0))


def _recall(counts: Tensor, label: int) -> Tensor:
    matrix = _matrix(counts)
    return divided(matrix[:, label, label], matrix[:, label].sum(dim=1))


def _of_confusion(info: TaskInfo, name: str, finish: Finish) -> CountMetric:
    info.need_classes(name)
    classes = _table(info)
    cells = partial(confusion_cells, classes=classes)
    return CountMetric(name, classes**2, cells, finish)


def _need_binary(info: TaskInfo, name: str) -> None:
    info.need_classes(name)
    if info.outputs != 2:
        raise ModelError(
            f"The metric {name!r} is of two classes, of which 1 is the positive one.",
            got=f"{info.outputs} classes",
            do="take 'balanced_accuracy' or 'macro_f1'",
        )


# ---- of probabilities, in bins ------------------------------------------------------------------


def auroc(info: TaskInfo, bins: int = 1000) -> CountMetric:
    """Return the area under the receiver operating characteristic.

    The probability of each class is counted in bins of equal width, and equal bins are ties, so
    that the counts of many places add up. It is the exact area for probabilities that are rounded
    to their bin. More than two classes, and several labels, are averaged, each against the rest;
    those without a positive or a negative are left out.
    """

    def finish(counts: Tensor) -> Tensor:
        hits, false_alarms = _curve(counts.view(len(counts), -1, bins, 2))
        width = false_alarms.diff(dim=2)
        height = (hits[..., 1:] + hits[..., :-1]) / 2
        return (width * height).sum(dim=2).nanmean(dim=1)

    return _of_probabilities(info, "auroc", bins, finish)


def auprc(info: TaskInfo, bins: int = 1000) -> CountMetric:
    """Return the average precision, the area under precision over recall; bins as in `auroc`."""

    def finish(counts: Tensor) -> Tensor:
        table = counts.view(len(counts), -1, bins, 2).flip(2).cumsum(dim=2)
        positive, everyone = table[..., 1], table.sum(dim=3)
        recall = divided(positive, positive[..., -1:])
        steps = torch.cat([recall[..., :1], recall.diff(dim=2)], dim=2)
        precision = torch.where(everyone == 0, 0.0, positive / everyone.clamp(min=1))
        return (steps * precision).sum(dim=2).nanmean(dim=1)

    return _of_probabilities(info, "auprc", bins, finish)


def probabilities(output: Outputs, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, L] probabilities and [B, L] whether they are of the truth.

    L is 1 for two classes, the number of classes for more, and that of labels for several.
    """
    scores = scores_of(output).double()
    if scores.ndim == 2 and y.ndim == 1 and scores.shape[1] > 2:
        truth = y[:, None] == torch.arange(scores.shape[1], device=y.device)
        return scores.softmax(dim=1), truth
    if scores.ndim == 2 and y.ndim == 1 and scores.shape[1] == 2:
        return scores.softmax(dim=1)[:, 1:], (y == 1)[:, None]
    return predicted(output, y).double().sigmoid().view(len(y), -1), (y == 1).view(len(y), -1)


def _of_probabilities(info: TaskInfo, name: str, bins: int, finish: Finish) -> CountMetric:
    info.need_classes(name)
    if len(info.target) > 1 or len(info.scores) > 1:
        raise ModelError(
            f"The metric {name!r} is of one or several labels for each example.",
            got=f"targets of shape {list(info.target)} for one example",
        )
    binary = info.outputs == 2 and not info.target
    labels = 1 if binary else info.scores[0]

    return CountMetric(name, labels * bins * 2, partial(probability_cells, bins=bins), finish)


def probability_cells(output: Outputs, y: Tensor, bins: int) -> Tensor:
    """Return [B, L] (label * bins + bin of its probability) * 2 + whether it is of the truth."""
    shares, truth = probabilities(output, y)
    bin = (shares * bins).long().clamp(0, bins - 1)
    label = torch.arange(shares.shape[1], device=y.device)
    left_out = shares.isnan() | (y == IGNORED).view(len(y), -1)
    return torch.where(left_out, -1, (label * bins + bin) * 2 + truth.long())


def _curve(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return hit rates and false alarm rates [G, L, bins + 1], by falling threshold.

    Args:
        table: [G, L, bins, 2] counts of negatives and positives.
    """
    counts = table.flip(2).cumsum(dim=2)
    counts = torch.cat([torch.zeros_like(counts[:, :, :1]), counts], dim=2)
    rates = divided(counts, counts[:, :, -1:])
    return rates[..., 1], rates[..., 0]


class CalibrationError:
    """The expected calibration error: of the probability of the predicted class, in equal bins.

    It is the mean over examples of the distance, in the bin of an example, between the share of
    right answers and the mean probability. Source: Guo et al. 2017, equation 3.
    """

    name, higher_is_better = "calibration_error", False
    unit: Unit = "%"

    def __init__(self, info: TaskInfo, bins: int = 15) -> None:
        info.need_classes(self.name)
        self._bins = bins

    def states(self, output: Outputs, target: Tensor, group: Tensor, groups: int) -> Tensor:
        """Return [groups, bins * 3]: examples, right answers and probabilities of each bin."""
        scores = scores_of(output).double()
        if scores.ndim == 2 and scores.shape[1] > 1:
            confidence, found = scores.softmax(dim=1).max(dim=1)
        else:
            share = predicted(output, target).double().sigmoid()
            confidence, found = torch.maximum(share, 1 - share), (share > 0.5).long()
        bins = (confidence * self._bins).ceil().long().sub(1).clamp(0, self._bins - 1)
        rows = torch.stack([torch.ones_like(confidence), found == target, confidence], dim=1)
        place = group * self._bins + bins.cpu()
        return sum_by_group(rows, place, groups * self._bins).view(groups, -1)

    def result(self, states: Tensor, examples: Tensor) -> Tensor:
        """Return [G]."""
        table = states.view(len(states), self._bins, 3)
        return divided((table[..., 1] - table[..., 2]).abs().sum(dim=1), examples)
