"""Examples as a file has them, before they are resized, normalised and joined."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError, counted, did_you_mean


@dataclass(frozen=True)
class RawExamples:
    """Examples of one file, or of one half of a known set. N examples, Y classes.

    Args:
        x: [N, ...] inputs; four axes are images [N, C, H, W], and uint8 images have values 0..255.
        y: [N] labels 0..Y-1.
        label_names: Y names, in the order of the labels.
        columns: names of the columns of a table, empty for anything else.
        clients: names of the clients that the data gives, empty where it gives none.
        client: [N] index into `clients`, or None.
    """

    x: Tensor
    y: Ints
    label_names: tuple[str, ...]
    columns: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    client: Ints | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, without the leading N."""
        return tuple(self.x.shape[1:])

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images [N, C, H, W]."""
        return self.x.ndim == 4

    def with_columns(self, columns: tuple[str, ...]) -> RawExamples:
        """Return the examples with a table's columns in this order."""
        if columns == self.columns:
            return self
        order = [self.columns.index(name) for name in columns]
        return replace(self, x=self.x[:, order], columns=columns)

    def take(self, rows: Ints) -> RawExamples:
        """Return the examples of the given rows."""
        return replace(
            self,
            x=self.x[torch.from_numpy(rows)],
            y=self.y[rows],
            client=None if self.client is None else self.client[rows],
        )


def encode(values: NDArray[Any]) -> tuple[Ints, tuple[str, ...]]:
    """Number whole numbers or texts in sorted order.

    Returns:
        [N] index of each value, and the values as names, in the order of the index.

    >>> encode(np.array([7, -1, 7]))
    (array([1, 0, 1]), ('-1', '7'))

    Raises:
        DataError: two texts look the same and are not, by spaces around them or their encoding.
    """
    unique, index = np.unique(values, return_inverse=True)
    names = tuple(str(value) for value in unique)
    by_form: dict[str, str] = {}
    for name in names:
        other = by_form.setdefault(unicodedata.normalize("NFC", name.strip()), name)
        if other == name:
            continue
        if other.strip() == name.strip():
            what = "Two names in the data differ by spaces around them alone."
            got, do = f"{other!r} and {name!r}", "take the spaces out of the file"
        else:
            what = "Two names in the data look the same and are written in other code points."
            got = f"{other!a} and {name!a}"
            do = "write them in one form, e.g. unicodedata.normalize('NFC', name)"
        raise DataError(what, got=got, why="they would be two classes, or two clients", do=do)
    return index.astype(np.int64).reshape(-1), names


def encode_as(values: NDArray[Any], names: tuple[str, ...], where: str) -> Ints:
    """Number values by names that are already known.

    Raises:
        DataError: a value is not among the names; the message says which and in what row.
    """
    index, present = encode(values)
    unknown = [name for name in present if name not in names]
    if unknown:
        row = int(np.flatnonzero(index == present.index(unknown[0]))[0])
        raise DataError(
            f"{where}: a label of the test data does not occur in the training data.",
            got=f"label {unknown[0]!r} in row {row} (counted from 0)",
            why="a class that nobody trains on cannot be predicted",
            do=did_you_mean(unknown[0], names),
        )
    return np.array([names.index(name) for name in present], dtype=np.int64)[index]


def stratified_split(y: Ints, fraction: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw a test set that has each class in about the same share as all examples.

    Of n examples, round(fraction * n) are set aside. Each class gives floor(fraction * n_c), and
    the classes with the largest remainders one more; every class keeps at least one example to
    train on.

    Args:
        y: [N] labels.
        fraction: share of the examples that are set aside, in (0, 1).
        rng: where the draw comes from.

    Returns:
        Row numbers of the training set and of the test set, ascending.

    Raises:
        DataError: the test set would be empty.
    """
    classes, index, counts = np.unique(y, return_inverse=True, return_counts=True)
    ideal = fraction * counts
    quota = np.floor(ideal).astype(np.int64)  # below the count, as the fraction is below 1
    can_give_more = np.flatnonzero(quota < counts - 1)
    missing = round(fraction * len(y)) - int(quota.sum())
    remainder = ideal[can_give_more] - quota[can_give_more]
    order = can_give_more[np.argsort(-remainder, kind="stable")]
    quota[order[: max(missing, 0)]] += 1
    if quota.sum() == 0:
        raise DataError(
            "There are too few examples to set some aside for testing.",
            got=f"{counted(len(y), 'example')} in {counted(len(classes), 'class')}, "
            f"test_fraction {fraction}",
            do="give test data (data.test), more examples, or a larger data.test_fraction",
        )
    test = np.zeros(len(y), dtype=bool)
    for label, count in enumerate(quota):
        rows = np.flatnonzero(index == label)
        test[rng.permutation(rows)[:count]] = True
    return np.flatnonzero(~test), np.flatnonzero(test)
