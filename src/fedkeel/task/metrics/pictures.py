"""What the pictures of a report are made of: counts of the last model's answers.

Like all metrics they are sums over examples. They are measured once, when a run ends.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from fedkeel.records.pictures import BINS, CONFUSION, MAX_CLASSES, PROBABILITIES, QUANTITIES
from fedkeel.task.losses import Loss, bce, cox, predicted, quantity_of
from fedkeel.task.metrics import areas
from fedkeel.task.metrics.base import CountMetric, TaskInfo
from fedkeel.task.metrics.classification import confusion_cells
from fedkeel.task.outputs import Outputs, Target


def picture_metrics(
    info: TaskInfo, loss: Loss, targets: Target, cells_by_score: Collection[int] = ()
) -> tuple[CountMetric, ...]:
    """Return the counts that show what a model answers.

    Labels of at most `MAX_CLASSES` classes, and masks, have a confusion matrix, two classes also
    counts by probability, in no more cells than the metrics have. One quantity has counts by its
    true and predicted value, in equal bins between the smallest and the largest target of the
    training set; what lies outside counts in the last bin. Behind the cells of a matrix, and of
    quantities, are those of answers that are NaN: one for each true class, and one.

    Args:
        info: the task.
        loss: its loss.
        targets: those of the training set.
        cells_by_score: `MetricSet.score_cells` of each metric that has such.
    """
    if not isinstance(targets, Tensor):
        return ()
    places = len(info.target)
    is_single = info.scores in (info.target, (1, *info.target))
    if 2 <= info.classes <= MAX_CLASSES and places != 1:
        is_ranked = info.scores == (info.classes, *info.target)
        if not is_ranked and not (is_single and info.classes == 2):
            return ()
        size = info.classes * (info.classes + 1)
        cells = partial(confusion_cells, classes=info.classes)
        counts = [CountMetric(CONFUSION, size, cells, _nothing)]
        if info.classes == 2 and not places:
            size = min(cells_by_score, default=areas.cell_count(areas.BINS))
            by_score = partial(areas.odds_cells, size=size)
            counts.append(CountMetric(PROBABILITIES, size, by_score, _nothing))
        return tuple(counts)
    is_quantity = not info.classes and targets.ndim == 1 and info.scores in ((), (1,))
    if not is_quantity or loss in (bce, cox) or not len(targets):
        return ()
    low, high = float(targets.min()), float(targets.max())
    if not low < high:  # a server of nodes with data of their own does not know them
        return ()
    by_value = partial(quantity_cells, loss=loss, low=low, high=high)
    return (CountMetric(QUANTITIES, BINS**2 + 1, by_value, _nothing),)


def quantity_cells(output: Outputs, y: Tensor, loss: Loss, low: float, high: float) -> Tensor:
    """Return [B] bin of the true value * BINS + bin of the predicted one.

    It is BINS**2 where the prediction is NaN, and -1 where the true value is.
    """
    values = quantity_of(loss)(predicted(output, y))

    def bins(quantities: Tensor) -> Tensor:
        share = (quantities.double() - low) / (high - low)
        return (share.nan_to_num(0.0, 1.0, 0.0) * BINS).floor().clamp(0, BINS - 1).long()

    cells = bins(y) * BINS + bins(values)
    return cells.masked_fill(values.isnan(), BINS**2).masked_fill(y.isnan(), -1)


def _nothing(counts: Tensor) -> Tensor:
    """Return the result of counts that are shown as they are."""
    return counts.new_full((len(counts),), torch.nan)
