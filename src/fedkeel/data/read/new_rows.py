"""Rows of a table that a trained model is to answer: inputs by a known schema, without a label."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkeel.base.named_files import expanded
from fedkeel.data.read.join import with_categories
from fedkeel.data.read.load import check_path
from fedkeel.data.read.raw_examples import (
    RawExamples,
    float_type,
    lacks_columns,
    without_columns,
)
from fedkeel.data.read.table_columns import as_categories, as_numbers
from fedkeel.data.read.tables import PANDAS_INDEX, TABLE_SUFFIXES, read_columns, read_names
from fedkeel.data.table_schema import TableSchema
from fedkeel.errors import DataError, counted

_Column = Any  # pyarrow has no types


@dataclass(frozen=True)
class NewRows:
    """Rows of a table. N rows, D inputs.

    Args:
        x: [N, D] inputs before they are standardised.
        others: columns that are not inputs, such as an identifier, by name: [N] texts each.
        warnings: what a user should know about the rows.
    """

    x: Tensor
    others: dict[str, list[str]]
    warnings: tuple[str, ...] = ()


def read_new_rows(value: object, name: str, schema: TableSchema) -> NewRows:
    """Read the inputs of rows; columns that are not inputs, such as labels, may be there.

    Args:
        value: path of a CSV or Parquet file; or a frame of pandas or another table of Arrow.
        name: what to call it in messages.
        schema: the columns that the model was trained with, and what became of missing values.

    Raises:
        DataError: it cannot be read, or a value is of another kind; it lacks more than half of the
            columns; it lacks a column, a value is missing, or a category is not known, and values
            may not be missing; or only the nodes of a federation know what a missing value gets.
    """
    columns = _columns(value, name, schema)
    may_have_gaps, warnings = schema.missing != "refuse", _lacking(name, schema, list(columns))
    numbers, categories = {}, {}
    for column in schema.columns:
        if column.name not in columns:
            continue
        if column.categories is None:
            numbers[column.name] = as_numbers(
                name, column.name, columns[column.name], may_have_gaps, is_for_model=True
            )
        else:
            numbers[column.name], categories[column.name] = as_categories(
                name, column.name, columns[column.name], may_have_gaps, is_for_model=True
            )
    count = len(next(iter(columns.values())))
    dtype = float_type(values.dtype for values in numbers.values())
    x = np.full((count, len(schema.columns)), np.nan, dtype=dtype)
    for place, column in enumerate(schema.columns):
        if column.name in numbers:
            x[:, place] = numbers[column.name]
    warnings += _gaps(x, name, schema, list(columns))
    names = tuple(column.name for column in schema.columns)
    raw = RawExamples(
        torch.from_numpy(x), np.zeros(count, np.int64), (), names, categories=categories
    )
    known = {c.name: c.categories for c in schema.columns if c.categories is not None}
    written = raw
    raw = with_categories(raw, known, name, may_have_gaps, warnings, is_for_model=True)
    if may_have_gaps:
        _check_fills(raw.x, written, name, schema)
    others = {
        key: [_text(value) for value in column.to_pylist()]
        for key, column in columns.items()
        if key not in names
    }
    return NewRows(schema.inputs_of(raw.x), others, tuple(warnings))


def _lacking(name: str, schema: TableSchema, present: Sequence[str]) -> list[str]:
    """Return a warning of columns that a table lacks.

    Raises:
        DataError: it lacks more than half of them, or values may not be missing.
    """
    known = [column.name for column in schema.columns]
    absent = [key for key in known if key not in present]
    others = [key for key in present if key not in known]
    if not absent:
        return []
    is_other_table = 2 * len(absent) > len(known)
    if schema.missing != "refuse" and not is_other_table:
        return [without_columns(name, absent, others)]
    lacks = f"{len(absent):,} of the {counted(len(known), 'column')} of the training"
    raise DataError(
        f"{lacks_columns(name, absent, others)}.",
        got=f"a table that lacks {lacks}; its columns: {_listed(present)}",
        expected=f"the columns {_listed(known)}",
        why="the model would answer from what it takes for missing values, and not from this table"
        if is_other_table
        else "the model was trained on data without missing values",
        do="name the columns as in the training, or "
        + ("give a table that this model is for" if is_other_table else "add what is missing"),
    )


def _gaps(x: NDArray[Any], name: str, schema: TableSchema, present: Sequence[str]) -> Iterator[str]:
    """Yield a warning of each column with gaps that are not as in training.

    Where an input says what is missing, the column had gaps in training, and only one without any
    value is told.
    """
    for place, column in enumerate(schema.columns):
        rows = np.flatnonzero(np.isnan(x[:, place]))
        is_empty = len(rows) == len(x)
        if column.name not in present or not len(rows) or (column.indicator and not is_empty):
            continue
        where = f"{len(rows):,} of {len(x):,} rows, first in row {rows[0]} (counted from 0)"
        had_none = schema.missing == "indicator" and not column.indicator
        yield (
            f"{name}: column {column.name!r} has no value in {'any row' if is_empty else where}: "
            + ("it had no gaps in training, and " if had_none else "")
            + "the mean of the training takes its place"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names."""
    return ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")


def _check_fills(x: Tensor, written: RawExamples, name: str, schema: TableSchema) -> None:
    """Refuse a gap of which only the nodes of a federation know what it gets.

    Args:
        x: [N, D] inputs, in which a category that is not known is a gap.
        written: the rows as they are in the table.
        name: what to call it.
        schema: the columns.
    """
    for place, column in enumerate(schema.columns):
        gaps = np.flatnonzero(x[:, place].isnan().numpy())
        if not len(gaps) or column.fill:
            continue
        row, number = int(gaps[0]), float(written.x[gaps[0], place])
        unknown = "" if math.isnan(number) else written.categories[column.name][int(number)]
        known = ", ".join(map(repr, (column.categories or ())[:8]))
        raise DataError(
            f"{name}: column {column.name!r} holds a category that is not known."
            if unknown
            else f"{name}: a value of {column.name!r} is missing.",
            got=f"{unknown!r} in row {row} (counted from 0)"
            if unknown
            else f"a gap in row {row} (counted from 0)",
            expected=f"one of {known}" if unknown else None,
            why="in training each node filled its gaps by numbers of its own data, which the run "
            "does not have",
            do="write the categories as in the training, or leave out these rows"
            if unknown
            else "fill it in, or leave out the rows where it is missing",
        )


def is_table(value: object) -> bool:
    """Return whether a value is a table, or the path of one."""
    if isinstance(value, (str, os.PathLike)):
        return str(value).lower().endswith(TABLE_SUFFIXES)
    return hasattr(value, "__arrow_c_stream__")


def _columns(value: object, name: str, schema: TableSchema) -> Mapping[str, _Column]:
    """Return the columns of a table; what is not a number is as it is written."""
    import pyarrow as pa  # slow to import

    if not isinstance(value, (str, os.PathLike)):
        table = pa.table(value)
        if not table.num_rows:
            raise DataError(f"{name} has no rows.")
        pairs = zip(table.column_names, table.columns, strict=True)
        return {key: column for key, column in pairs if not PANDAS_INDEX.fullmatch(key)}
    path = expanded(value)
    check_path(path, str(path))
    numbers = {column.name for column in schema.columns if column.categories is None}
    return read_columns(path, [key for key in read_names(path) if key not in numbers], ())


def _text(value: object) -> str:
    """Return a value as a text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
