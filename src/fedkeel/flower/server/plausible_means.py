"""Means that a secure sum says of its clients' losses, compared with those of the rounds before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.engine.base import TrainedCohort

MEANS = "nodes/means/"
"""What the names of the earlier means begin with in a checkpoint."""

LOSS = "training loss"


class PlausibleMeans:
    """Leaves out means that are far from those of the rounds before.

    In a sum nobody sees whose loss is false, and a single one is the mean of all. So a mean is left
    out, as NaN, that is more than `factor` times the median of the rounds before, where that counts
    as 1 at least. The first round has none before it.

    Args:
        factor: `flower.outlier_factor`.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._before: dict[str, list[float]] = {}

    def checked(self, trained: TrainedCohort) -> tuple[TrainedCohort, list[str]]:
        """Return a round without means that are far off, and what was left out, in words."""
        if not len(trained.loss):
            return trained, []
        reasons: list[str] = []
        loss = self._checked(LOSS, trained.loss, reasons)
        diagnostics = {
            name: self._checked(f"diagnostic {name}", values, reasons)
            for name, values in trained.diagnostics.items()
        }
        return replace(trained, loss=loss, diagnostics=diagnostics), reasons

    def _checked(
        self, name: str, values: NDArray[np.float64], reasons: list[str]
    ) -> NDArray[np.float64]:
        before, mean = self._before.setdefault(name, []), abs(float(values[0]))
        largest = self._factor * max(median(before), 1.0) if before else math.inf
        if mean <= largest:
            before.append(mean)
            return values
        reasons.append(
            f"the clients' mean {name}, {mean:.3g}, is left out: it is over {self._factor:g} times "
            "that of the rounds before"
        )
        return np.full_like(values, math.nan)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold."""
        return {MEANS + name: np.array(means) for name, means in self._before.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the means of the rounds before a checkpoint; one of an older version has none."""
        self._before = {
            name.removeprefix(MEANS): means.tolist()
            for name, means in arrays.items()
            if name.startswith(MEANS)
        }
