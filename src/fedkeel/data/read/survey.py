"""A first look at tables: which columns are numbers, which categories, and which are not inputs.

It decides nothing for good: what it proposes stands in an experiment file that a user reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkeel.data.read.identifiers import encode_column, is_number
from fedkeel.data.read.load import check_path
from fedkeel.data.read.raw_examples import missing
from fedkeel.data.read.table_columns import (
    FREE_TEXT,
    are_words,
    as_categories,
    as_numbers,
    is_text,
)
from fedkeel.data.read.tables import read_columns
from fedkeel.errors import DataError

MOST_CATEGORIES = 20
"""A column of texts with more different ones is left out, and one of numbers is not a column of
labels."""

_MOST_CODES = 8
"""Different whole numbers up to which a column may hold codes, such as 3, 6 and 7."""

_INDEX_COLUMNS = ("", *(f"Unnamed: {number}" for number in range(4)))
"""What pandas calls an index that it has written into a CSV file."""

_IDENTIFIER = re.compile(r"(^|.*[_\W])(id|uuid|guid|index|key|nr|no|number)|.*[a-z]I[dD]", re.I)

_Column = Any  # pyarrow has no types


@dataclass(frozen=True)
class ColumnSurvey:
    """What a column of inputs looks like.

    Args:
        name: its name.
        kind: ``number`` or ``category``, or ``left out`` where it should not be an input.
        gaps: number of rows without a value.
        categories: names of its categories.
        reason: why it is left out.
        codes: its values, where they are so few whole numbers that they may be codes.
        hint: what could be done with what is left out.
    """

    name: str
    kind: Literal["number", "category", "left out"]
    gaps: int = 0
    categories: tuple[str, ...] = ()
    reason: str = ""
    codes: tuple[int, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class TableSurvey:
    """What tables look like. N rows in all.

    Args:
        rows: N.
        columns: the columns beside the label and the client.
        target: ``label``, or ``quantity`` where the column of labels holds numbers to predict.
        clients: names of the clients, empty where no column names them.
    """

    rows: int
    columns: tuple[ColumnSurvey, ...]
    target: Literal["label", "quantity"]
    clients: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[ColumnSurvey]:
        """Return the columns of a kind."""
        return [column for column in self.columns if column.kind == kind]


def survey_tables(
    paths: Sequence[Path], label: str, client: str | None = None, drop: Sequence[str] = ()
) -> TableSurvey:
    """Look at tables that belong together.

    Args:
        paths: files that end in ``.csv`` or ``.parquet``; one may lack columns of another.
        label: name of the column that is to be predicted.
        client: name of the column of clients, None where there is none.
        drop: names of columns that should not be inputs.

    Raises:
        DataError: a file cannot be read or lacks a column that is named; the labels have gaps, are
            all the same, or are different texts in most rows; no column can be an input.
    """
    where = " and ".join(map(str, paths)) if len(paths) <= 2 else f"{len(paths)} tables"
    columns = _joined(paths, where, [label, *([] if client is None else [client])])
    for name, setting in ((label, "--label"), (client, "--client"), *((n, "--drop") for n in drop)):
        if name is not None and name not in columns:
            raise missing(where, "column", name, list(columns), setting)
    names = [name for name in columns if name not in (label, client)]
    target = _target(where, label, columns[label])
    surveys = tuple(_survey(where, name, columns[name], name in drop) for name in names)
    if all(column.kind == "left out" for column in surveys):
        raise DataError(
            f"{where} has no column that can be an input.",
            got="; ".join(f"{column.name}: {column.reason}" for column in surveys)
            or f"only {' and '.join(columns)}",
            expected="numbers or categories in a column beside those of labels and clients",
            do="; ".join(dict.fromkeys(column.hint for column in surveys if column.hint)),
        )
    return TableSurvey(
        rows=len(columns[label]),
        columns=surveys,
        target=target,
        clients=() if client is None else encode_column(where, client, columns[client])[1],
    )


def _joined(paths: Sequence[Path], where: str, keys: Sequence[str]) -> dict[str, _Column]:
    """Return the columns of all tables, one table after the other."""
    import pyarrow as pa  # slow to import

    tables = []
    for path in paths:
        check_path(path, str(path))
        tables.append(pa.table(read_columns(path, keys, _INDEX_COLUMNS)))
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"{where}: a column is of another kind in each.",
            got=_kinds_told(paths, tables) or str(error).splitlines()[0],
            expected="one coding in all tables: the same column of texts, or of numbers",
            do="write it in one way in all tables, or name it with --drop",
        ) from None
    return dict(zip(table.column_names, table.columns, strict=True))


def _kinds_told(paths: Sequence[Path], tables: Sequence[_Column]) -> str:
    """Return which column has texts in one table and something else in another; "" for none."""
    import pyarrow as pa

    kinds: dict[str, list[tuple[Path, _Column]]] = {}
    for path, table in zip(paths, tables, strict=True):
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not pa.types.is_null(column.type):  # a column of gaps fits any other
                kinds.setdefault(name, []).append((path, column.type))
    for name, of_name in kinds.items():
        texts = [str(path) for path, kind in of_name if is_text(kind)]
        others = [f"{path} ({kind})" for path, kind in of_name if not is_text(kind)]
        if texts and others:
            return f"{name!r}: texts in {', '.join(texts)}, but not in {', '.join(others)}"
    return ""


def _survey(where: str, name: str, column: _Column, is_dropped: bool) -> ColumnSurvey:
    """Say what a column of inputs looks like."""
    if is_dropped:
        return ColumnSurvey(name, "left out", reason="as --drop says")
    if name in _INDEX_COLUMNS:
        return ColumnSurvey(name, "left out", reason="an index that pandas has written")
    if column.null_count == len(column):
        return ColumnSurvey(name, "left out", reason="no row has a value")
    if (values := _numbers(where, name, column)) is not None:
        return _survey_numbers(name, values)
    if not is_text(column.type):
        reason = f"neither numbers nor texts, but {column.type}"
        return ColumnSurvey(name, "left out", reason=reason)
    numbers, categories = as_categories(where, name, column, may_have_gaps=True)
    gaps = int(np.isnan(numbers).sum())
    if not categories:
        return ColumnSurvey(name, "left out", reason="no row has a value")
    if len(categories) > min(MOST_CATEGORIES, max(2, len(numbers) // 2)):
        reason = f"{len(categories):,} different texts"
        hint = ""
        if are_words(categories):
            hint = FREE_TEXT
        elif 2 * len(categories) <= len(numbers):  # such as a patient with several rows
            hint = "where rows of one belong together, set partition.holdout_by"
        return ColumnSurvey(name, "left out", gaps, reason=reason, hint=hint)
    return ColumnSurvey(name, "category", gaps, categories)


def _numbers(where: str, name: str, column: _Column) -> NDArray[Any] | None:
    """Return the numbers of a column, None where it has something else in it."""
    try:
        return as_numbers(where, name, column, may_have_gaps=True)
    except DataError as error:
        if "not finite" in error.what:  # infinite: the user has to know
            raise
        return None


def _survey_numbers(name: str, values: NDArray[Any]) -> ColumnSurvey:
    """Say what a column of numbers looks like; one that numbers the rows is not an input."""
    gaps = np.isnan(values)
    known = values[~gaps]
    if not len(known):
        return ColumnSurvey(name, "left out", reason="no row has a value")
    is_distinct = not gaps.any() and len(np.unique(known)) == len(known) > 2
    if is_distinct and bool((known % 1 == 0).all()) and _IDENTIFIER.fullmatch(name):
        return ColumnSurvey(name, "left out", reason="another whole number in each row")
    values = np.unique(known)
    is_few = 2 < len(values) <= _MOST_CODES or (len(values) == 2 and values.tolist() != [0, 1])
    codes = values.tolist() if is_few and bool((values % 1 == 0).all()) else []
    return ColumnSurvey(name, "number", int(gaps.sum()), codes=tuple(map(int, codes)))


def _target(where: str, label: str, column: _Column) -> Literal["label", "quantity"]:
    """Say whether a column names classes or holds quantities."""
    import pyarrow as pa

    if pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
        return "quantity"
    _, names = encode_column(where, label, column)
    if len(names) < 2:
        raise DataError(
            f"{where}: the column {label!r} is the same in all rows.",
            got=f"{names[0]!r}",
            expected="at least two classes, or numbers",
            do="name the column that is to be predicted: --label COLUMN",
        )
    if all(map(is_number, names)):
        is_whole = all(float(name).is_integer() for name in names)
        return "label" if is_whole and len(names) <= MOST_CATEGORIES else "quantity"
    if 2 * len(names) > len(column):
        raise DataError(
            f"{where}: the column {label!r} has another text in most rows.",
            got=f"{len(names):,} different texts in {len(column):,} rows",
            expected="names of classes, each of several rows, or numbers",
            do="name the column that is to be predicted: --label COLUMN",
        )
    return "label"
