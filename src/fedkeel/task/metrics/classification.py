"""Metrics of labels: one or several for each example, or one for each place of a mask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import IGNORED, predicted
from fedkeel.task.metrics.base import CountMetric, SumMetric, TaskInfo, divided, mean_of_counted
from fedkeel.task.outputs import Outputs, scores_of

Finish = Callable[[Tensor], Tensor]
"""Counts [G, size] -> the metric of each group, [G]."""


def accuracy(info: TaskInfo) -> SumMetric:
    """Return the share of right answers: of labels, of places of a mask, or of several labels.

    The answer is the class of the highest score, the first of equal ones. Of places and of several
    labels it is the mean over the examples of their shares.
    """
    info.need_classes("accuracy")
    is_score = info.scores in ((), (1,)) and info.classes == 2  # of the second class
    if info.target:
        return SumMetric("accuracy", _shares_of_hits, mean_of_counted, unit="%")
    ranked = len(info.scores) == 1 and not is_score
    hits = partial(_hits_within, k=1) if ranked else _hits
    return SumMetric("accuracy", hits, unit="%")


def top(info: TaskInfo, k: int = 3) -> SumMetric:
    """Return the share of examples whose label is among the k highest scores.

    Of equal scores, that of the smaller class ranks first.
    """
    info.need_classes(f"top{k}")
    if k < 1 or len(info.scores) != 1:
        raise ModelError(
            f"The metric 'top{k}' needs k >= 1, and one label for each example.",
            got=f"scores of shape {list(info.scores)}",
        )
    return SumMetric(f"top{k}", partial(_hits_within, k=k), unit="%")


def _hits_within(output: Outputs, y: Tensor, k: int) -> Tensor:
    """Return [B] whether the label is among the k highest scores; never where one is NaN."""
    scores, label = scores_of(output), y.to(torch.int64)
    size = scores.shape[1]
    label_score = scores.gather(1, label.clamp(0, size - 1)[:, None])
    classes = torch.arange(size, device=scores.device)
    before = (scores > label_score) | ((scores == label_score) & (classes < label[:, None]))
    is_class = (label >= 0) & (label < size)
    return (before.sum(dim=1) < k) & is_class & ~scores.isnan().any(dim=1)


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

    Of equal scores it is the first class. A class of -1, which none has, stands where a score is
    NaN.
    """
    scores = scores_of(output)
    if scores.ndim == y.ndim + 1 and scores.shape[1] > 1:
        predicted_class = scores.argmax(dim=1)
        return predicted_class.masked_fill(scores.isnan().any(dim=1), -1)
    scores = predicted(output, y)
    return (scores > 0).to(torch.int64).masked_fill(scores.isnan(), -1)


def table_size(info: TaskInfo) -> int:
    """Return the number of classes of a table of true and predicted classes."""
    return max(info.outputs, info.classes)


# ---- the whole table ----------------------------------------------------------------------------


def confusion_cells(output: Outputs, y: Tensor, classes: int) -> Tensor:
    """Return [B, ...] true class * classes + predicted class, -1 where a place does not count.

    Cells from classes ** 2 on are of places whose scores are NaN, by their true class.
    """
    predictions, truth = classes_of(output, y), y.to(torch.int64)
    cells = torch.where(predictions < 0, classes**2 + truth, truth * classes + predictions)
    return torch.where(truth < 0, -1, cells)


def confusion(info: TaskInfo, name: str = "confusion") -> CountMetric:
    """Return the counts of true and predicted classes, and the share on their diagonal.

    Places whose scores are NaN are in no column, and count as wrong. It keeps the square of the
    number of classes.
    """
    info.need_classes(name)
    classes = table_size(info)

    def share(counts: Tensor) -> Tensor:
        matrix = counts[:, : classes**2].view(len(counts), classes, classes)
        return divided(matrix.diagonal(dim1=1, dim2=2).sum(dim=1), counts.sum(dim=1))

    size, cells = classes * (classes + 1), partial(confusion_cells, classes=classes)
    return CountMetric(name, size, cells, share)


def only_compares(function: object) -> bool:
    """Return whether a function of scores and labels compares them, and rounds nothing.

    What it returns for an example is then the same whatever is beside it in a batch.
    """
    return getattr(function, "func", function) in (
        _hits,
        _hits_within,
        confusion_cells,
        class_cells,
    )


# ---- three counts for each class ----------------------------------------------------------------


def class_cells(output: Outputs, y: Tensor, classes: int) -> Tensor:
    """Return [B, 3, ...] the places of what counts: the true class, the predicted one, a hit.

    Counts of a true class come first, then those of a predicted one, then those of right answers.
    It is -1 where a place does not count, where scores are NaN, and where an answer is not right.
    """
    prediction, truth = classes_of(output, y), y.to(torch.int64)
    prediction = prediction.masked_fill(truth < 0, -1)
    predictions = torch.where(prediction < 0, -1, classes + prediction)
    right = torch.where((prediction == truth) & (prediction >= 0), 2 * classes + truth, -1)
    return torch.stack([truth.clamp(min=-1), predictions, right], dim=1)


def _of_classes(info: TaskInfo, name: str, finish: Callable[[Tensor], Tensor]) -> CountMetric:
    """Return a metric of [G, 3, Y]: how often each class is true, is predicted, and is both."""
    info.need_classes(name)
    classes = table_size(info)

    def of_counts(counts: Tensor) -> Tensor:
        return finish(counts.view(len(counts), 3, classes))

    return CountMetric(name, 3 * classes, partial(class_cells, classes=classes), of_counts)


def balanced_accuracy(info: TaskInfo) -> CountMetric:
    """Return the mean over the classes that occur of the share of their examples that are right.

    It keeps three numbers for each class.
    """

    def finish(counts: Tensor) -> Tensor:
        return divided(counts[:, 2], counts[:, 0]).nanmean(dim=1)

    return _of_classes(info, "balanced_accuracy", finish)


def macro_f1(info: TaskInfo) -> CountMetric:
    """Return the mean F1 over the classes that occur or are predicted.

    With several labels for each example it is the mean over the labels, 0 for one without any
    positive, as scikit-learn has it. It keeps three numbers for each class.
    """
    info.need_classes("macro_f1")
    if info.scores == info.target and info.target:
        return _multilabel_f1(info)

    def finish(counts: Tensor) -> Tensor:
        true, found, right = counts.unbind(dim=1)
        return divided(2 * right, found + true).nanmean(dim=1)

    return _of_classes(info, "macro_f1", finish)


def _multilabel_f1(info: TaskInfo) -> CountMetric:
    labels = info.target[-1]

    def cells(output: Outputs, y: Tensor) -> Tensor:
        prediction, truth = classes_of(output, y), y.to(torch.int64)
        prediction = torch.where(prediction < 0, 1 - truth, prediction)
        places = torch.arange(labels, device=y.device) * 4 + truth * 2 + prediction
        return places.masked_fill(truth < 0, -1)

    def finish(counts: Tensor) -> Tensor:
        table = counts.view(len(counts), labels, 4)
        right, wrong = table[..., 3], table[..., 1] + table[..., 2]
        return divided(2 * right, 2 * right + wrong).nan_to_num(0.0).mean(dim=1)

    return CountMetric("macro_f1", labels * 4, cells, finish)


def recall(info: TaskInfo, name: str, label: int) -> CountMetric:
    """Return the share of examples of one of two classes that are recognised."""
    need_binary(info, name)
    return _of_classes(info, name, lambda counts: divided(counts[:, 2, label], counts[:, 0, label]))


def specificity(info: TaskInfo) -> CountMetric:
    """Return the share of negatives that are recognised."""
    return recall(info, "specificity", 0)


def need_binary(info: TaskInfo, name: str) -> None:
    """Refuse a task of more than two classes."""
    info.need_classes(name)
    if info.outputs != 2:
        raise ModelError(
            f"The metric {name!r} is of two classes, of which 1 is the positive one.",
            got=f"{info.outputs} classes",
            do="take 'balanced_accuracy' or 'macro_f1'",
        )
