"""Examples with targets: the `Dataset`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedkeel.base.values import (
    Values,
    count_of,
    map_values,
    only_tensor,
    rows_of,
    shape_of,
    shape_text,
    tensors_of,
)
from fedkeel.data.arrays_in_files import bytes_or_digest
from fedkeel.data.table_schema import TableSchema
from fedkeel.data.user_arrays import Ints as Ints
from fedkeel.data.user_arrays import (
    as_array,
    as_targets,
    as_tensor,
    as_tokens,
    first_nonfinite_row,
)
from fedkeel.data.value_ranges import ValueRange, measure_range, place_count
from fedkeel.errors import DataError

MissingTargets = Literal["refuse", "leave_out"]
"""What becomes of quantities [N, D] that are NaN: not known."""

ScalePair = tuple[tuple[float, ...], tuple[float, ...]]
"""Means, and deviations."""


@dataclass(frozen=True)
class Dataset:
    """Examples with targets. N examples, Y classes.

    Args:
        x: [N, ...] inputs, floating point, finite; or int64 tokens >= 0. Several by name are given
            to the module by these names.
        y: [N, ...] targets: labels [N] 0..Y-1, int64; quantities [N] or [N, D], floating point;
            masks [N, H, W], tokens [N, T] or several labels [N, L], int64; or anything else that
            the loss of the task takes, such as time and event [N, 2], or several tensors by name.
            Some of the quantities [N, D] of an example may be NaN: not known, which `dataset` takes
            where it is declared.
        classes: Y, the number of classes; may exceed the largest label. 0 where the targets are
            quantities.
        sources: names of the sources that were joined, at least one.
        source: [N] index into `sources`, or None where there is one source.
        clients: names of the clients that the data itself gives, empty where it gives none.
        client: [N] index into `clients`, or None.
        grouped_by: what a group is called, such as ``patient``; empty where there are no groups.
        group: [N] number of the group of each example, which is held out as a whole, -1 for test
            examples that name none; or None.
        label_names: Y names for the labels, empty where they are just numbers.
        columns: names of the inputs of a table, in their order; empty of anything else.
        scale: mean and deviation that were taken off the inputs and that they were divided by: one
            for each channel, column or single number (which of them, their number says), with a
            deviation of 1e30 for what never varied and became 0. None where nothing was, or not the
            same everywhere.
        client_scales: of each client by name, the same of its own inputs; empty where the clients'
            inputs were not standardised apart.
        schema: what the columns of a table became, None of anything else.
        text_column: name of the column whose text became tokens; "" of anything else.
        counts: [N] number of examples that each row stands for, where only their numbers are known:
            the server of a federation has none of its nodes' examples. None for one each.
        warnings: what a user should know about the data, as that some were left out.
    """

    x: Values
    y: Values
    classes: int
    sources: tuple[str, ...] = ("data",)
    source: Ints | None = None
    clients: tuple[str, ...] = ()
    client: Ints | None = None
    grouped_by: str = ""
    group: Ints | None = None
    label_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    scale: ScalePair | None = None
    client_scales: Mapping[str, ScalePair] = field(default_factory=dict)
    schema: TableSchema | None = None
    text_column: str = ""
    counts: Ints | None = None
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return count_of(self.y)

    @property
    def has_labels(self) -> bool:
        """Whether each example has one label, by which examples can be counted and divided."""
        return self.classes > 0 and isinstance(self.y, Tensor) and self.y.ndim == 1

    @property
    def labels(self) -> Ints:
        """[N] the labels.

        Raises:
            TypeError: the targets are something else.
        """
        if not self.has_labels:
            raise TypeError("the targets are not labels")
        labels: Ints = only_tensor(self.y, "a label").numpy()
        return labels

    @property
    def shape(self) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
        """Shape of one input, without the leading N; of each, where there are several by name."""
        return shape_of(self.x)

    @property
    def example_count(self) -> int:
        """Number of examples, also of those that a row stands for."""
        return len(self) if self.counts is None else int(self.counts.sum())

    @property
    def source_ids(self) -> Ints:
        """[N] index into `sources`, zeros where there is one source."""
        return np.zeros(len(self), dtype=np.int64) if self.source is None else self.source

    @property
    def client_ids(self) -> Ints:
        """[N] index into `clients`, zeros where the data gives no clients."""
        return np.zeros(len(self), dtype=np.int64) if self.client is None else self.client

    def part(self, rows: slice) -> Dataset:
        """Return the dataset of a range of rows, which shares memory with this one."""
        return replace(
            self,
            x=rows_of(self.x, rows),
            y=rows_of(self.y, rows),
            source=None if self.source is None else self.source[rows],
            client=None if self.client is None else self.client[rows],
            group=None if self.group is None else self.group[rows],
            counts=None if self.counts is None else self.counts[rows],
        )

    def take(self, rows: Ints) -> Dataset:
        """Return the dataset of the given rows."""
        index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
        return replace(
            self,
            x=rows_of(self.x, index),
            y=rows_of(self.y, index),
            source=None if self.source is None else self.source[rows],
            client=None if self.client is None else self.client[rows],
            group=None if self.group is None else self.group[rows],
            counts=None if self.counts is None else self.counts[rows],
        )

    def with_label_names(self, names: tuple[str, ...], what: str) -> Dataset:
        """Return the dataset with labels numbered as in `names`; they keep their names.

        Labels that have no names stay as they are.

        Args:
            names: Y names of labels, in their order.
            what: what to call the data in messages.

        Raises:
            DataError: a label's name is not among these.
        """
        if not self.label_names or self.label_names == names:
            return self
        if len(self.label_names) < self.classes:
            raise DataError(
                f"{what} has fewer names of labels than labels.",
                got=len(self.label_names),
                expected=f"{self.classes} label_names",
            )
        y = only_tensor(self.y, "a label with a name")
        used = torch.unique(y).tolist()
        place = torch.zeros(len(self.label_names), dtype=torch.int64)
        for label, name in enumerate(self.label_names):
            if name in names:
                place[label] = names.index(name)
            elif label in used:
                raise DataError(
                    f"{what} holds a label that is not known.",
                    got=repr(name),
                    expected=f"one of {', '.join(map(repr, names[:8]))}",
                    do="leave out examples with this label, or name it among those of the training "
                    "set, label_names=",
                )
        return replace(self, y=place[y], classes=len(names), label_names=names)

    def to(self, dtype: torch.dtype) -> Dataset:
        """Return the dataset with inputs and quantities of the given floating type.

        Whole numbers, such as tokens and labels, stay.

        Raises:
            DataError: an input is too large for the type.
        """
        do = "divide it by a large number, leave it out, or set engine.dtype = 'float64'"

        def cast(tensor: Tensor, columns: Sequence[str] = ()) -> Tensor:
            same = tensor.dtype == dtype or not tensor.is_floating_point()
            return tensor if same else cast_inputs(tensor, dtype, columns, do)

        x = map_values(partial(cast, columns=self.columns), self.x)
        y = map_values(cast, self.y)
        before = [id(tensor) for values in (self.x, self.y) for tensor in tensors_of(values)]
        after = [id(tensor) for values in (x, y) for tensor in tensors_of(values)]
        return self if before == after else replace(self, x=x, y=y)

    def on(self, device: torch.device) -> Dataset:
        """Return the dataset with inputs and labels on a device; itself where they are there."""
        if all(tensor.device == device for tensor in tensors_of(self.x)):
            return self
        return replace(
            self,
            x=map_values(lambda tensor: tensor.to(device), self.x),
            y=map_values(lambda tensor: tensor.to(device), self.y),
        )

    @cached_property
    def ranges(self) -> dict[str, ValueRange]:
        """The lowest and the highest value of each input by name, at each of its places.

        They are those of the inputs as they are here, standardised or not. A single input has the
        name "". Whole numbers, such as tokens, have none.
        """
        named = self.x if isinstance(self.x, dict) else {"": self.x}
        scale = self.scale or next(iter(self.client_scales.values()), None)
        channels = None if scale is None else len(scale[0])
        return {
            name: measure_range(x, place_count(x.shape[1:], channels, bool(self.columns)))
            for name, x in named.items()
            if x.is_floating_point() and x[:1].numel()
        }

    @cached_property
    def used_labels(self) -> Ints:
        """The labels that occur, ascending."""
        return np.flatnonzero(np.bincount(self.labels, minlength=self.classes))

    def fingerprint(self) -> str:
        """Return a digest of all that is here, 16 hexadecimal digits."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        forms = (
            [_form(self.x), self.classes]
            if isinstance(self.x, dict)
            else [*_form(self.x), self.classes]
        )
        digest.update(repr(tuple(forms)).encode())
        digest.update(repr(self.sources).encode())
        if not self.has_labels:
            digest.update(repr(_form(self.y)).encode())
        named = (self.label_names, self.clients, self.columns, self.scale)  # nothing is trained on
        if self.client_scales or (self.schema is not None and not self.schema.is_plain):
            digest.update(repr((dict(self.client_scales), self.schema)).encode())
        if any(named):
            digest.update(repr(named).encode())
        tensors = [t.numpy() for values in (self.x, self.y) for t in tensors_of(values)]
        for array in (*tensors, self.source, self.client, self.counts):
            if array is not None:
                digest.update(bytes_or_digest(array))
        return digest.hexdigest()


def _form(values: Values) -> tuple[Any, ...]:
    """Return shape and type of values, of each where there are several."""
    if isinstance(values, Tensor):
        return (tuple(values.shape), str(values.dtype))
    return tuple((name, *_form(tensor)) for name, tensor in values.items())


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
    x: ArrayLike | Tensor | Mapping[str, Any],
    y: ArrayLike | Tensor | Mapping[str, Any],
    *,
    classes: int | None = None,
    name: str = "data",
    tokens: bool = False,
    missing_targets: MissingTargets = "refuse",
    **more: Any,  # noqa: ANN401 - the remaining fields of Dataset
) -> Dataset:
    """Make a `Dataset` of a user's arrays, and refuse what cannot be trained on.

    Args:
        x: [N, ...] numbers. float64 is kept, other types become float32; tokens become int64. Or
            several by name, which the module receives by these names; there whole numbers become
            int64.
        y: [N] labels, whole numbers from 0; or [N, ...] quantities, masks, tokens, several labels.
            Numbers [N] that are all whole are taken as labels.
        classes: Y; the largest label + 1 where it is not given; 0 says that `y` are quantities.
        name: what to call the data in messages.
        tokens: whether inputs are whole numbers >= 0 that the model looks up, such as characters.
        missing_targets: ``leave_out`` takes quantities [N, D] of which some are NaN: not known.
        **more: further fields of `Dataset`.

    Raises:
        DataError: inputs are not real numbers, lengths differ, there are no examples, an input or
            a target is not finite, a token is not a whole number >= 0, a label lies outside 0..Y-1.

    >>> len(dataset([[0.0], [1.0]], [0, 1]))
    2
    >>> dataset([[3, 1], [4, 1]], [0, 1], tokens=True).x.dtype
    torch.int64
    """
    xs = _inputs(x, name, tokens)
    if isinstance(y, Mapping):
        known = 0 if classes is None else classes
        ys: Values = {key: _target(value, f"{name}: {key}", None)[0] for key, value in y.items()}
    else:
        ys, known = _target(y, name, classes, missing_targets == "leave_out")
    sizes = {int(tensor.shape[0]) for tensor in (*tensors_of(xs), *tensors_of(ys))}
    if len(sizes) > 1:
        raise DataError(
            f"{name}: inputs and targets do not match.",
            got=f"x {shape_text(xs)}, y {shape_text(ys)}",
            expected="x [N, ...] and y [N] or [N, ...], one target for each input",
            do="see that both come from the same rows, with the examples as the first axis",
        )
    if sizes == {0}:
        raise DataError(f"{name}: there are no examples.", do="check the file or the split")
    return Dataset(x=xs, y=ys, classes=known, **{"sources": (name,), **more})


def _inputs(x: ArrayLike | Tensor | Mapping[str, Any], name: str, tokens: bool) -> Values:
    """Return inputs as tensors; whole numbers of a mapping stay whole numbers."""
    if isinstance(x, Mapping):
        if not x:
            raise DataError(f"{name}: the inputs are an empty mapping.")
        return {str(key): _input(value, f"{name}: {key}", tokens=None) for key, value in x.items()}
    return _input(x, name, tokens)


def _input(x: ArrayLike | Tensor, name: str, tokens: bool | None) -> Tensor:
    """Return one input [N, ...]; tokens None keeps whole numbers."""
    xs = x.detach().cpu().to_dense() if isinstance(x, Tensor) else as_tensor(x, name)
    if xs.is_complex():
        raise DataError(
            f"{name}: inputs are complex numbers.",
            got=f"inputs of type {str(xs.dtype).removeprefix('torch.')}",
            expected="[N, ...] real numbers",
            do="give both parts, e.g. numpy.stack([x.real, x.imag], axis=1)",
        )
    if xs.ndim < 1:
        raise DataError(
            f"{name}: inputs and targets do not match.",
            got=f"x {tuple(xs.shape)}",
            expected="x [N, ...] and y [N] or [N, ...], one target for each input",
        )
    if tokens is None and not xs.is_floating_point():
        return xs.to(torch.int64).contiguous()
    if (bad := first_nonfinite_row(xs)) is not None:
        raise DataError(
            f"{name}: an input is NaN or infinite.",
            got=f"row {bad} (counted from 0)",
            expected="finite numbers",
            do="drop the row or fill the gap before training",
        )
    if tokens:
        return as_tokens(xs, name).contiguous()
    return (xs if xs.dtype == torch.float64 else xs.to(torch.float32)).contiguous()


def _target(
    y: ArrayLike | Tensor, name: str, classes: int | None, may_lack: bool = False
) -> tuple[Tensor, int]:
    """Return one target [N, ...], and the number of its classes."""
    ys = as_array(y.detach().cpu().numpy() if isinstance(y, Tensor) else y, f"{name}: labels")
    if ys.ndim < 1:
        raise DataError(
            f"{name}: inputs and targets do not match.",
            got=f"y {tuple(ys.shape)}",
            expected="x [N, ...] and y [N] or [N, ...], one target for each input",
        )
    if len(ys) == 0:
        raise DataError(f"{name}: there are no examples.", do="check the file or the split")
    return as_targets(ys, name, classes, may_lack)
