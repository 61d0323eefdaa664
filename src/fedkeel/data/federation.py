"""A training set divided among clients: the `Federation`.

A client is a list of row numbers, not an object: fifty thousand clients cost two index arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedkeel.base.rng import generator
from fedkeel.base.values import shape_text
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation_html import federation_html
from fedkeel.data.hold_out import set_aside
from fedkeel.data.user_arrays import as_rows, check_in_memory
from fedkeel.errors import DataError, counted, printable
from fedkeel.records.histogram import Histogram

_SMALL_TABLE = 1_000_000
"""Clients times classes up to which a whole table is made, however few examples there are."""


@dataclass(frozen=True)
class Federation:
    """A training set divided among clients. C clients.

    Args:
        data: the training set.
        rows: [M] row numbers of all clients, one client after the other.
        offsets: [C + 1]; client k owns ``rows[offsets[k]:offsets[k + 1]]``.
        how: what divided the data, for records: at least ``{"kind": ...}``.
        names: C names of the clients, empty where they are just numbers.
        holdout_rows: [H] row numbers that clients keep aside for evaluation, as `rows`.
        holdout_offsets: [C + 1], as `offsets`.
        test: test examples of the clients, whose names are its sources; None where there are none.
    """

    data: Dataset
    rows: Ints
    offsets: Ints
    how: Mapping[str, Any] = field(default_factory=lambda: {"kind": "given"})
    names: tuple[str, ...] = ()
    holdout_rows: Ints | None = None
    holdout_offsets: Ints | None = None
    test: Dataset | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, k: int) -> Ints:
        """Return the row numbers of client `k`, a view."""
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

    def own_rows(self, k: int) -> Ints:
        """Return the row numbers on which client `k` is scored: those held out, or all, a view."""
        if self.holdout_rows is None or self.holdout_offsets is None:
            return self.client(k)
        return self.holdout_rows[self.holdout_offsets[k] : self.holdout_offsets[k + 1]]

    @cached_property
    def sizes(self) -> Ints:
        """[C] number of training examples of each client."""
        return np.diff(self.offsets)

    def client_of_row(self) -> Ints:
        """[M] client of each entry of `rows`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def class_counts(self) -> Histogram:
        """Return the number of training examples of each client and class, without the zeros."""
        classes = self.data.classes
        if not self.data.has_labels:
            return Histogram.of_rows(np.zeros((len(self), 0), dtype=np.int64))
        if self._fits_table:  # counting in which is quicker than sorting
            return Histogram.of_rows(self.histogram())
        key = self.client_of_row() * classes + self.data.labels[self.rows]
        pairs, count = np.unique(key, return_counts=True)
        return Histogram(len(self), classes, *np.divmod(pairs, classes), count.astype(np.int64))

    def classes_of_clients(self) -> Ints:
        """[C] number of classes of which each client has training examples."""
        if self._fits_table:
            count: Ints = np.count_nonzero(self.histogram(), axis=1)
            return count
        return self.class_counts().classes_of_clients()

    @property
    def _fits_table(self) -> bool:
        """Whether a table of clients and classes takes little memory beside the rows."""
        return len(self) * self.data.classes <= max(_SMALL_TABLE, len(self.rows))

    def histogram(self) -> Ints:
        """[C, Y] number of training examples of each client and class."""
        if not self.data.has_labels:
            return np.zeros((len(self), 0), dtype=np.int64)
        size = len(self) * self.data.classes
        cells = np.repeat(np.arange(0, size, self.data.classes), self.sizes)
        cells += self.data.labels[self.rows]
        flat = np.bincount(cells, minlength=size)
        return flat.reshape(len(self), self.data.classes).astype(np.int64, copy=False)

    def __repr__(self) -> str:
        """Return five lines: clients, division, examples, what is held out, and one example."""
        names = ", ".join(self.names[:6]) + (", ..." if len(self.names) > 6 else "")
        sizes, held = self.sizes, 0 if self.holdout_rows is None else len(self.holdout_rows)
        few, most = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
        each = f"{few:,}" if few == most else f"{few:,} to {most:,}"
        data = self.data
        classes = (
            counted(data.classes, "class") if data.classes else f"targets {shape_text(data.y)}"
        )
        shape = data.shape
        by_name = shape if isinstance(shape, dict) else {"input": shape}
        inputs = ", ".join(f"{name} {list(of)}" for name, of in by_name.items())
        known = ", ".join(map(str, data.label_names[:6])) if data.label_names else ""
        lines = [
            f"Federation of {counted(len(self), 'client')}" + (f": {names}" if names else ""),
            f"  divided   {self.how.get('says') or self.how['kind']}",
            f"  train     {counted(len(self.rows), 'example')}, {each} each",
            f"  held out  {counted(held, 'example') if held else 'nothing'}",
            f"  example   {inputs}, {classes}"
            + (f": {known}" + (", ..." if len(data.label_names) > 6 else "") if known else ""),
        ]
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        is_counted = self.data.has_labels and len(self) * self.data.classes <= _SMALL_TABLE
        held_out = None if self.holdout_offsets is None else np.diff(self.holdout_offsets)
        return federation_html(
            self.sizes,
            held_out,
            self.histogram() if is_counted else None,
            self.names or range(len(self)),
            self.data.label_names or range(self.data.classes),
        )

    def in_one_place(self) -> Federation:
        """Return a federation of one client, which has the examples of all."""
        offsets = self.holdout_offsets
        return replace(
            self,
            offsets=self.offsets[[0, -1]],
            names=(),
            holdout_offsets=None if offsets is None else offsets[[0, -1]],
        )

    def only(self, k: int) -> Federation:
        """Return a federation that has only client `k`."""
        rows, offsets = self.holdout_rows, self.holdout_offsets
        if rows is not None and offsets is not None:
            rows = rows[offsets[k] : offsets[k + 1]]
            offsets = np.array([0, len(rows)])
        return replace(
            self,
            rows=self.client(k),
            offsets=np.array([0, self.sizes[k]]),
            names=self.names[k : k + 1],
            holdout_rows=rows,
            holdout_offsets=offsets,
        )

    def hold_out(self, fraction: float, seed: int, by_class: bool = False) -> Federation:
        """Return the federation with a share of each client's rows kept aside for evaluation.

        Every client keeps at least one example to train on; floor(fraction * size) are held out,
        drawn without replacement, one client after the other from the stream (seed, "holdout").
        Where the data have groups, whole groups are held out, see `hold_out.set_aside`.

        Args:
            fraction: share of the examples, in (0, 1).
            seed: where the draw comes from.
            by_class: whether each class of a client is held out in this share.

        Raises:
            DataError: there are no classes; or no client has two groups.
        """
        kept, held = [], []
        random = generator(seed, "holdout")
        is_held = None
        if by_class or self.data.group is not None:
            is_held = self._set_aside(fraction, random, by_class)
        for k in range(len(self)):
            rows = self.client(k)
            if is_held is not None:
                of_client = is_held[self.offsets[k] : self.offsets[k + 1]]
                held.append(rows[of_client])
                kept.append(rows[~of_client])
                continue
            count = min(math.floor(fraction * len(rows) + 1e-9), len(rows) - 1)
            order = random.permutation(len(rows))
            held.append(rows[np.sort(order[:count])])
            kept.append(rows[np.sort(order[count:])])
        rows, offsets = concatenate_rows(kept)
        holdout_rows, holdout_offsets = concatenate_rows(held)
        return replace(
            self,
            rows=rows,
            offsets=offsets,
            holdout_rows=holdout_rows,
            holdout_offsets=holdout_offsets,
        )

    def _set_aside(self, fraction: float, random: Generator, by_class: bool) -> NDArray[np.bool_]:
        """Return [M] which entries of `rows` are held out, by class or in whole groups."""
        data = self.data
        if by_class and not data.has_labels:
            raise DataError(
                "Examples are held out by class, and these have no classes.",
                got="partition.stratify = true",
                do="leave stratify out",
            )
        strata = data.labels if by_class else np.zeros(len(data), dtype=np.int64)
        group = None if data.group is None else data.group[self.rows]
        is_held = set_aside(strata[self.rows], self.offsets, fraction, random, group)
        if group is not None and not is_held.any():
            name = data.grouped_by
            raise DataError(
                f"No client can hold out all examples of one value of {name!r}.",
                got=f"{counted(len(np.unique(group)), 'value')} at " + counted(len(self), "client"),
                expected="a client with two values, "
                + ("both with examples of the same class" if by_class else "one to train on"),
                why="all examples of one value are trained on, or all are held out",
                do="leave holdout out, and judge the model on whole clients that never train: "
                "cohort.new_clients",
            )
        return is_held


def concatenate_rows(lists: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return (concatenated rows, offsets) of one list of rows for each client."""
    offsets = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(rows) for rows in lists], out=offsets[1:])
    return np.concatenate(lists) if lists else offsets[:0], offsets


def federation(
    data: Dataset,
    lists: Sequence[Ints],
    how: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> Federation:
    """Make a `Federation` of one list of row numbers for each client.

    Raises:
        DataError: there are no clients, a client has no examples, a row does not exist, or they are
            not whole numbers, such as masks.
    """
    if isinstance(lists, Mapping):
        raise DataError(
            "The partition is not a sequence of lists of rows.",
            got=f"a {type(lists).__name__}",
            expected="one list of row numbers for each client",
            do="give list(rows.values()) and names=list(rows), or arrays to fedkeel.from_clients",
        )
    check_in_memory(lists, "The rows of the clients")
    if len(lists) == 0:
        raise DataError("The partition has no clients.", expected="at least one client")
    rows, offsets = concatenate_rows([as_rows(rows, k) for k, rows in enumerate(lists)])
    return federation_of_rows(data, rows, offsets, how, names)


def federation_of_rows(
    data: Dataset,
    rows: Ints,
    offsets: Ints,
    how: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> Federation:
    """Make a `Federation` of the rows of all clients, one client after the other.

    Args:
        data: the training set.
        rows: [M] row numbers.
        offsets: [C + 1]; client k owns ``rows[offsets[k]:offsets[k + 1]]``.
        how: what divided the data, for records.
        names: C names of the clients, empty where they are just numbers.

    Raises:
        DataError: a client has no examples, or a row does not exist.
    """
    if len(rows) and (rows.min() < 0 or rows.max() >= len(data)):
        raise DataError(
            "A client owns a row that the data does not have.",
            got=f"row {rows.max() if rows.max() >= len(data) else rows.min()}",
            expected=f"rows 0..{len(data) - 1}",
        )
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise DataError(
            f"{len(empty)} of {len(offsets) - 1} clients have no examples.",
            got=f"client {empty[0]} is empty",
            expected="at least one example for each client",
            do="use fewer clients, a larger alpha, or a minimum size (min_size)",
        )
    return Federation(data, rows, offsets, dict(how or {"kind": "given"}), tuple(names))
