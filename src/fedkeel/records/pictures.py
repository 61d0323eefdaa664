"""Counts of what the last model of a run answers on the test set, and the file that keeps them.

They are sums over all test examples, from which no example can be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PICTURES = "pictures.safetensors"
"""File in a run folder with the counts."""

CONFUSION, PROBABILITIES, QUANTITIES = "confusion", "probabilities", "quantities"
"""Names of the counts."""

MAX_CLASSES = 50
"""Classes up to which there is a confusion matrix."""

BINS = 40
"""Bins of a true and of a predicted quantity."""


@dataclass(frozen=True)
class Pictures:
    """Counts of test examples. Y classes; each is None where the task has no such picture.

    Args:
        confusion: [Y, Y] by true and predicted class.
        probabilities: [B, 2] by bin of the probability of class 1, and by whether it is the truth.
        quantities: [40, 40] by bin of the true and of the predicted value.
        low: lower edge of the first bin of quantities.
        high: upper edge of the last one.
    """

    confusion: Ints | None = None
    probabilities: Ints | None = None
    quantities: Ints | None = None
    low: float = 0.0
    high: float = 0.0

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as named arrays."""
        counts = {
            CONFUSION: self.confusion,
            PROBABILITIES: self.probabilities,
            QUANTITIES: self.quantities,
        }
        arrays: dict[str, NDArray[Any]] = {k: v for k, v in counts.items() if v is not None}
        if self.quantities is not None:
            arrays["range"] = np.array([self.low, self.high])
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Return what `arrays` hold.

        Raises:
            ValueError: they hold no such counts.
        """
        counts = {
            name: arrays[name].astype(np.int64)
            for name in (CONFUSION, PROBABILITIES, QUANTITIES)
            if name in arrays
        }
        shapes = {name: table.shape for name, table in counts.items()}
        classes = shapes.get(CONFUSION, (2, 2))
        fits = (
            len(classes) == 2
            and 2 <= classes[0] == classes[1] <= MAX_CLASSES
            and shapes.get(PROBABILITIES, (1, 2))[1:] == (2,)
            and shapes.get(QUANTITIES, (BINS, BINS)) == (BINS, BINS)
        )
        if not fits or any((table < 0).any() for table in counts.values()):
            raise ValueError("counts of another shape, or below 0")
        low, high = 0.0, 0.0
        if QUANTITIES in counts:
            edges = arrays.get("range", np.zeros(0)).tolist()
            if len(edges) != 2 or not edges[0] < edges[1] or not np.isfinite(edges).all():
                raise ValueError("no range of the quantities")
            low, high = edges
        return cls(**counts, low=low, high=high)
