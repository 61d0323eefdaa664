"""Checks that turn a user's inputs and labels into arrays, or refuse them with a remedy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedkeel.data.arrays_in_files import Pages, private_map
from fedkeel.errors import DataError

Ints = NDArray[np.int64]

_LISTS = (list, tuple, range, deque)
"""Sequences of Python that say where they end."""

_MAX_AXES = 64
"""Axes that an array of numpy has at most."""


def remedy_for_labels(y: NDArray[Any]) -> str | None:
    """Return how to turn labels of another shape into [N], None where that is not known."""
    if y.ndim != 2:
        return None
    if y.shape[1] == 1:
        return "take the second axis away: y = y.reshape(-1)"
    if y.dtype.kind in "biuf" and not (y.sum(axis=1) == 1).all():
        several = "several at once take fk.Task(model, loss='bce')"
        if y.max() > 1:
            several = "tokens take loss = 'token_cross_entropy', quantities 'mse'"
        return f"give one label for each example; {several}"
    return "of one number for each class (one-hot) take the class: y = y.argmax(axis=1)"


def as_array(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return an array in this machine's byte order, in memory of its own.

    An array that lies in a file, as `numpy.load(file, mmap_mode="r")` gives it, stays there.

    Args:
        values: numbers or texts, nested or as an array.
        what: what to call them in messages.

    Raises:
        DataError: they have several shapes or masked values, or are not in memory.
    """
    if isinstance(values, np.memmap) and values.dtype.isnative and len(values):
        mapped = private_map(values)
        if mapped is not None:
            return mapped
    check_in_memory(values, what)
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        row = int(np.nonzero(np.ma.getmaskarray(values))[0][0])
        raise DataError(
            f"{what} have gaps.",
            got=f"a masked value in row {row} (counted from 0)",
            do="drop the row or fill the gap before training",
        )
    try:
        array = np.array(values)
        return array.astype(array.dtype.newbyteorder("="), copy=False)  # torch knows no other
    except (TypeError, ValueError) as error:  # examples of several shapes, say
        raise DataError(
            f"{what} are not an array.",
            got=error,
            expected="one shape for all examples",
            do="pad or crop what differs, and give an array",
        ) from None


def check_in_memory(values: object, what: str) -> None:
    """Refuse an object that numpy would read item by item, for ever where it never ends.

    Arrays, tensors and tables of any library, and lists of such or of numbers, are taken.

    Args:
        values: what a user gives for an array.
        what: what to call it in messages.

    Raises:
        DataError: it is, or a list in it holds, such an object, such as a Dataset of torch.
    """
    level = [values]
    for _ in range(_MAX_AXES):
        kinds = set(map(type, level))
        for kind in filter(_may_be_endless, kinds):
            if not _has_buffer(next(value for value in level if type(value) is kind)):
                raise DataError(
                    f"{what} are not an array.",
                    got=f"an object of type {kind.__name__}",
                    expected="an array, a tensor, or lists of numbers",
                    why="its items would be read one by one, and it may have no end",
                    do="make arrays of them, such as x = numpy.stack([numpy.asarray(data[i][0]) "
                    "for i in range(len(data))]) and y = [int(data[i][1]) for ...]",
                )
        for kind in kinds:
            if hasattr(kind, "getbands"):
                _check_modes([value for value in level if type(value) is kind], what)
        if not any(issubclass(kind, _LISTS) for kind in kinds):
            return
        lists = {id(value): value for value in level if isinstance(value, _LISTS)}
        level = list(chain.from_iterable(lists.values()))
    raise DataError(
        f"{what} are not an array.",
        got=f"lists within lists, more than {_MAX_AXES} deep",
        do="give an array; a list may not hold itself",
    )


def _check_modes(images: Sequence[Any], what: str) -> None:
    """Refuse images of Pillow whose numbers are those of a palette, not of colours."""
    for number, image in enumerate(images):
        if image.mode in ("P", "PA"):
            raise DataError(
                f"{what}: an image has a palette.",
                got=f"image {number} of Pillow's mode {image.mode!r}",
                why="its numbers are places in a palette, not colours",
                do='convert it: image.convert("RGB"); or give a data set, len(data) and data[i], '
                "whose images are read as those of a folder",
            )


def _may_be_endless(kind: type) -> bool:
    """Return whether numpy reads an object of a type item by item, if it has no buffer."""
    if issubclass(kind, (*_LISTS, str, bytes, dict, np.generic)):
        return False
    ways = ("__array__", "__array_interface__", "__array_struct__")
    return hasattr(kind, "__getitem__") and not any(hasattr(kind, way) for way in ways)


def _has_buffer(value: Any) -> bool:  # noqa: ANN401 - whatever a user gives
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def as_tensor(x: ArrayLike, name: str) -> Tensor:
    """Return inputs [N, ...] as a tensor of the type they have.

    Raises:
        DataError: as in `as_array`; or they are not numbers.
    """
    array = as_array(x, f"{name}: inputs")
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise DataError(
            f"{name}: inputs are not numbers.",
            got=f"inputs of type {array.dtype}, such as {array.reshape(-1)[:1].tolist()}",
            expected="[N, ...] numbers, every example of one shape",
            do="turn them into numbers, e.g. x.astype(numpy.float32), or read a file",
        ) from None


def as_targets(
    ys: NDArray[Any], name: str, classes: int | None, may_lack: bool = False
) -> tuple[Tensor, int]:
    """Return targets [N, ...] as a tensor, and the number of classes.

    Whole numbers [N] are labels 0..Y-1, also where they are floating point. Whole numbers with
    further axes are masks, tokens or several labels: int64. Other numbers are quantities, as are
    all where `classes` is 0: float64 is kept, other types become float32.

    Args:
        ys: the targets.
        name: what to call the data in messages.
        classes: number of classes; 0 for quantities; None counts them.
        may_lack: whether some of the quantities [N, D] of an example may be missing, NaN.

    Raises:
        DataError: one is missing, infinite, none of these, or out of range.
    """
    if ys.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: labels are not whole numbers.",
            got=f"labels of type {ys.dtype}, such as {ys[:1].tolist()[0]!r}",
            expected="whole numbers from 0",
            do="number them, e.g. names, y = numpy.unique(y, return_inverse=True), or read a file",
        )
    finite = np.isfinite(ys)
    if may_lack and ys.ndim > 1 and not np.isinf(ys).any():
        finite = np.ones_like(finite)
    if ys.dtype.kind == "f" and not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise DataError(
            f"{name}: a target is missing or infinite.",
            got=f"{ys[row][~finite[row]].flat[0] if ys.ndim > 1 else ys[row]} in row {row} "
            "(counted from 0)",
            do=_remedy_for_gaps(ys, finite),
        )
    are_whole = ys.dtype.kind != "f" or (ys.ndim == 1 and bool((ys == np.round(ys)).all()))
    if classes == 0 or not are_whole:
        kind = np.float64 if ys.dtype == np.float64 else np.float32
        is_binary = ys.ndim > 1 and classes is None and bool(np.isin(ys, (0, 1)).all())
        return torch.from_numpy(np.ascontiguousarray(ys, dtype=kind)), 2 if is_binary else 0
    labels = ys.astype(np.int64)
    smallest = 0 if ys.ndim == 1 else IGNORED_TARGET
    known = int(labels.max()) + 1 if classes is None else classes
    if labels.min() < smallest or labels.max() >= known:
        row = int(np.argwhere((labels < smallest) | (labels >= known))[0][0])
        outside = (labels[row] < smallest) | (labels[row] >= known)
        value = labels[row] if ys.ndim == 1 else int(labels[row][outside].flat[0])
        raise DataError(
            f"{name}: a label is out of range.",
            got=f"label {value} in row {row} (counted from 0)",
            expected=f"labels 0..{known - 1}",
            do="leave out examples whose label is not known, -1 (of a test split that hides its "
            "labels take another split); for quantities say classes=0"
            if ys.ndim == 1 and value == -1
            else "number the classes from 0; for quantities say classes=0"
            if ys.ndim == 1 or value >= 0
            else f"where nothing counts or a label is not known say {IGNORED_TARGET}: "
            f"numpy.where(y == {value}, {IGNORED_TARGET}, y); for quantities say classes=0",
        )
    return torch.from_numpy(np.ascontiguousarray(labels)), known


def _remedy_for_gaps(ys: NDArray[Any], finite: NDArray[np.bool_]) -> str:
    """Return what to do about targets that are not finite."""
    if ys.ndim == 1 or np.isinf(ys).any():
        return "drop the row before training"
    if not np.isin(ys[finite], (0, 1)).all():
        return (
            "drop the row; or of several quantities leave out those that are not known: "
            "missing_targets = 'leave_out' (in [data], fedkeel.dataset or fedkeel.from_clients)"
        )
    return (
        f"of several labels say {IGNORED_TARGET} for one that is not known, which does not count: "
        f"numpy.nan_to_num(y, nan={IGNORED_TARGET}).astype(int); or drop the row"
    )


IGNORED_TARGET = -100
"""A target of a token, a place in a mask or one of several labels that does not count."""


def as_tokens(x: Tensor, name: str) -> Tensor:
    """Return inputs [N, ...] as int64.

    Raises:
        DataError: one is not a whole number >= 0.
    """
    integers = x.to(torch.int64)
    bad = torch.nonzero((integers != x) | (integers < 0))
    if len(bad) == 0:
        return integers
    raise DataError(
        f"{name}: a token is not a whole number >= 0.",
        got=f"{x[tuple(bad[0])].item()} in row {int(bad[0, 0])} (counted from 0)",
        do="number the characters or words from 0",
    )


def as_rows(rows: ArrayLike, client: int) -> Ints:
    """Return the rows [n] that a client owns as whole numbers.

    Raises:
        DataError: they are not row numbers, such as a mask, or have more than one axis.
    """
    array = np.asarray(rows)
    if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)):
        return array.astype(np.int64, copy=False)
    masked = array.dtype.kind == "b"
    raise DataError(
        f"The rows of client {client} are not row numbers.",
        got=f"{'a mask' if masked else 'an array'} of shape {list(array.shape)} and type "
        f"{array.dtype}",
        expected="whole numbers, [n]",
        do="give numpy.flatnonzero(mask)" if masked else "count the rows of the data from 0",
    )


def first_nonfinite_row(x: Tensor, rows: int = 4096) -> int | None:
    """Return the first row with a value that is not finite, looking at `rows` rows at a time."""
    pages = Pages(x.data_ptr(), x.nbytes if x.is_contiguous() else 0)
    width = x.nbytes // max(1, len(x))
    for start in range(0, len(x), rows):
        part = x[start : start + rows].reshape(min(rows, len(x) - start), -1)
        if not bool(torch.isfinite(part.sum())):
            bad = torch.nonzero(~torch.isfinite(part).all(dim=1))
            if len(bad):
                return start + int(bad[0])
        pages.release(start * width, (start + len(part)) * width)
    return None
