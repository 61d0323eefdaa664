"""Columns that name something: labels and clients, as texts or whole numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.errors import DataError

_Column = Any  # pyarrow has no types

_MISSING = frozenset({"", "na", "n/a", "nan", "null", "<na>", "#n/a"})
"""Texts that programs write where there is no value."""

WHOLE = re.compile(r"0|-?[1-9][0-9]*")
"""A whole number that is written as Python writes it: not 007, nor 0x1A."""


def may_be_names(column: _Column) -> bool:
    """Return whether a column without gaps is of whole numbers that may be texts.

    Of such are codes with zeros before them, and numbers too large for an int64: that these are
    read as floats makes one of several.
    """
    import pyarrow as pa

    if column.null_count or pa.types.is_integer(column.type):
        return not column.null_count
    if not pa.types.is_floating(column.type):
        return False
    values = column.to_numpy(zero_copy_only=False)
    whole = bool(np.isfinite(values).all() and (values % 1 == 0).all())
    return whole and bool((np.abs(values) >= 2**53).any())


def whole(path: Path, name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return labels or clients as texts or whole numbers.

    Args:
        path: of the file, for messages.
        name: of the column or array, for messages.
        values: [N] what the file has.

    Returns:
        [N] texts or whole numbers; floats that an int64 does not hold become texts.

    Raises:
        DataError: a text is empty or stands for no value, or the values are something else.
    """
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values % 1 == 0).all():
        fits = bool((np.abs(values) < 2.0**63).all())
        values = values.astype(np.int64) if fits else np.array([str(int(one)) for one in values])
    if values.dtype.kind == "U":
        gaps = [text for text in np.unique(values) if text.strip().lower() in _MISSING]
        if gaps:
            row = int(np.flatnonzero(np.isin(values, gaps))[0])
            text = str(values[row])
            raise DataError(
                f"{path}: {name!r} has a gap.",
                got=f"{repr(text) if text else 'an empty text'} in row {row} (counted from 0)",
                expected="a value in every row",
                do="drop the row or fill the gap before training"
                + (f"; where {text!r} is a name, write another one" if text.strip() else ""),
            )
    if values.dtype.kind not in "biuU":
        raise DataError(
            f"{path}: {name!r} holds neither texts nor whole numbers.",
            got=f"{values.dtype}, such as {values.reshape(-1)[0]}",
            expected="texts or whole numbers",
            why="it is to name classes or clients: a quantity is not learned (regression)",
        )
    return values
