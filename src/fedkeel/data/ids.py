"""Ids that a user gives for examples: the client of each one, and its group."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeel.data.user_arrays import Ints, check_in_memory
from fedkeel.errors import DataError


def as_ids(ids: ArrayLike | None, n: int, what: str = "client id") -> NDArray[Any]:
    """Return [N] ids of one type that can be sorted, none of them missing.

    Args:
        ids: names or numbers.
        n: N, the number of examples.
        what: what to call one in messages.

    Raises:
        DataError: there is not one for each example, or one is missing.
    """
    check_in_memory(ids, f"The {what}s")
    if (
        isinstance(ids, np.ndarray)
        and not isinstance(ids, np.ma.MaskedArray)
        and ids.shape == (n,)
        and ids.dtype.kind in "iu"
    ):
        return ids  # whole numbers of one type, and none of them can be missing
    objects = np.asarray(ids, dtype=object)
    if isinstance(ids, np.ma.MaskedArray):
        objects = objects.copy()
        objects[np.ma.getmaskarray(ids)] = None
    if objects.shape != (n,):
        raise DataError(
            f"There must be one {what} for each example.",
            got=f"{what}s of shape {objects.shape}",
            expected=f"({n},)",
        )
    values = [v.item() if isinstance(v, np.integer) else v for v in objects.tolist()]
    for row, value in enumerate(values):
        if value is None or value != value:  # NaN is not itself
            raise DataError(
                f"A {what} is missing.",
                got=f"{value} in row {row} (counted from 0)",
                do=f"name a {what.removesuffix(' id')} for every example",
            )
    array = np.array(values)
    if array.dtype.kind == "f" and any(a != b for a, b in zip(values, array.tolist(), strict=True)):
        return np.array(values, dtype=object)  # floats would make one of several large numbers
    return array


def distinct(ids: NDArray[Any]) -> tuple[NDArray[Any], Ints]:
    """Return the distinct ids, ascending, and [N] which of them each is.

    Whole numbers of a narrow range are counted, which is much quicker than sorting them.
    """
    if ids.dtype.kind in "iu" and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if high - low < 4 * len(ids):
            wide = ids if ids.itemsize == 8 else ids.astype(np.int64)
            place = (wide - wide.dtype.type(low)).astype(np.int64, copy=False)
            occurs = np.bincount(place) > 0
            names = np.flatnonzero(occurs).astype(wide.dtype) + wide.dtype.type(low)
            return names, (np.cumsum(occurs) - 1)[place]
    names, client = np.unique(ids, return_inverse=True)
    return names, client.astype(np.int64)
