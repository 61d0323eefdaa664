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

WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")
"""A whole number as Python writes it: not 007, nor 0x1A."""


def could_be_text(column: _Column) -> bool:
    """Return whether a column of whole numbers could be of texts that look like numbers.

    Examples are codes with leading zeros, and numbers too large for an int64, several of which
    become the same float. A column with gaps is none.
    """
    import pyarrow as pa

    if column.null_count or pa.types.is_integer(column.type):
        return not column.null_count
    if not pa.types.is_floating(column.type):
        return False
    values = column.to_numpy(zero_copy_only=False)
    is_whole = bool(np.isfinite(values).all() and (values % 1 == 0).all())
    return is_whole and bool((np.abs(values) >= 2**53).any())


def as_names(path: Path, column: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return labels or clients as texts or whole numbers.

    Args:
        path: the file, for messages.
        column: name of the column or array, for messages.
        values: [N] what the file has.

    Returns:
        [N] texts or whole numbers; floats that an int64 does not hold become texts.

    Raises:
        DataError: a text is empty or stands for no value, or the values are something else.
    """
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values % 1 == 0).all():
        fits = bool((np.abs(values) < 2.0**63).all())
        values = values.astype(np.int64) if fits else np.array([str(int(v)) for v in values])
    if values.dtype.kind == "U":
        gaps = [text for text in np.unique(values) if text.strip().lower() in _MISSING]
        if gaps:
            row = int(np.flatnonzero(np.isin(values, gaps))[0])
            text = str(values[row])
            raise DataError(
                f"{path}: {column!r} has a gap.",
                got=f"{repr(text) if text else 'an empty text'} in row {row} (counted from 0)",
                expected="a value in every row",
                do="drop the row or fill the gap before training"
                + (f"; where {text!r} is a name, write another one" if text.strip() else ""),
            )
    if values.dtype.kind not in "biuU":
        raise DataError(
            f"{path}: {column!r} holds neither texts nor whole numbers.",
            got=f"{values.dtype}, such as {values.reshape(-1)[0]}",
            expected="texts or whole numbers",
            why="it is to name classes or clients: a quantity is not learned (regression)",
        )
    return values
