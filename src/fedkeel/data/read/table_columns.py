"""Columns of a table as numbers: numbers as they are, categories by their number, gaps as NaN."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.data.read.identifiers import MISSING, encode, not_utf8, texts_of
from fedkeel.errors import DataError

_Column = Any  # pyarrow has no types

_MARKS = MISSING | {"?"}
"""Texts that stand for a missing value among inputs, in lower case."""

_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]*))(?:\.0*)?")
"""A whole number, also as programs write it in a column with gaps: 3.0."""

FILL = 'set missing = "mean" or "indicator" in [data] to fill gaps'
"""What to do about missing values."""

FREE_TEXT = (
    "of a table with free text make a data set of Hugging Face, by one line, and set [data.text] "
    "(docs/guides/hugging-face.md, A table with text)"
)
"""What to do about a column of free text."""

_CORRECT = "write a number, or leave out the row"
"""What to do about a value that a trained model cannot take."""


def as_categories(
    where: Path | str, name: str, column: _Column, may_have_gaps: bool, is_for_model: bool = False
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return [N] the number of each example's category, NaN for a gap; and the categories in order.

    A whole number is one category however it is written: 3 and 3.0. Other texts are kept as they
    are, without spaces around them.

    Args:
        where: the file or the client, for messages.
        name: name of the column.
        column: texts, whole numbers or truth values.
        may_have_gaps: whether a value may be missing.
        is_for_model: whether a trained model is to answer the rows, whose settings stay as they
            are.

    Raises:
        DataError: a value is neither text nor a whole number, or is missing and may not be.
    """
    import pyarrow as pa

    if pa.types.is_null(column.type):  # no value at all
        column = column.cast(pa.string())
    codes = column.dictionary_encode().combine_chunks()
    if pa.types.is_floating(codes.dictionary.type):  # a gap of pandas
        column = pa.array(column.to_numpy(), from_pandas=True)
        codes = column.dictionary_encode()
    texts = [text.strip() for text in texts_of(where, name, codes.dictionary)]
    is_known = np.array([text.lower() not in _MARKS for text in texts], dtype=bool)
    known = [text for text in texts if text.lower() not in _MARKS]
    whole_numbers = [match[1] for text in known if (match := _WHOLE.fullmatch(text))]
    known = whole_numbers if len(whole_numbers) == len(known) else known
    number_of = np.full(len(texts) + 1, np.nan, dtype=np.float32)  # the last one is a gap
    names: tuple[str, ...] = ()
    if known:
        number_of[:-1][is_known], names = encode(np.array(known))
    index = codes.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    values: NDArray[Any] = number_of[index.astype(np.int64)]
    gaps = np.isnan(values)
    if gaps.any() and not may_have_gaps:
        raise _gap(where, name, gaps, column, is_for_model)
    return values, names


def as_numbers(
    where: Path | str, name: str, column: _Column, may_have_gaps: bool, is_for_model: bool = False
) -> NDArray[Any]:
    """Return [N] numbers, NaN for a gap.

    Args:
        where: the file or the client, for messages.
        name: name of the column.
        column: numbers or truth values; texts only where a mark such as ``?`` made them so.
        may_have_gaps: whether a value may be missing.
        is_for_model: whether a trained model is to answer the rows, whose settings stay as they
            are.

    Raises:
        DataError: a value is a text, is infinite, or is missing and may not be.
    """
    import pyarrow as pa

    types = pa.types
    as_written = column
    if is_text(column.type):
        column = _numbers_with_gap_marks(where, name, column, is_for_model)
    if not types.is_null(column.type):
        check_type(where, name, column.type)
    column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    gaps = column.is_null().to_numpy(zero_copy_only=False)
    if gaps.any() and not may_have_gaps:
        raise _gap(where, name, gaps, as_written, is_for_model)
    if types.is_boolean(column.type) and gaps.any():
        column = column.cast(pa.int8())
    if types.is_decimal(column.type) or types.is_null(column.type):
        column = column.cast(pa.float64())
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    bad = np.isinf(values) if may_have_gaps else ~np.isfinite(values)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{where}: column {name!r} is not finite.",
            got=f"{values[row]} in row {row} (counted from 0)",
            expected="finite numbers",
            do=_CORRECT
            if is_for_model
            else "drop the row or fill the gap before training"
            + ("" if np.isinf(values[row]) else f"; or {FILL}"),
        )
    return values


def _gap(
    where: Path | str, name: str, gaps: NDArray[Any], column: _Column, is_for_model: bool
) -> DataError:
    """Return the error of missing values in a column of inputs."""
    row, count = int(np.flatnonzero(gaps)[0]), int(gaps.sum())
    value = column[row].as_py()
    text = value.decode() if isinstance(value, bytes) else value
    written = "no value" if text is None or text != text else repr(text)
    more = f"; {count:,} of {len(gaps):,} values are missing" if count > 1 else ""
    return DataError(
        f"{where}: column {name!r} has a gap.",
        got=f"{written} in row {row} (counted from 0){more}",
        expected="a value in every row",
        why="the model was trained on data without missing values" if is_for_model else None,
        do="fill in the value, or leave out the row"
        if is_for_model
        else f'{FILL}; or leave the column out: drop = ["{name}"]',
    )


def _numbers_with_gap_marks(
    where: Path | str, name: str, column: _Column, is_for_model: bool
) -> _Column:
    """Return as numbers a column of texts, where only the marks of gaps are not numbers."""
    import pyarrow as pa
    from pyarrow import compute

    codes = column.dictionary_encode().combine_chunks()
    try:
        texts = compute.utf8_trim_whitespace(codes.dictionary.cast(pa.large_string()))
        marks = pa.array(sorted(_MARKS), pa.large_string())
        is_mark = compute.is_in(compute.utf8_lower(texts), value_set=marks)
        numbers = compute.if_else(is_mark, pa.scalar(None, texts.type), texts).cast(pa.float64())
    except pa.ArrowInvalid:
        raise _holds_text(where, name, column, is_for_model) from None
    if not compute.any(is_mark).as_py():
        raise _holds_text(where, name, column, is_for_model)
    return pa.chunked_array([numbers.take(codes.indices)])


def _holds_text(where: Path | str, name: str, column: _Column, is_for_model: bool) -> DataError:
    """Return the error of texts in a column of numbers."""
    try:
        row, text = _first_text(column)
    except UnicodeDecodeError:  # in a damaged file
        return not_utf8(where, f"column {name!r}")
    name_it = "or name the column in data.drop, data.label or data.client"
    return DataError(
        f"{where}: column {name!r} holds text.",
        got=f"{text[:40]!r} in row {row} (counted from 0)",
        expected="numbers, as in the training"
        if is_for_model
        else "numbers in every column but those of labels, clients and categories",
        do=_without_percent(text.strip())
        or (not is_for_model and are_words([text]) and f"{FREE_TEXT}; {name_it}")
        or _without_commas(text.strip())
        or (is_for_model and _CORRECT)
        or f'set categories = ["{name}"] in [data], {name_it}',
    )


def are_words(texts: Sequence[str]) -> bool:
    """Return whether texts are free text rather than names: three words or more on average."""
    return sum(len(text.split()) for text in texts) >= 3 * len(texts)


@cache
def is_text(kind: _Column) -> bool:
    """Return whether a column's type is text, or categories of texts."""
    import pyarrow as pa

    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(
        is_type(kind) for is_type in (types.is_string, types.is_large_string, types.is_string_view)
    )


@cache
def _is_number(kind: _Column) -> bool:
    """Return whether a column's type is numbers or truth values, or categories of such."""
    import pyarrow as pa

    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return any(
        is_type(kind)
        for is_type in (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)
    )


def check_type(where: Path | str, name: str, kind: _Column) -> None:
    """Refuse an input column by its type; texts are refused later, with a row."""
    import pyarrow as pa

    if _is_number(kind) or is_text(kind):
        return
    if pa.types.is_binary(kind):  # what pyarrow makes of text in another encoding
        raise not_utf8(where, f"column {name!r}")
    raise DataError(
        f"{where}: column {name!r} does not hold numbers.",
        got=kind,
        expected="numbers in every column but those of labels and clients",
        do="write it as numbers, such as days or years; or, to train without it, name it in "
        "data.drop",
    )


def _without_percent(text: str) -> str | None:
    """Return what to do about a number with a percent sign, None of anything else."""
    number = re.fullmatch(r"([-+]?\d+(?:[.,]\d+)?)\s*%", text)
    if number is None:
        return None
    return f"write it without the percent sign: {number[1].replace(',', '.')}"


def _without_commas(text: str) -> str:
    """Return how a number with commas should be written, "" for anything else."""
    point = f"decimal numbers with a point: {text.replace(',', '.')}"
    ways = [point] if re.fullmatch(r"[+-]?\d+,\d+", text) else []
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        ways.append(f"thousands without commas: {text.replace(',', '')}")
    return f"write {', or '.join(ways)}" if ways else ""


def _first_text(column: _Column) -> tuple[int, str]:
    """Return the first row whose text is not a number, or else the first row."""
    for row, value in enumerate(column):
        text = value.as_py() or ""
        try:
            float(text or 0)
        except ValueError:
            if text.strip().lower() not in _MARKS:
                return row, text
    return 0, str(column[0].as_py())
