"""Tables and arrays of a user: CSV, Parquet and NumPy's ``.npz``."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.lib import format as npy_format
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from fedkeel.config import Data
from fedkeel.data.dataset import dataset
from fedkeel.data.read.formats import unreadable_file
from fedkeel.data.read.identifiers import WHOLE_NUMBER, as_names, could_be_text
from fedkeel.data.read.raw_examples import RawExamples, encode, encode_as
from fedkeel.data.user_arrays import remedy_for_labels
from fedkeel.errors import DataError, did_you_mean, first_line

TABLE_SUFFIXES = (".csv", ".parquet")
SUFFIXES = (".npz", *TABLE_SUFFIXES)

_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls its index in a Parquet file: it is no column of the table."""

_NPZ = "an .npz file, as numpy.savez(x=..., label=...) makes"

_Column = Any  # pyarrow has no types


def read_file(path: Path, settings: Data, train: RawExamples | None = None) -> RawExamples:
    """Read a user's file by its suffix; see `read_table` and `read_arrays`."""
    if path.suffix.lower() in TABLE_SUFFIXES:
        return read_table(path, settings.label, settings.client, settings.drop, train)
    return read_arrays(path, settings.label, settings.client, train)


def read_table(
    path: Path,
    label: str,
    client: str | None,
    drop: Sequence[str] = (),
    train: RawExamples | None = None,
) -> RawExamples:
    """Read a CSV or Parquet file: a column of labels, perhaps one of clients, the rest numbers.

    Args:
        path: a file that ends in ``.csv`` or ``.parquet``.
        label: name of the column of labels, texts or whole numbers.
        client: name of the column of clients, texts or whole numbers; None where there is none.
            Test data may do without it.
        drop: names of columns that are left out. Test data may do without them.
        train: the training data, where test data is read: columns and labels must be the same.

    Returns:
        [N, F] inputs: float32 where that holds every number of the columns' types, else float64.

    Raises:
        DataError: the file cannot be read; a column is missing, holds text, or has a gap; a label
            of the test data is unknown.
    """
    columns = _read_columns(path, [key for key in (label, client) if key is not None], drop)
    needed = [(label, "data.label")]
    if train is not None and client not in columns:
        client = None
    if client is not None:
        needed.append((client, "data.client"))
    if train is None:
        needed += [(name, "data.drop") for name in drop]
    for name, setting in needed:
        if name not in columns:
            raise _missing(path, "column", name, list(columns), setting)
    names = [name for name in columns if name not in (label, client, *drop)]
    if train is not None:
        names = _columns_of_train(path, names, train.columns)
    if not names:
        raise DataError(f"{path} has no columns beside {label!r}.", expected="columns of numbers")
    numbers = {name: _as_numbers(path, name, columns[name]) for name in names}
    dtype = _float_type(*(column.dtype for column in numbers.values()))
    x = np.empty((len(columns[label]), len(names)), dtype=dtype)
    for index, name in enumerate(names):
        x[:, index] = numbers.pop(name)
    labels = _column_of_names(path, label, columns[label])
    clients = None if client is None else _column_of_names(path, client, columns[client])
    return _raw(path, torch.from_numpy(x), labels, clients, train, tuple(names))


def read_arrays(
    path: Path, label: str, client: str | None, train: RawExamples | None = None
) -> RawExamples:
    """Read an ``.npz`` file with an array ``x`` of inputs and one of labels.

    Args:
        path: the file.
        label: name of the array of labels; where it is ``label`` and not there, ``y`` is taken.
        client: name of the array of clients, None where there is none. Test data may do without.
        train: the training data, where test data is read.

    Returns:
        Inputs [N, ...]. Bytes with three axes or four are images: [N, H, W], or [N, H, W, C] and
        [N, C, H, W] with C of 1 or 3; they become [N, C, H, W]. All other numbers stay as they are.

    Raises:
        DataError: the file cannot be read, holds Python objects, lacks an array, or an array has
            the wrong length or type.
    """
    try:
        with path.open("rb") as file, _open_archive(path, file) as archive:
            present = list(archive.files)
            if label == "label" and label not in present and "y" in present:
                label = "y"
            if train is not None and client not in present:
                client = None
            for name, setting in (("x", ""), (label, "data.label"), (client, "data.client")):
                if name is not None and name not in present:
                    raise _missing(path, "array", name, present, setting)
            names = [name for name in ("x", label, client) if name is not None]
            arrays = {name: _read_array(path, name, archive) for name in names}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise unreadable_file(path, first_line(error), _NPZ) from None
    x = arrays["x"]
    for name in names[1:]:
        array = arrays[name]
        if array.ndim != 1 or x.ndim < 2 or len(x) != len(array):
            raise DataError(
                f"{path}: the arrays do not match.",
                got=f"x {x.shape}, {name} {array.shape}",
                expected=f"x [N, ...] with at least two axes, {name} [N]",
                do=remedy_for_labels(array),
            )
    if x.dtype.kind not in "biuf":
        raise DataError(f"{path}: x does not hold numbers.", got=x.dtype, expected="numbers")
    labels = as_names(path, label, arrays[label])
    clients = None if client is None else as_names(path, client, arrays[client])
    if x.dtype != np.uint8:
        x = x.astype(_float_type(x.dtype), copy=False)
    return _raw(path, _as_images(torch.from_numpy(x)), labels, clients, train)


def _raw(
    path: Path,
    x: torch.Tensor,
    labels: NDArray[Any],
    clients: NDArray[Any] | None,
    train: RawExamples | None,
    columns: tuple[str, ...] = (),
) -> RawExamples:
    """Number labels and clients, and refuse what cannot be trained on with its row in the file."""
    if train is None:
        y, names = encode(labels)
    else:
        y, names = encode_as(labels, train.label_names, str(path)), train.label_names
    if x.dtype != torch.uint8:  # bytes may be images, which are made numbers later
        x = dataset(x, y, classes=len(names), name=str(path)).x
    client, client_names = (None, ()) if clients is None else encode(clients)
    return RawExamples(x, y, names, columns, client_names, client)


def _float_type(*types: np.dtype[Any]) -> np.dtype[Any]:
    """Return float32 where it holds every number of the given types, else float64."""
    fits = np.result_type(np.float32, *types) == np.float32
    return np.dtype(np.float32 if fits else np.float64)


def _open_archive(path: Path, file: BinaryIO) -> NpzFile:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, NpzFile):
        raise unreadable_file(path, "a single array", _NPZ)
    return archive


def _read_array(path: Path, name: str, archive: NpzFile) -> NDArray[Any]:
    members = cast(zipfile.ZipFile, archive.zip)  # None only where the archive is closed
    member = name if name in members.namelist() else f"{name}.npy"
    with members.open(member) as header:
        is_first = npy_format.read_magic(header) == (1, 0)
        read = npy_format.read_array_header_1_0 if is_first else npy_format.read_array_header_2_0
        _, _, dtype = read(header)
    if dtype.hasobject:
        raise DataError(
            f"{path}: the array {name!r} holds Python objects.",
            expected="an array of numbers, or of texts of one type such as '<U8'",
            why="objects are stored as a pickle, which can run any code when it is read",
            do=f"save it with numpy.savez(..., {name}=numpy.array({name}.tolist()))",
        )
    array: NDArray[Any] = archive[name]
    if array.ndim and len(array) == 0:
        raise DataError(f"{path}: the array {name!r} is empty.", expected="at least one example")
    return array


def _as_images(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2)
    return x if x.ndim == 4 else x.to(torch.float32)


def _read_columns(path: Path, keys: Sequence[str], drop: Sequence[str]) -> dict[str, _Column]:
    """Read a table's columns by name, in the order of the file.

    Args:
        path: the table.
        keys: columns of labels or clients: in a CSV file 007 and 7 are two of these.
        drop: columns that are not looked at.
    """
    import pyarrow as pa  # slow to import
    from pyarrow import csv, parquet

    is_csv = path.suffix.lower() == ".csv"
    try:
        if is_csv:
            _check_first_line(path)
        table = csv.read_csv(path) if is_csv else parquet.read_table(path)
        names = list(table.column_names)
    except (pa.ArrowException, OSError) as error:
        if is_csv and isinstance(error, pa.ArrowInvalid):
            raise DataError(
                f"{path} cannot be read.",
                got=first_line(error),
                expected="in every row as many values as the first line has names",
                do="put commas between values alone, or a text with a comma between double quotes",
            ) from None
        expected = f"a {path.suffix.lower()[1:]} file"
        raise unreadable_file(path, first_line(error), expected) from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns named {twice!r}.", expected="one name for each")
    if table.num_rows == 0:
        raise DataError(f"{path} has no examples.", got=f"columns {', '.join(names[:8])}, no rows")
    nameless = [name for name in names if re.fullmatch(r"(Unnamed: \d+)?", name)]
    if any(name not in (*keys, *drop) for name in nameless):
        index = names.index(nameless[0])
        raise DataError(
            f"{path}: column {index} (counted from 0) has no name.",
            got=f"{nameless[0]!r}, with {table.column(index)[0].as_py()!r} in the first row",
            why="an index that pandas has written would be an input",
            do=f"write it with index=False, give it a name, or set data.drop = [{nameless[0]!r}]",
        )
    columns = {
        name: table.column(name) if name in drop else _decoded(path, name, table.column(name))
        for name in names
        if name in (*keys, *drop) or not _INDEX.fullmatch(name)
    }
    numeric = [key for key in keys if key in columns and could_be_text(columns[key])]
    if is_csv and numeric:
        types = dict.fromkeys(numeric, pa.string())
        options = csv.ConvertOptions(include_columns=numeric, column_types=types)
        texts = csv.read_csv(path, convert_options=options)
        for key in numeric:
            text = _decoded(path, key, texts.column(key))
            is_integer = pa.types.is_integer(columns[key].type)
            if not is_integer or not all(
                WHOLE_NUMBER.fullmatch(value.strip()) for value in text.to_pylist()
            ):
                columns[key] = text
    return columns


def _check_first_line(path: Path) -> None:
    """Refuse a CSV file whose first line is in another encoding, or has other separators."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        names = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise _not_utf8(path, f"the first line {line.strip()[:40]!r}") from None
    separator = next((mark for mark in (";", "\t") if mark in names), None)
    if "," not in names and separator is not None:
        raise DataError(
            f"{path}: the columns are not separated by commas.",
            got=f"first line {names[:60]!r}",
            expected="a comma between two columns, and a point in decimal numbers",
            do=f'write it anew, e.g. pandas.read_csv("{path.name}", sep={separator!r}, '
            'decimal=",").to_csv("new.csv", index=False)',
        )


def _not_utf8(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what} is not text in UTF-8.",
        why="it is in another encoding, such as Latin-1 or UTF-16",
        do="save the file in the encoding UTF-8, e.g. iconv -f LATIN1 -t UTF-8 OLD.csv > NEW.csv",
    )


def _decoded(path: Path, name: str, column: _Column) -> _Column:
    """Return a column as one array, with categories in place of their codes."""
    import pyarrow as pa

    array = column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_binary(array.type):  # what pyarrow makes of text in another encoding
        raise _not_utf8(path, f"column {name!r}")
    return array


def _is_text(column: _Column) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _as_numbers(path: Path, name: str, column: _Column) -> NDArray[Any]:
    """Return a column of numbers; refuse text and gaps by column and row."""
    import pyarrow as pa

    if _is_text(column):
        row, text = _first_text(column)
        raise DataError(
            f"{path}: column {name!r} holds text.",
            got=f"{text[:40]!r} in row {row} (counted from 0)",
            expected="numbers in every column but those of labels and clients",
            do=_without_commas(text.strip())
            or "replace the text by numbers, or name the column in data.drop, data.label or "
            "data.client",
        )
    _check_gaps(path, name, column)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    types = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
    if not any(is_type(column.type) for is_type in types):
        raise DataError(
            f"{path}: column {name!r} does not hold numbers.",
            got=column.type,
            expected="numbers in every column but those of labels and clients",
            do="write it as numbers, such as days or years, or name it in data.drop",
        )
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise DataError(
            f"{path}: column {name!r} is not finite.",
            got=f"{values[bad[0]]} in row {bad[0]} (counted from 0)",
            expected="finite numbers",
            do="drop the row or fill the gap before training",
        )
    return values


def _without_commas(text: str) -> str:
    """Return how a number with commas should be written, "" for anything else."""
    point = f"decimal numbers with a point: {text.replace(',', '.')}"
    ways = [point] if re.fullmatch(r"[+-]?\d+,\d+", text) else []
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        ways.append(f"thousands without commas: {text.replace(',', '')}")
    return f"write {', or '.join(ways)}" if ways else ""


def _first_text(column: _Column) -> tuple[int, str]:
    """Return the first row whose text is no number, or else the first row."""
    texts = column.to_pylist()
    for row, text in enumerate(texts):
        try:
            float(text or 0)
        except ValueError:
            return row, text
    return 0, str(texts[0])


def _check_gaps(path: Path, name: str, column: _Column) -> None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{path}: column {name!r} has a gap.",
            got=f"no value in row {row} (counted from 0)",
            expected="a value in every row",
            do="drop the row or fill the gap before training",
        )


def _column_of_names(path: Path, name: str, column: _Column) -> NDArray[Any]:
    """Return a column of labels or clients as an array of texts or whole numbers."""
    _check_gaps(path, name, column)
    if _is_text(column):
        return as_names(path, name, np.array(column.to_pylist()))
    return as_names(path, name, column.to_numpy(zero_copy_only=False))


def _columns_of_train(path: Path, names: Sequence[str], train: tuple[str, ...]) -> list[str]:
    """Return the training data's columns, or refuse test data that has others."""
    for name in train:
        if name not in names:
            raise _missing(path, "column", name, names)
    more = [name for name in names if name not in train]
    if more:
        raise DataError(
            f"{path} has a column {more[0]!r} that the training data does not have.",
            do="give both files the same columns",
        )
    return list(train)


def _missing(
    path: Path, what: str, name: str, present: Sequence[str], setting: str = ""
) -> DataError:
    hint = f"; set {setting} to the one that is meant" if setting else ""
    return DataError(f"{path} has no {what} {name!r}.", do=f"{did_you_mean(name, present)}{hint}")
