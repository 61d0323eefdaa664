"""Areas under curves of all thresholds: of the scores themselves, or of counts in fine bins.

A score is the log-odds of a class, log(p / (1 - p)), computed from the outputs without rounding p
to 0 or 1. On one machine the scores of all examples are kept, and the areas are exact. Nodes send
how many examples have a score in each of `BINS` bins: 1/256 wide up to 16 on both sides of 0, and
beyond that 512 for each doubling up to 2048. The error is below 0.002 where the standard deviation
of the log-odds of the examples is at least 0.2.

Equal scores, or those of one bin, are one threshold: none of their examples ranks before another. A
score that is NaN ranks as wrongly as it can: below all others of a positive, above them of a
negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.losses import predicted
from fedkeel.task.metrics.base import CountMetric, NodeSums, PooledMetric, TaskInfo, divided
from fedkeel.task.metrics.calibration import need_bins
from fedkeel.task.metrics.classification import need_binary, recall
from fedkeel.task.outputs import Outputs, scores_of

Finish = Callable[[Tensor], Tensor]
"""Counts [G, L, T, 2] of negatives and positives by rising threshold -> the metric, [G]. The first
threshold is of positives without a score, the last one of negatives without a score."""

_EDGE, _LARGEST = 16.0, 2048.0
_FINE, _OCTAVE = 4096, 512

BINS = 2 * (_FINE + _OCTAVE * round(math.log2(_LARGEST / _EDGE)))
"""Bins of log-odds in which nodes count."""


def auroc(info: TaskInfo, bins: int | None = None) -> PooledMetric:
    """Return the area under the receiver operating characteristic.

    It is exact on one machine, where equal scores count one half, and within 0.002 of it on nodes:
    see the module. More than two classes, and several labels, are averaged, each against the rest;
    those without a positive or a negative are left out.

    Args:
        info: the task.
        bins: count in so many bins of the log-odds, on one machine as on nodes. None takes the
            scores themselves on one machine, and `BINS` bins on nodes.
    """

    def finish(table: Tensor) -> Tensor:
        hits, false_alarms = _rates(table)
        width = false_alarms.diff(dim=2)
        height = (hits[..., 1:] + hits[..., :-1]) / 2
        return (width * height).sum(dim=2).nanmean(dim=1)

    return _of_thresholds(info, "auroc", bins, finish)


def auprc(info: TaskInfo, bins: int | None = None) -> PooledMetric:
    """Return the average precision, the area under precision over recall.

    Equal scores are one threshold. Exactness, several classes and arguments are as in `auroc`.
    """

    def finish(table: Tensor) -> Tensor:
        counts = table.flip(2).cumsum(dim=2)
        positive, everyone = counts[..., 1], counts.sum(dim=3)
        recalls = divided(positive, positive[..., -1:])
        steps = torch.cat([recalls[..., :1], recalls.diff(dim=2)], dim=2)
        precision = torch.where(everyone == 0, 0.0, positive / everyone.clamp(min=1))
        return (steps * precision).sum(dim=2).nanmean(dim=1)

    return _of_thresholds(info, "auprc", bins, finish)


def sensitivity(
    info: TaskInfo, at_specificity: float | None = None, bins: int | None = None
) -> CountMetric | PooledMetric:
    """Return the share of positives that are found.

    Args:
        info: the task, with two classes.
        at_specificity: choose the threshold of the scores at which at least this share of negatives
            is recognised and the sensitivity is highest; None takes the highest score.
        bins: as in `auroc`, where a threshold is chosen.
    """
    if at_specificity is None:
        return recall(info, "sensitivity", 1)
    need_binary(info, "sensitivity")
    if not 0 <= at_specificity <= 1:
        raise ModelError("'at_specificity' is a share.", got=at_specificity, expected="0..1")

    def finish(table: Tensor) -> Tensor:
        hits, false_alarms = (rates[:, 0, :-1] for rates in _rates(table))  # with a score
        allowed = 1 - false_alarms >= at_specificity - 1e-12
        best = torch.where(allowed, hits, -torch.inf).amax(dim=1)
        return torch.where(best.isinf(), torch.nan, best)

    return _of_thresholds(info, f"sensitivity(at_specificity={at_specificity:g})", bins, finish)


def _rates(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return hit rates and false alarm rates [G, L, T + 1], by falling threshold."""
    counts = table.flip(2).cumsum(dim=2)
    counts = torch.cat([torch.zeros_like(counts[:, :, :1]), counts], dim=2)
    rates = divided(counts, counts[:, :, -1:])
    return rates[..., 1], rates[..., 0]


def _of_thresholds(info: TaskInfo, name: str, bins: int | None, finish: Finish) -> PooledMetric:
    info.need_classes(name)
    if len(info.target) > 1 or len(info.scores) > 1:
        raise ModelError(
            f"The metric {name!r} is of one or several labels for each example.",
            got=f"targets of shape {list(info.target)} for one example",
        )
    count = BINS if bins is None else need_bins(bins)
    binary = info.outputs == 2 and not info.target
    labels = 1 if binary else info.scores[0]
    size = labels * cell_count(count)

    def sums(kept: Tensor, own: float) -> Tensor:
        cells = _cells(*_unpacked(kept, labels), count)
        return torch.bincount(cells[cells >= 0], minlength=size).double()

    def of_sums(states: Tensor, examples: Tensor) -> Tensor:
        return finish(states.view(len(states), labels, count + 2, 2))

    def of_all(kept: Tensor) -> float:
        if bins is not None:
            return float(of_sums(sums(kept, math.nan)[None], kept.new_tensor([len(kept)])))
        odds, truth = _unpacked(kept, labels)
        places = (truth > 0).any(dim=0).nonzero().flatten().tolist()  # elsewhere it is not defined
        values = [finish(_table(odds[:, k], truth[:, k])) for k in places]
        return float(torch.cat(values).nanmean()) if values else math.nan

    on_nodes = NodeSums(size, sums, of_sums)
    return PooledMetric(name, _kept, of_all, unit="%", on_nodes=on_nodes)


def _kept(output: Outputs, y: Tensor) -> Tensor:
    """Return [B, L + m] the log-odds, and what tells which are of the truth, see `_unpacked`."""
    odds = log_odds(output, y)
    return torch.cat([odds, y.double().view(len(y), -1)], dim=1)


def _unpacked(kept: Tensor, labels: int) -> tuple[Tensor, Tensor]:
    """Return [n, L] log-odds and [n, L] whether they are of the truth: 1, 0, or -1 to ignore it."""
    odds, y = kept[:, :labels], kept[:, labels:]
    truth = y == (torch.arange(labels) if y.shape[1] == 1 < labels else 1)
    return odds, torch.where(y < 0, -1.0, truth.double())


def _table(odds: Tensor, truth: Tensor) -> Tensor:
    """Return [1, 1, T, 2] counts of negatives and positives of one label, by distinct log-odds."""
    odds, truth = odds[truth >= 0], truth[truth >= 0].long()
    is_number = ~odds.isnan()
    values, place = torch.unique(odds[is_number], return_inverse=True)
    place = torch.full_like(truth, -1).masked_scatter(is_number, place)
    place = torch.where(is_number, 1 + place, (1 - truth) * (len(values) + 1))
    counts = torch.bincount(place * 2 + truth, minlength=2 * (len(values) + 2))
    return counts.double().view(1, 1, -1, 2)


def log_odds(output: Outputs, y: Tensor) -> Tensor:
    """Return [B, L] the log-odds of each label: of the second class where there are two."""
    scores = scores_of(output).double()
    if scores.ndim != 2 or y.ndim != 1 or scores.shape[1] < 2:
        return predicted(output, y).double().view(len(y), -1)
    if scores.shape[1] == 2:
        return scores[:, 1:] - scores[:, :1]
    total = scores.logsumexp(dim=1, keepdim=True)
    best = scores.argmax(dim=1, keepdim=True)
    rest = scores.scatter(1, best, -torch.inf).logsumexp(dim=1, keepdim=True)
    others = total + torch.log1p(-(scores - total).exp())
    return scores - others.scatter(1, best, rest)


def _cells(odds: Tensor, truth: Tensor, bins: int) -> Tensor:
    """Return [B, L] (label * (bins + 2) + bin of the log-odds) * 2 + truth, -1 to ignore it."""
    size = odds.abs()
    beyond = _FINE + _OCTAVE * torch.log2(size.clamp(min=_EDGE) / _EDGE)
    place = torch.where(size <= _EDGE, size * (_FINE / _EDGE), beyond) / (BINS / 2)  # 0..1
    share = (1 + odds.sign() * place) / 2
    bin = 1 + (share * bins).nan_to_num(0.0).floor().long().clamp(0, bins - 1)
    bin = torch.where(odds.isnan(), torch.where(truth == 1, 0, bins + 1), bin)
    label = torch.arange(odds.shape[1], device=odds.device)
    cells = (label * (bins + 2) + bin) * 2 + truth.long()
    return torch.where(truth < 0, -1, cells)


def cell_count(bins: int) -> int:
    """Return the number of cells of one label: of each bin, and of two without a score."""
    return 2 * (bins + 2)


def odds_cells(output: Outputs, y: Tensor, size: int) -> Tensor:
    """Return [B, 1] the cells of examples of two classes, of `size` in all. See `_cells`."""
    truth = torch.where(y < 0, -1, (y == 1).long()).view(len(y), -1)
    return _cells(log_odds(output, y), truth, size // 2 - 2)
