"""Tables of a user: CSV and Parquet."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeel.config import Data
from fedkeel.data.read.formats import unreadable_file
from fedkeel.data.read.identifiers import encode_column, not_utf8
from fedkeel.data.read.limits import check_size
from fedkeel.data.read.raw_examples import RawExamples, float_type, missing, of_file
from fedkeel.data.read.table_columns import as_categories, as_numbers, check_type, is_text
from fedkeel.errors import DataError, first_line

TABLE_SUFFIXES = (".csv", ".parquet")

PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls its index in a Parquet file: it is not a column of the table."""

_BLOCK = 1 << 20
"""Bytes of a CSV file that are read at a time; of a wide table as many as many rows take."""

_Column = Any  # pyarrow has no types


def read_table(
    path: Path,
    settings: Data,
    train: RawExamples | None = None,
    group: str | None = None,
    may_lack_columns: bool = False,
) -> RawExamples:
    """Read a CSV or Parquet file: labels, perhaps clients, the rest numbers and categories.

    Args:
        path: a file that ends in ``.csv`` or ``.parquet``.
        settings: what its columns are; all that it does not name are inputs. Test data may do
            without the column of clients.
        train: the training data, where test data is read: columns and labels must be the same.
        group: name of the column of groups that are held out as wholes, as that of clients.
        may_lack_columns: whether columns to drop and those of categories may be missing; test data
            may always lack those to drop.

    Returns:
        [N, F] inputs: float32 where that holds every number of the columns' types, else float64.

    Raises:
        DataError: the file cannot be read; a column is missing, holds text, or has a gap; a label
            of the test data is unknown.
    """
    label = None if settings.target == "quantity" else settings.label
    keys = (label, settings.client, group, *settings.categories_of)
    as_written = [key for key in keys if key is not None]
    columns = read_columns(path, as_written, settings.drop)
    return examples_of_table(path, columns, settings, train, group, may_lack_columns)


def examples_of_table(
    where: Path | str,
    columns: Mapping[str, _Column],
    settings: Data,
    train: RawExamples | None = None,
    group: str | None = None,
    may_lack_columns: bool = False,
) -> RawExamples:
    """Return the examples of a table that has been read.

    Args:
        where: the file or the client, for messages.
        columns: pyarrow columns by name, at least one row long.
        settings: as in `read_table`.
        train: as in `read_table`.
        group: as in `read_table`.
        may_lack_columns: as in `read_table`.
    """
    label, client = settings.label, settings.client
    may_have_gaps = settings.missing != "refuse"
    if train is not None:
        client = client if client in columns else None
        group = group if group in columns else None
    needed = [(label, "data.label"), (client, "data.client"), (group, "partition.holdout_by")]
    if train is None and not may_lack_columns:
        needed += [(name, "data.drop") for name in settings.drop]
        needed += [(name, "data.categories") for name in settings.categories_of]
    for name, setting in needed:
        if name is not None and name not in columns:
            raise missing(where, "column", name, list(columns), setting)
    dropped = tuple(name for name in settings.drop if name in columns)
    left_out = {label, client, group, *settings.drop}
    names = [name for name in columns if name not in left_out]
    if train is not None:
        names = _columns_of_train(where, names, train.columns, may_have_gaps)
    if not names:
        used = [*needed[:3], *((name, "data.drop") for name in dropped)]
        told = ", ".join(f"{name!r} ({setting})" for name, setting in used if name is not None)
        raise DataError(f"{where} has no columns of inputs.", got=f"only {told}")
    numbers, categories = {}, {}
    for name in names:
        if name in settings.categories_of:
            values, categories[name] = as_categories(where, name, columns[name], may_have_gaps)
        else:
            values = as_numbers(where, name, columns[name], may_have_gaps)
        numbers[name] = values
    dtype = float_type(column.dtype for column in numbers.values())
    x = np.empty((len(columns[label]), len(names)), dtype=dtype)
    for index, name in enumerate(names):
        x[:, index] = numbers.pop(name)
    labels = (
        as_numbers(where, label, columns[label], False).astype(np.float64)
        if settings.target == "quantity"
        else encode_column(where, label, columns[label])
    )
    clients, groups = (
        None if name is None else encode_column(where, name, columns[name])
        for name in (client, group)
    )
    inputs = torch.from_numpy(x)
    raw = of_file(where, inputs, labels, clients, train, tuple(names), dropped, groups)
    return replace(raw, categories=categories)


def read_columns(path: Path, keys: Sequence[str], drop: Sequence[str]) -> dict[str, _Column]:
    """Read a table's columns by name, in the order of the file.

    Args:
        path: the table.
        keys: columns of labels or clients: of a CSV file the texts as they are written.
        drop: columns that are not looked at.
    """
    import pyarrow as pa  # slow to import

    is_csv = path.suffix.lower() == ".csv"
    try:
        table = _read_csv(path, keys) if is_csv else _read_parquet(path, keys, drop)
        names = list(table.column_names)
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        if is_csv and isinstance(error, pa.ArrowInvalid):
            raise DataError(
                f"{path} cannot be read.",
                got=first_line(error),
                expected="in every row as many values as the first line has names",
                do="put commas only between values, or a text with a comma between double quotes",
            ) from None
        expected = f"a {path.suffix.lower()[1:]} file"
        raise unreadable_file(path, first_line(error), expected) from None
    if table.num_rows == 0:
        raise DataError(f"{path} has no examples.", got=f"columns {', '.join(names[:8])}, no rows")
    nameless = [name for name in names if re.fullmatch(r"(Unnamed: \d+)?", name)]
    known = {*keys, *drop}
    if any(name not in known for name in nameless):
        index = names.index(nameless[0])
        raise DataError(
            f"{path}: column {index} (counted from 0) has no name.",
            got=f"{nameless[0]!r}, with {table.column(index)[0].as_py()!r} in the first row",
            why="an index that pandas has written would be an input",
            do=f"write it with index=False, give it a name, or set data.drop = [{nameless[0]!r}]",
        )
    return {
        name: column
        for name, column in zip(names, table.columns, strict=True)
        if name in known or not PANDAS_INDEX.fullmatch(name)
    }


def read_names(path: Path) -> list[str]:
    """Return the names of a table's columns, as far as they can be read."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if path.suffix.lower() == ".parquet":
            return list(parquet.read_schema(path).names)
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file), [])
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error):
        return []  # what is wrong with it is said by who reads it


def _read_csv(path: Path, keys: Sequence[str]) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Read a CSV file, the columns of labels and clients as bytes."""
    import pyarrow as pa
    from pyarrow import csv

    width = _check_first_line(path)
    size = path.stat().st_size
    check_size(path, "the table", size, size, "give fewer rows or columns")
    as_written = csv.ConvertOptions(column_types=dict.fromkeys(keys, pa.binary()))
    block = csv.ReadOptions(block_size=min(max(_BLOCK, 256 * width), 2**30))
    table = csv.read_csv(path, block, convert_options=as_written)
    _check_names(path, table.column_names)
    return table


def _read_parquet(path: Path, keys: Sequence[str], drop: Sequence[str]) -> Any:  # noqa: ANN401
    """Read the columns of a Parquet file that are needed; of those in `drop` only the names."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    _check_names(path, schema.names)
    kinds = dict(zip(schema.names, schema.types, strict=True))
    dropped = {name for name in kinds if name in drop or PANDAS_INDEX.fullmatch(name)} - set(keys)
    names = [name for name in kinds if name not in dropped]
    texts = [name for name, kind in kinds.items() if is_text(kind)]
    with parquet.ParquetFile(path, read_dictionary=texts) as file:
        _check_parquet_size(path, file.metadata, names)
        for name in names:
            if name not in keys:
                check_type(path, name, kinds[name])
        table = file.read(columns=names if dropped else None, use_pandas_metadata=False)
    for place, name in enumerate(kinds):
        if name in dropped:
            table = table.add_column(place, name, pa.nulls(table.num_rows))
    return table


def _check_parquet_size(path: Path, metadata: _Column, names: Sequence[str]) -> None:
    """Refuse columns that are very much larger than the file, by what it says of them.

    A value that is repeated, and pages that are compressed, take next to no room in the file.
    """
    pages = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
    size = max(pages, 8 * metadata.num_rows * len(names))
    do = "write it as CSV; or, to train without some columns, name these in data.drop"
    check_size(path, "the table", size, path.stat().st_size, do)


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Refuse two columns of one name."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise DataError(f"{path} has two columns named {name!r}.", expected="one name for each")


def _check_first_line(path: Path) -> int:
    """Refuse a CSV file whose first line is in another encoding, or has other separators.

    Returns:
        The length of the line in bytes.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        names = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise not_utf8(path, f"the first line {line.strip()[:40]!r}") from None
    separator = next((mark for mark in (";", "\t") if mark in names), None)
    if "," not in names and separator is not None:
        raise DataError(
            f"{path}: the columns are not separated by commas.",
            got=f"first line {names[:60]!r}",
            expected="a comma between two columns, and a point in decimal numbers",
            do=f"export it again with commas, or in Python: {_with_commas(path.name, separator)}",
        )
    return len(line)


def _with_commas(name: str, separator: str) -> str:
    """Return a program that writes a table anew with commas, and never over another file.

    A comma in a number stands for a point where semicolons separate the columns; between tabs it
    may as well part thousands, and is left.
    """
    new = f"{Path(name).stem}-commas.csv"
    decimal = separator == ";"
    cell = r"re.sub(r'^([-+]?\d+),(\d+)$', r'\1.\2', v)" if decimal else ""
    rows = f"([{cell} for v in row] for row in rows)" if decimal else "(rows)"
    return (
        f"import csv{', re' * decimal}; "
        f"new = open({new!r}, 'x', encoding='utf-8', newline=''); "
        f"old = open({name!r}, encoding='utf-8-sig', newline=''); "
        f"rows = csv.reader(old, delimiter={separator!r}); "
        f"csv.writer(new).writerows{rows}; new.close(); old.close()"
    )


def _columns_of_train(
    where: Path | str, names: Sequence[str], train: tuple[str, ...], may_have_gaps: bool
) -> list[str]:
    """Return those of the training data's columns that there are.

    Raises:
        DataError: the data has others; or lacks one, and values may not be missing.
    """
    present = set(names)
    for name in train:
        if name not in present and not may_have_gaps:
            raise missing(where, "column", name, names)
    more = sorted(present - set(train))
    if more:
        raise DataError(
            f"{where} has a column {more[0]!r} that the training data does not have.",
            do=f"set data.drop = [{more[0]!r}], or give both files the same columns",
        )
    return [name for name in train if name in present]
