"""The two values that data is in: a `Dataset`, and a `Federation` of clients over one.

A client is a list of row numbers, not an object: fifty thousand clients cost two index arrays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedkeel.data.user_arrays import Ints as Ints
from fedkeel.data.user_arrays import (
    as_array,
    as_rows,
    as_targets,
    as_tensor,
    as_tokens,
    check_in_memory,
    first_nonfinite_row,
)
from fedkeel.errors import DataError
from fedkeel.records.histogram import Histogram
from fedkeel.rng import generator

_QUICK = 1_000_000
"""Clients times classes up to which counting in a whole table is quicker than sorting."""


@dataclass(frozen=True)
class Dataset:
    """Examples with targets. N examples, Y classes.

    Args:
        x: [N, ...] inputs, floating point, finite; or int64 tokens >= 0.
        y: [N, ...] targets: labels [N] 0..Y-1, int64; quantities [N] or [N, D], floating point;
            masks [N, H, W], tokens [N, T] or several labels [N, L], int64; or anything else that
            the loss of the task takes, such as time and event [N, 2].
        classes: Y, the number of classes; may exceed the largest label. 0 where the targets are
            quantities.
        sources: names of the sources that were joined, at least one.
        source: [N] index into `sources`, or None where there is one source.
        clients: names of the clients that the data itself gives, empty where it gives none.
        client: [N] index into `clients`, or None.
        label_names: Y names for the labels, empty where they are just numbers.
        columns: names of a table's columns, in the order of the inputs; empty of anything else.
        scale: mean and deviation that were taken off the inputs and that they were divided by: one
            for each channel, column or pixel, with a deviation of 1e30 for what never varied and
            became 0. None where nothing was, or not the same everywhere.
        counts: [N] number of examples that each row stands for, where only their numbers are known:
            the server of a federation has none of its nodes' examples. None for one each.
        warnings: what a user should know about the data, as that some were left out.
    """

    x: Tensor
    y: Tensor
    classes: int
    sources: tuple[str, ...] = ("data",)
    source: Ints | None = None
    clients: tuple[str, ...] = ()
    client: Ints | None = None
    label_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    scale: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    counts: Ints | None = None
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return int(self.y.shape[0])

    @property
    def has_labels(self) -> bool:
        """Whether each example has one label, by which examples can be counted and divided."""
        return self.classes > 0 and self.y.ndim == 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input, without the leading N."""
        return tuple(self.x.shape[1:])

    @property
    def example_count(self) -> int:
        """Number of examples, also of those that a row stands for."""
        return len(self) if self.counts is None else int(self.counts.sum())

    @property
    def source_ids(self) -> Ints:
        """[N] index into `sources`, zeros where there is one source."""
        return np.zeros(len(self), dtype=np.int64) if self.source is None else self.source

    def take(self, rows: Ints) -> Dataset:
        """Return the dataset of the given rows."""
        index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
        return replace(
            self,
            x=self.x[index],
            y=self.y[index],
            source=None if self.source is None else self.source[rows],
            client=None if self.client is None else self.client[rows],
            counts=None if self.counts is None else self.counts[rows],
        )

    def with_label_names(self, names: tuple[str, ...], what: str) -> Dataset:
        """Return the dataset with labels numbered as in `names`; they keep their names.

        Labels that have no names stay as they are.

        Args:
            names: Y names of labels, in their order.
            what: what to call the data in messages.

        Raises:
            DataError: a label has a name that is none of these.
        """
        if not self.label_names or self.label_names == names:
            return self
        if len(self.label_names) < self.classes:
            raise DataError(
                f"{what} has fewer names of labels than labels.",
                got=len(self.label_names),
                expected=f"{self.classes} label_names",
            )
        used = torch.unique(self.y).tolist()
        place = torch.zeros(len(self.label_names), dtype=torch.int64)
        for label, name in enumerate(self.label_names):
            if name in names:
                place[label] = names.index(name)
            elif label in used:
                raise DataError(
                    f"{what} holds a label that is not known.",
                    got=repr(name),
                    expected=f"one of {', '.join(map(repr, names[:8]))}",
                )
        return replace(self, y=place[self.y], classes=len(names), label_names=names)

    def to(self, dtype: torch.dtype) -> Dataset:
        """Return the dataset with inputs and quantities of the given floating type.

        Whole numbers, such as tokens and labels, stay.

        Raises:
            DataError: an input is too large for the type.
        """
        do = "divide it by a large number, leave it out, or set engine.dtype = 'float64'"
        dataset = self
        if self.x.is_floating_point() and self.x.dtype != dtype:
            dataset = replace(dataset, x=cast_inputs(self.x, dtype, self.columns, do))
        if self.y.is_floating_point() and self.y.dtype != dtype:
            dataset = replace(dataset, y=cast_inputs(self.y, dtype, (), do))
        return dataset

    def on(self, device: torch.device) -> Dataset:
        """Return the dataset with inputs and labels on a device; itself where they are there."""
        if self.x.device == device:
            return self
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def fingerprint(self) -> str:
        """Return a digest of all that is here, 16 hexadecimal digits."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((tuple(self.x.shape), str(self.x.dtype), self.classes)).encode())
        digest.update(repr(self.sources).encode())
        if not self.has_labels:
            digest.update(repr((tuple(self.y.shape), str(self.y.dtype))).encode())
        named = (self.label_names, self.clients, self.columns, self.scale)  # nothing is trained on
        if any(named):
            digest.update(repr(named).encode())
        for array in (self.x.numpy(), self.y.numpy(), self.source, self.client, self.counts):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def cast_inputs(x: Tensor, dtype: torch.dtype, columns: Sequence[str], do: str) -> Tensor:
    """Return inputs of another floating type.

    Args:
        x: [N, ...] finite inputs.
        dtype: the type.
        columns: names of a table's columns, for the message.
        do: what to do about a number that is too large.

    Raises:
        DataError: a number is too large for the type.
    """
    out = x.to(dtype)
    if x.dtype == out.dtype or not bool(out.isinf().any()):
        return out
    at = tuple(torch.nonzero(out.isinf())[0].tolist())
    where = f"column {columns[at[1]]!r}" if columns else f"row {at[0]} (counted from 0)"
    name = str(dtype).removeprefix("torch.")
    raise DataError(
        f"An input is too large for {name}, in which models are trained.",
        got=f"{x[at].item():g} in {where}",
        expected=f"numbers of at most {torch.finfo(dtype).max:.3g}",
        do=do,
    )


def dataset(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    *,
    classes: int | None = None,
    name: str = "data",
    tokens: bool = False,
    **more: Any,  # noqa: ANN401 - the remaining fields of Dataset
) -> Dataset:
    """Make a `Dataset` of a user's arrays, and refuse what cannot be trained on.

    Args:
        x: [N, ...] numbers. float64 is kept, other types become float32; tokens become int64.
        y: [N] labels, whole numbers from 0; or [N, ...] quantities, masks, tokens, several labels.
            Numbers [N] that are all whole are taken as labels.
        classes: Y; the largest label + 1 where it is not given; 0 says that `y` are quantities.
        name: what to call the data in messages.
        tokens: whether inputs are whole numbers >= 0 that the model looks up, such as characters.
        **more: further fields of `Dataset`.

    Raises:
        DataError: inputs are not real numbers, lengths differ, there are no examples, an input or
            a target is not finite, a token is not a whole number >= 0, a label lies outside 0..Y-1.

    >>> len(dataset([[0.0], [1.0]], [0, 1]))
    2
    >>> dataset([[3, 1], [4, 1]], [0, 1], tokens=True).x.dtype
    torch.int64
    """
    xs = x.detach().cpu().to_dense() if isinstance(x, Tensor) else as_tensor(x, name)
    if xs.is_complex():
        raise DataError(
            f"{name}: inputs are complex numbers.",
            got=f"inputs of type {str(xs.dtype).removeprefix('torch.')}",
            expected="[N, ...] real numbers",
            do="give both parts, e.g. numpy.stack([x.real, x.imag], axis=1)",
        )
    if xs.dtype != torch.float64 and not tokens:
        xs = xs.to(torch.float32)
    ys = as_array(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, f"{name}: labels")
    if xs.ndim < 1 or ys.ndim < 1 or len(xs) != len(ys):
        raise DataError(
            f"{name}: inputs and targets do not match.",
            got=f"x {tuple(xs.shape)}, y {tuple(ys.shape)}",
            expected="x [N, ...] and y [N] or [N, ...], one target for each input",
        )
    if len(ys) == 0:
        raise DataError(f"{name}: there are no examples.", do="check the file or the split")
    targets, known = as_targets(ys, name, classes)
    bad = first_nonfinite_row(xs)
    if bad is not None:
        raise DataError(
            f"{name}: an input is NaN or infinite.",
            got=f"row {bad} (counted from 0)",
            expected="finite numbers",
            do="drop the row or fill the gap before training",
        )
    xs = as_tokens(xs, name) if tokens else xs
    return Dataset(x=xs.contiguous(), y=targets, classes=known, **{"sources": (name,), **more})


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
    """

    data: Dataset
    rows: Ints
    offsets: Ints
    how: Mapping[str, Any] = field(default_factory=lambda: {"kind": "given"})
    names: tuple[str, ...] = ()
    holdout_rows: Ints | None = None
    holdout_offsets: Ints | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, k: int) -> Ints:
        """Return the row numbers of client `k`, a view."""
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

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
        if len(self) * classes <= _QUICK:
            return Histogram.of_rows(self.histogram())
        key = self.client_of_row() * classes + self.data.y.numpy()[self.rows]
        pairs, count = np.unique(key, return_counts=True)
        return Histogram(len(self), classes, *np.divmod(pairs, classes), count.astype(np.int64))

    def histogram(self) -> Ints:
        """[C, Y] number of training examples of each client and class."""
        if not self.data.has_labels:
            return np.zeros((len(self), 0), dtype=np.int64)
        y = self.data.y.numpy()[self.rows]
        flat = np.bincount(
            self.client_of_row() * self.data.classes + y, minlength=len(self) * self.data.classes
        )
        return flat.reshape(len(self), self.data.classes).astype(np.int64)

    def hold_out(self, fraction: float, seed: int) -> Federation:
        """Return the federation with a share of each client's rows kept aside for evaluation.

        Every client keeps at least one example to train on; floor(fraction * size) are held out,
        drawn without replacement, one client after the other from the stream (seed, "holdout").
        """
        kept, held = [], []
        random = generator(seed, "holdout")
        for k in range(len(self)):
            rows = self.client(k)
            count = min(math.floor(fraction * len(rows) + 1e-9), len(rows) - 1)
            order = random.permutation(len(rows))
            held.append(rows[np.sort(order[:count])])
            kept.append(rows[np.sort(order[count:])])
        rows, offsets = concatenate_rows(kept)
        holdout_rows, holdout_offsets = concatenate_rows(held)
        return Federation(
            self.data, rows, offsets, self.how, self.names, holdout_rows, holdout_offsets
        )


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
            no whole numbers, such as masks.
    """
    if isinstance(lists, Mapping):
        raise DataError(
            "The partition is no sequence of lists of rows.",
            got=f"a {type(lists).__name__}",
            expected="one list of row numbers for each client",
            do="give list(rows.values()) and names=list(rows), or arrays to fedkeel.from_clients",
        )
    check_in_memory(lists, "The rows of the clients")
    if len(lists) == 0:
        raise DataError("The partition has no clients.", expected="at least one client")
    rows, offsets = concatenate_rows([as_rows(rows, k) for k, rows in enumerate(lists)])
    if len(rows) and (rows.min() < 0 or rows.max() >= len(data)):
        raise DataError(
            "A client owns a row that the data does not have.",
            got=f"row {rows.max() if rows.max() >= len(data) else rows.min()}",
            expected=f"rows 0..{len(data) - 1}",
        )
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise DataError(
            f"{len(empty)} of {len(lists)} clients have no examples.",
            got=f"client {empty[0]} is empty",
            expected="at least one example for each client",
            do="use fewer clients, a larger alpha, or a minimum size (min_size)",
        )
    return Federation(data, rows, offsets, dict(how or {"kind": "given"}), tuple(names))
