"""Counts of what the last model of a run answers, and the file that keeps them.

They are of the models and the examples that the run is judged by: the global model on the test set;
or the clients' own models, each on the test set or on its own examples. They are sums over all
examples, from which no example can be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PICTURES = "pictures.safetensors"
"""File in a run folder with the counts."""

CONFUSION, PROBABILITIES, QUANTITIES = "confusion", "probabilities", "quantities"
"""Names of the counts."""

MAX_CLASSES = 50
"""Classes up to which there is a confusion matrix."""

BINS = 40
"""Bins of a true and of a predicted quantity."""


UNANSWERED = "unanswered"
"""Name of the counts of answers that are NaN."""

CURVE, AREA = "curve", "area"
"""Names of a mean curve."""

CURVE_POINTS = 1001
"""Points of a mean curve."""


def roc_curve(counts: Ints) -> tuple[Floats, Floats]:
    """Return false positive and true positive rates by falling threshold, 0 first.

    Args:
        counts: [B, 2] negatives and positives by bin of their probability, of both some.
    """
    filled = counts[counts.sum(axis=1) > 0]
    below = np.concatenate([np.zeros((1, 2)), np.cumsum(filled[::-1], axis=0)])
    rates = below / below[-1]
    return rates[:, 0], rates[:, 1]


def area_below(false_alarms: Floats, hits: Floats) -> float:
    """Return the area below a curve of straight lines."""
    return float(np.sum(np.diff(false_alarms) * (hits[1:] + hits[:-1]) / 2))


@dataclass(frozen=True)
class MeanCurve:
    """The mean ROC curve of models that are scored one by one, as their mean AUROC is.

    The answers of several models are not pooled: each model has thresholds of its own, and the
    curve of all answers together has another area than the curves have on average.

    Args:
        hits: [1001] mean true positive rate at the false positive rates 0, 0.001 to 1.
        area: the mean of the areas below the curves.
    """

    hits: Floats
    area: float

    @property
    def false_alarms(self) -> Floats:
        """[1001] false positive rates."""
        return np.linspace(0.0, 1.0, len(self.hits))

    @classmethod
    def of(cls, tables: Sequence[Ints]) -> Self | None:
        """Return the mean of the curves of counts [B, 2], None where none has both classes."""
        curves = [roc_curve(table) for table in tables if table.sum(axis=0).all()]
        areas = [area_below(*curve) for curve in curves]
        return cls.mean(curves, areas) if curves else None

    @classmethod
    def mean(cls, curves: Sequence[tuple[Floats, Floats]], areas: Sequence[float]) -> Self:
        """Return the mean of at least one curve of false positive and true positive rates."""
        grid = np.linspace(0.0, 1.0, CURVE_POINTS)
        hits = np.mean([_at(grid, *curve) for curve in curves], axis=0)
        return cls(hits, float(np.mean(areas)))


def _at(grid: Floats, false_alarms: Floats, hits: Floats) -> Floats:
    """Return the highest true positive rate of a curve at each false positive rate."""
    last = np.append(np.diff(false_alarms) > 0, True)
    return np.asarray(np.interp(grid, false_alarms[last], hits[last]))


@dataclass(frozen=True)
class Pictures:
    """Counts of examples. Y classes; each is None where the task has no such picture.

    Args:
        confusion: [Y, Y] by true and predicted class.
        probabilities: [B, 2] by bin of the probability of class 1, and by whether it is the truth.
        quantities: [40, 40] by bin of the true and of the predicted value.
        low: lower edge of the first bin of quantities.
        high: upper edge of the last one.
        curve: the mean ROC curve of the clients' models, where each is scored on the test set.
        unanswered: answers that are NaN, which no cell counts: [Y] by true class, or [1] of
            quantities.
    """

    confusion: Ints | None = None
    probabilities: Ints | None = None
    quantities: Ints | None = None
    low: float = 0.0
    high: float = 0.0
    curve: MeanCurve | None = None
    unanswered: Ints | None = None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as named arrays."""
        counts = {
            CONFUSION: self.confusion,
            PROBABILITIES: self.probabilities,
            QUANTITIES: self.quantities,
            UNANSWERED: self.unanswered,
        }
        arrays: dict[str, NDArray[Any]] = {k: v for k, v in counts.items() if v is not None}
        if self.quantities is not None:
            arrays["range"] = np.array([self.low, self.high])
        if self.curve is not None:
            arrays |= {CURVE: self.curve.hits, AREA: np.array([self.curve.area])}
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return what `arrays` hold.

        Raises:
            ValueError: they hold no such counts.
        """
        counts = {
            name: arrays[name].astype(np.int64)
            for name in (CONFUSION, PROBABILITIES, QUANTITIES, UNANSWERED)
            if name in arrays
        }
        shapes = {name: table.shape for name, table in counts.items()}
        classes = shapes.get(CONFUSION, (2, 2))
        places = classes[:1] if CONFUSION in shapes else (1,)
        fits = (
            len(classes) == 2
            and 2 <= classes[0] == classes[1] <= MAX_CLASSES
            and shapes.get(PROBABILITIES, (1, 2))[1:] == (2,)
            and shapes.get(QUANTITIES, (BINS, BINS)) == (BINS, BINS)
            and shapes.get(UNANSWERED, places) == places
        )
        if not fits or any((table < 0).any() for table in counts.values()):
            raise ValueError("counts of another shape, or below 0")
        low, high = 0.0, 0.0
        if QUANTITIES in counts:
            edges = arrays.get("range", np.zeros(0)).tolist()
            if len(edges) != 2 or not edges[0] < edges[1] or not np.isfinite(edges).all():
                raise ValueError("no range of the quantities")
            low, high = edges
        return cls(**counts, low=low, high=high, curve=_curve_of(arrays))


def _curve_of(arrays: Mapping[str, NDArray[Any]]) -> MeanCurve | None:
    """Return the mean curve or None; raise a ValueError where the arrays do not make a curve."""
    if CURVE not in arrays:
        return None
    hits, area = arrays[CURVE].astype(np.float64), arrays.get(AREA, np.zeros(0)).tolist()
    is_curve = hits.ndim == 1 and len(hits) > 1 and bool(((hits >= 0) & (hits <= 1)).all())
    if not is_curve or len(area) != 1 or not 0 <= area[0] <= 1:
        raise ValueError("no mean ROC curve")
    return MeanCurve(hits, area[0])
