"""Metrics of times until an event."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.errors import ModelError
from fedkeel.task.metrics.base import PooledMetric, TaskInfo
from fedkeel.task.outputs import Outputs, scores_of

_ROWS = 1024
"""Rows of pairs that are compared at a time."""


def concordance(info: TaskInfo) -> PooledMetric:
    """Return Harrell's concordance: the share of pairs whose order in time is that of their risk.

    A pair counts where the earlier time is that of an event; of equal times, where one is an event
    and the other is not, which is the later one. Equal risks count one half. It is NaN where no
    pair counts. The output is a risk: the higher, the earlier.
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
    risk, time, event = values.unbind(dim=1)
    right = ties = pairs = 0.0
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        later = time[None] > time[rows, None]
        same_but_censored = (time[None] == time[rows, None]) & (event[None] == 0)
        counts = (later | same_but_censored) & (event[rows, None] == 1)
        right += float((counts & (risk[rows, None] > risk[None])).sum())
        ties += float((counts & (risk[rows, None] == risk[None])).sum())
        pairs += float(counts.sum())
    return (right + ties / 2) / pairs if pairs else float("nan")
