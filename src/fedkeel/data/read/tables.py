"""Tables and arrays of one's own: CSV, Parquet and NumPy's ``.npz``."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from fedkeel.config import Data
from fedkeel.data.dataset import dataset
from fedkeel.data.read.formats import damaged, reason
from fedkeel.data.read.identifiers import WHOLE, may_be_names, whole
from fedkeel.data.read.raw_examples import Raw, number, number_like
from fedkeel.data.user_arrays import one_axis
from fedkeel.errors import DataError, did_you_mean

TABLES = (".csv", ".parquet")
SUFFIXES = (".npz", *TABLES)

_INDEX = re.compile(r"__index_level_\d+__")
"""What pandas calls its index in a Parquet file: it is no column of the table."""

_Column = Any  # pyarrow has no types


def table(
    path: Path,
    label: str,
    client: str | None,
    drop: Sequence[str] = (),
    like: Raw | None = None,
) -> Raw:
    """Read a CSV or Parquet file: a column of labels, perhaps one of clients, the rest numbers.

    Args:
        path: a file that ends in ``.csv`` or ``.parquet``.
        label: name of the column of labels, texts or whole numbers.
        client: name of the column of clients, texts or whole numbers; None where there is none.
            Test data may do without it.
        drop: names of columns that are left out. Test data may do without them.
        like: the training data, for test data: the columns and labels must be the same.

    Returns:
        [N, F] inputs: float32 where that holds every number of the columns' types, else float64.

    Raises:
        DataError: the file cannot be read; a column is missing, holds text, or has a gap; a label
            of the test data is unknown.
    """
    columns = _columns(path, [key for key in (label, client) if key is not None], drop)
    if like is not None and client not in columns:
        client = None
    dropped = [] if like is not None else [(name, "data.drop") for name in drop]
    for wanted, key in ((label, "data.label"), (client, "data.client"), *dropped):
        if wanted is not None and wanted not in columns:
            raise _missing(path, wanted, list(columns), "column", key)
    names = [name for name in columns if name not in (label, client, *drop)]
    if like is not None:
        names = _same_columns(path, names, like.columns)
    if not names:
        raise DataError(f"{path} has no columns beside {label!r}.", expected="columns of numbers")
    parts = {name: _numbers(path, name, columns[name]) for name in names}
    kind = _float(*(part.dtype for part in parts.values()))
    x = np.empty((len(columns[label]), len(names)), dtype=kind)
    for place, name in enumerate(names):
        x[:, place] = parts.pop(name)
    keys = _keys(path, label, columns[label])
    clients = None if client is None else _keys(path, client, columns[client])
    return _raw(path, torch.from_numpy(x), keys, clients, like, tuple(names))


def arrays(path: Path, label: str, client: str | None, like: Raw | None = None) -> Raw:
    """Read an ``.npz`` file with an array ``x`` of inputs and one of labels.

    Args:
        path: the file.
        label: name of the array of labels; where it is ``label`` and not there, ``y`` is taken.
        client: name of the array of clients, None where there is none. Test data may do without.
        like: the training data, for test data.

    Returns:
        Inputs [N, ...]. Bytes with three axes or four are images: [N, H, W], or [N, H, W, C] and
        [N, C, H, W] with C of 1 or 3; they become [N, C, H, W]. All other numbers stay as they are.

    Raises:
        DataError: the file cannot be read, holds Python objects, lacks an array, or an array has
            the wrong length or type.
    """
    try:
        with path.open("rb") as file, _archive(path, file) as archive:
            found = list(archive.files)
            if label == "label" and label not in found and "y" in found:
                label = "y"
            if like is not None and client not in found:
                client = None
            for name, key in (("x", ""), (label, "data.label"), (client, "data.client")):
                if name is not None and name not in found:
                    raise _missing(path, name, found, "array", key)
            wanted = [name for name in ("x", label, client) if name is not None]
            got = {name: _array(path, name, archive) for name in wanted}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise damaged(path, reason(error), "an .npz file of arrays of numbers") from None
    x, y = got["x"], got[label]
    for name in wanted[1:]:
        if got[name].ndim != 1 or x.ndim < 2 or len(x) != len(got[name]):
            raise DataError(
                f"{path}: the arrays do not match.",
                got=f"x {x.shape}, {name} {got[name].shape}",
                expected=f"x [N, ...] with at least two axes, {name} [N]",
                do=one_axis(got[name]),
            )
    if x.dtype.kind not in "biuf":
        raise DataError(f"{path}: x does not hold numbers.", got=x.dtype, expected="numbers")
    keys = whole(path, label, y)
    clients = None if client is None else whole(path, client, got[client])
    # Bytes are kept, they may be images.
    kind = np.dtype(np.uint8) if x.dtype == np.uint8 else _float(x.dtype)
    return _raw(path, _as_images(torch.from_numpy(x.astype(kind, copy=False))), keys, clients, like)


def _raw(
    path: Path,
    x: torch.Tensor,
    keys: NDArray[Any],
    clients: NDArray[Any] | None,
    like: Raw | None,
    columns: tuple[str, ...] = (),
) -> Raw:
    """Number labels and clients, and refuse what cannot be trained on with its row in the file."""
    if like is None:
        y, names = number(keys)
    else:
        y, names = number_like(keys, like.label_names, str(path)), like.label_names
    if x.dtype != torch.uint8:
        x = dataset(x, y, classes=len(names), name=str(path)).x
    client, people = (None, ()) if clients is None else number(clients)
    return Raw(x, y, names, columns, people, client)


def _float(*kinds: np.dtype[Any]) -> np.dtype[Any]:
    """Return float32 where it holds every number of the given types, else float64."""
    enough = np.result_type(np.float32, *kinds) == np.float32
    return np.dtype(np.float32 if enough else np.float64)


def _archive(path: Path, file: BinaryIO) -> NpzFile:
    opened = np.load(file, allow_pickle=False)
    if not isinstance(opened, NpzFile):
        raise damaged(
            path, "a single array", "an .npz file, as numpy.savez(x=..., label=...) makes"
        )
    return opened


def _array(path: Path, name: str, archive: NpzFile) -> NDArray[Any]:
    try:
        found: NDArray[Any] = archive[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: the array {name!r} holds Python objects.",
            expected="an array of numbers, or of texts of one type such as '<U8'",
            why="objects are stored as a pickle, which can run any code when it is read",
            do=f"save it with numpy.savez(..., {name}=numpy.array({name}.tolist()))",
        ) from None
    if len(found.shape) and len(found) == 0:
        raise DataError(f"{path}: the array {name!r} is empty.", expected="at least one example")
    return found


def _as_images(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2)
    return x if x.ndim == 4 else x.to(torch.float32)


def _columns(path: Path, keys: Sequence[str], drop: Sequence[str]) -> dict[str, _Column]:
    """Read a table's columns by name, in the order of the file.

    Args:
        path: of the table.
        keys: columns that name something: in a CSV file 007 and 7 are two of these.
        drop: columns that are not looked at.
    """
    import pyarrow as pa  # slow to import
    from pyarrow import csv, parquet

    is_csv = path.suffix.lower() == ".csv"
    try:
        if is_csv:
            _first_line(path)
        found = csv.read_csv(path) if is_csv else parquet.read_table(path)
        names = list(found.column_names)
    except (pa.ArrowException, OSError) as error:
        if is_csv and isinstance(error, pa.ArrowInvalid):
            raise DataError(
                f"{path} cannot be read.",
                got=reason(error),
                expected="in every row as many values as the first line has names",
                do="put commas between values alone, or a text with a comma between double quotes",
            ) from None
        raise damaged(path, reason(error), f"a {path.suffix.lower()[1:]} file") from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns named {twice!r}.", expected="one name for each")
    if found.num_rows == 0:
        raise DataError(f"{path} has no examples.", got=f"columns {', '.join(names[:8])}, no rows")
    nameless = [name for name in names if re.fullmatch(r"(Unnamed: \d+)?", name)]
    if any(name not in (*keys, *drop) for name in nameless):
        at = names.index(nameless[0])
        raise DataError(
            f"{path}: column {at} (counted from 0) has no name.",
            got=f"{nameless[0]!r}, with {found.column(at)[0].as_py()!r} in the first row",
            why="an index that pandas has written would be an input",
            do=f"write it with index=False, give it a name, or set data.drop = [{nameless[0]!r}]",
        )
    names = [name for name in names if name in (*keys, *drop) or not _INDEX.fullmatch(name)]
    columns = {
        name: found.column(name) if name in drop else _plain(path, name, found.column(name))
        for name in names
    }
    numbers = [key for key in keys if key in columns and may_be_names(columns[key])]
    if is_csv and numbers:
        types = dict.fromkeys(numbers, pa.string())
        options = csv.ConvertOptions(include_columns=numbers, column_types=types)
        texts = csv.read_csv(path, convert_options=options)
        for key in numbers:
            text = _plain(path, key, texts.column(key))
            exact = pa.types.is_integer(columns[key].type)
            if not exact or not all(WHOLE.fullmatch(one.strip()) for one in text.to_pylist()):
                columns[key] = text
    return columns


def _first_line(path: Path) -> None:
    """Refuse a CSV file whose first line is in another encoding, or has other separators."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        names = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise _not_utf8(path, f"the first line {line.strip()[:40]!r}") from None
    other = next((mark for mark in (";", "\t") if mark in names), None)
    if "," not in names and other is not None:
        raise DataError(
            f"{path}: the columns are not separated by commas.",
            got=f"first line {names[:60]!r}",
            expected="a comma between two columns, and a point in decimal numbers",
            do=f'write it anew, e.g. pandas.read_csv("{path.name}", sep={other!r}, decimal=",")'
            '.to_csv("new.csv", index=False)',
        )


def _not_utf8(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what} is not text in UTF-8.",
        why="it is in another encoding, such as Latin-1 or UTF-16",
        do="save the file in the encoding UTF-8, e.g. iconv -f LATIN1 -t UTF-8 OLD.csv > NEW.csv",
    )


def _plain(path: Path, name: str, column: _Column) -> _Column:
    """Return a column as one array, with what the codes of categories stand for in their place."""
    import pyarrow as pa

    whole = column.combine_chunks()
    if pa.types.is_dictionary(whole.type):
        whole = whole.dictionary_decode()
    if pa.types.is_binary(whole.type):  # what pyarrow makes of text in another encoding
        raise _not_utf8(path, f"column {name!r}")
    return whole


def _numbers(path: Path, name: str, column: _Column) -> NDArray[Any]:
    """Return a column of numbers; refuse text and gaps by column and row."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        row, text = _first_text(column)
        raise DataError(
            f"{path}: column {name!r} holds text.",
            got=f"{text[:40]!r} in row {row} (counted from 0)",
            expected="numbers in every column but those of labels and clients",
            do=_without_commas(text.strip())
            or "replace the text by numbers, or name the column in data.drop, data.label or "
            "data.client",
        )
    _no_gaps(path, name, column)
    if pa.types.is_decimal(kind):
        column, kind = column.cast(pa.float64()), pa.float64()
    numeric = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not numeric:
        raise DataError(
            f"{path}: column {name!r} does not hold numbers.",
            got=kind,
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
    """Return how a number with commas is meant to be written, "" for anything else."""
    point = f"decimal numbers with a point: {text.replace(',', '.')}"
    ways = [point] if re.fullmatch(r"[+-]?\d+,\d+", text) else []
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text):
        ways.append(f"thousands without commas: {text.replace(',', '')}")
    return f"write {', or '.join(ways)}" if ways else ""


def _first_text(column: _Column) -> tuple[int, str]:
    """Return the first row whose text is not a number, or the first that there is."""
    texts = column.to_pylist()
    for row, text in enumerate(texts):
        try:
            float(text or 0)
        except ValueError:
            return row, text
    return 0, str(texts[0])


def _no_gaps(path: Path, name: str, column: _Column) -> None:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{path}: column {name!r} has a gap.",
            got=f"no value in row {row} (counted from 0)",
            expected="a value in every row",
            do="drop the row or fill the gap before training",
        )


def _keys(path: Path, name: str, column: _Column) -> NDArray[Any]:
    """Return a column of labels or clients as an array of texts or whole numbers."""
    import pyarrow as pa

    _no_gaps(path, name, column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return whole(path, name, np.array(column.to_pylist()))
    return whole(path, name, column.to_numpy(zero_copy_only=False))


def _same_columns(path: Path, names: Sequence[str], like: tuple[str, ...]) -> list[str]:
    """Return the training data's columns, or refuse test data that has others."""
    for name in like:
        if name not in names:
            raise _missing(path, name, list(names), "column")
    more = [name for name in names if name not in like]
    if more:
        raise DataError(
            f"{path} has a column {more[0]!r} that the training data does not have.",
            do="give both files the same columns",
        )
    return list(like)


def _missing(path: Path, wanted: str, found: Sequence[str], what: str, key: str = "") -> DataError:
    hint = f"; set {key} to the one that is meant" if key else ""
    return DataError(f"{path} has no {what} {wanted!r}.", do=f"{did_you_mean(wanted, found)}{hint}")


def read(path: Path, settings: Data, like: Raw | None = None) -> Raw:
    """Read a file of one's own by its suffix; see `table` and `arrays`."""
    if path.suffix.lower() in TABLES:
        return table(path, settings.label, settings.client, settings.drop, like)
    return arrays(path, settings.label, settings.client, like)
