"""Training examples by client and class, without the zeros, and the file that keeps them.

With thousands of clients and classes nearly all counts are zero; in run.json they took 28 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

HISTOGRAM = "histogram.safetensors"
"""File in a run folder with the histogram, where it is too large for run.json."""

MAX_NUMBERS = 100_000
"""Clients times classes up to which run.json has the histogram itself."""

_MAX_DENSE = 10**8
"""Clients times classes up to which the whole table is made, as 32-bit numbers."""


@dataclass(frozen=True)
class Histogram:
    """How many training examples of each class each client has. C clients, Y classes.

    Args:
        clients: C.
        classes: Y.
        client: [M] client of each count that is not 0, ascending.
        label: [M] its class.
        count: [M] the count.
    """

    clients: int
    classes: int
    client: Ints
    label: Ints
    count: Ints

    @classmethod
    def of_rows(cls, rows: ArrayLike) -> Self:
        """Return the histogram of [C][Y] counts."""
        table = np.asarray(rows, dtype=np.int64)
        client, label = np.nonzero(table)
        return cls(len(table), table.shape[1], client, label, table[client, label])

    def classes_of_clients(self) -> Ints:
        """Return [C] how many classes each client has examples of."""
        return np.bincount(self.client, minlength=self.clients)

    def table(self, clients: int | None = None) -> NDArray[np.int32] | None:
        """Return [C, Y] counts, of the first clients where a number is given.

        None where the table would be too large.
        """
        shown = self.clients if clients is None else min(clients, self.clients)
        if shown * self.classes > _MAX_DENSE:
            return None
        table = np.zeros((shown, self.classes), dtype=np.int32)
        used = self.client < shown
        table[self.client[used], self.label[used]] = self.count[used]
        return table

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return it as named arrays."""
        return {
            "shape": np.array([self.clients, self.classes], dtype=np.int64),
            "client": self.client.astype(np.int32),
            "label": self.label.astype(np.int32),
            "count": self.count.astype(np.int32),
        }

    @classmethod
    def of_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Self:
        """Return the histogram of which `arrays` are.

        Raises:
            ValueError: they are of none.
        """
        try:
            clients, classes = (int(side) for side in arrays["shape"])
            client, label, count = (
                arrays[k].astype(np.int64) for k in ("client", "label", "count")
            )
        except KeyError as error:
            raise ValueError(f"no array {error}") from None
        fits = client.shape == label.shape == count.shape
        if not fits or not _within(client, clients) or not _within(label, classes):
            raise ValueError("counts of clients or classes that are not there")
        return cls(clients, classes, client, label, count)


def is_large(clients: int, classes: int) -> bool:
    """Return whether a histogram has a file of its own."""
    return clients * classes > MAX_NUMBERS


def _within(values: Ints, size: int) -> bool:
    return values.ndim == 1 and (not len(values) or 0 <= values.min() <= values.max() < size)
