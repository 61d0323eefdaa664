"""Metrics of times until an event."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.metrics.base import PooledMetric, TaskInfo
from fedkeel.task.outputs import Outputs, scores_of

Ints = NDArray[np.int64]


def concordance(info: TaskInfo) -> PooledMetric:
    """Return Harrell's concordance: the share of pairs whose order in time is that of their risk.

    A pair counts where the earlier time is that of an event; of equal times, where one is an event
    and the other is not, which is the later one. Equal risks count one half. It is NaN where no
    pair counts. The output is a risk: the higher, the earlier. A risk that is NaN orders no pair.
    It takes n log(n)^2 steps for n examples.
    """
    if info.target != (2,):
        raise ModelError(
            "The metric 'concordance' is of times until an event.",
            got=f"targets of shape {list(info.target)} for one example",
            expected="[2]: the time, and 1 for an event or 0 for the end of observation",
        )

    def values(output: Outputs, y: Tensor) -> Tensor:
        return torch.cat([scores_of(output).reshape(len(y), 1).double(), y.double()], dim=1)

    return PooledMetric("concordance", values, _concordance)


def _concordance(values: Tensor) -> float:
    risk, time, event = values.numpy().T
    is_event = event == 1
    times = np.unique(time, return_inverse=True)[1]
    age = 2 * times + ~is_event  # an end of observation is later than an event at that time
    ends = np.sort(age)
    pairs = int((len(age) - np.searchsorted(ends, age[is_event], side="right")).sum())
    if not pairs:
        return float("nan")
    with_risk = ~np.isnan(risk)
    rank = np.unique(risk[with_risk], return_inverse=True)[1]
    right, ties = _ordered_pairs(age[with_risk], rank, is_event[with_risk])
    return (right + ties / 2) / pairs


def _ordered_pairs(age: Ints, rank: Ints, chosen: NDArray[np.bool_]) -> tuple[int, int]:
    """Return in how many pairs of a chosen and an older one this one ranks below, and equally.

    Args:
        age: [n] of each.
        rank: [n] of each, from 0 on.
        chosen: [n] whether one may be the younger of a pair.
    """
    keys = np.sort(rank * (age.max(initial=0) + 1) + age)
    first = rank[chosen] * (age.max(initial=0) + 1)
    until = np.searchsorted(keys, first + age.max(initial=0), side="right")
    equal = until - np.searchsorted(keys, first + age[chosen], side="right")
    # merge sort by rank of what is sorted by age: of two blocks, all of the right one is older;
    # in order of rank among those of one age, none of these counts
    order = np.lexsort((rank, age))
    size = 1 << max(0, len(order) - 1).bit_length()
    ranks = np.full(size, len(order), dtype=np.int64)  # padding, which ranks below nothing
    ranks[: len(order)] = rank[order]
    asks = np.zeros(size, dtype=bool)
    asks[: len(order)] = chosen[order]
    below, width = 0, 1
    while width < size:
        left, right = ranks.reshape(-1, 2, width).transpose(1, 0, 2)
        block = np.arange(len(left))[:, None]
        places = np.sort(right, axis=1) + block * (len(order) + 1)
        questions = asks.reshape(-1, 2, width)[:, 0]
        found = np.searchsorted(places.ravel(), left + block * (len(order) + 1)) - block * width
        below += int(found[questions].sum())
        width *= 2
    return below, int(equal.sum())
