"""Columns that name something: labels and clients, as texts or whole numbers.

In a text file the texts are kept as they are written: 1E2, 10E1 and 100 are three names.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError, did_you_mean

_Column = Any  # pyarrow has no types

Encoded = tuple[Ints, tuple[str, ...]]
"""[N] number of the name of each example, and the names in the order of their numbers."""

MISSING = frozenset(
    [
        "",
        "na",
        "n/a",
        "nan",
        "-nan",
        "null",
        "<na>",
        "nat",
        "#na",
        "#n/a",
        "#n/a n/a",
        "1.#ind",
        "-1.#ind",
        "1.#qnan",
        "-1.#qnan",
    ]
)
"""Texts that programs write where there is no value."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")

_WRITE_AS_TEXTS = (
    "write codes as texts, e.g. with pandas table[{0!r}] = table[{0!r}].astype(str) or with numpy "
    "{0}.astype(str); divide quantities into classes"
)


def is_number(name: str) -> bool:
    """Return whether a name is a decimal number as programs write it.

    >>> [is_number(name) for name in ("007", "-2.50", "1E2", "0x1A", "2024-01-01")]
    [True, True, True, False, False]
    """
    return _NUMBER.fullmatch(name) is not None


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in the order in which they are numbered: numbers by value, others as texts.

    >>> in_order(["10", "9.0", "-1"]), in_order(["b", "a", "10"])
    (('-1', '9.0', '10'), ('10', 'a', 'b'))
    """
    texts = sorted(names)
    return tuple(sorted(texts, key=Decimal) if all(map(is_number, texts)) else texts)


def encode(values: NDArray[Any]) -> Encoded:
    """Number whole numbers or texts, see `in_order`.

    >>> encode(np.array([7, -1, 7]))
    (array([1, 0, 1]), ('-1', '7'))

    Raises:
        DataError: two texts look the same and are not, by spaces around them or their encoding.
    """
    unique, index = np.unique(values, return_inverse=True)
    return _numbered([str(value) for value in unique.tolist()], index.reshape(-1))


def encode_array(path: Path, name: str, values: NDArray[Any]) -> Encoded:
    """Number the labels or clients of an array of a file.

    Args:
        path: the file, for messages.
        name: name of the array, for messages.
        values: [N] texts, whole numbers, or dates; floats without decimals are whole numbers.

    Raises:
        DataError: as in `encode`; or a value is missing, or they are something else.
    """
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values % 1 == 0).all():
        fits = bool((np.abs(values) < 2.0**63).all())
        values = values.astype(np.int64) if fits else np.array([str(int(v)) for v in values])
    if values.dtype.kind in "MS":
        try:
            values = values.astype(str)
        except UnicodeDecodeError:
            raise _not_utf8(path, name) from None
    if values.dtype.kind not in "biuU":
        raise _no_names(path, name, values.dtype, values.reshape(-1)[0])
    unique, first, index = np.unique(values, return_index=True, return_inverse=True)
    if values.dtype.kind == "U":
        _check_gaps(path, name, dict(zip(unique.tolist(), first.tolist(), strict=True)))
    return _numbered([str(value) for value in unique.tolist()], index.reshape(-1))


def encode_column(path: Path | str, name: str, column: _Column) -> Encoded:
    """Number the labels or clients of a table's column.

    Args:
        path: the file, for messages.
        name: name of the column, for messages.
        column: texts, which are kept as they are; whole numbers, truth values, dates or times.

    Raises:
        DataError: as in `encode_array`.
    """
    import pyarrow as pa

    if column.null_count:
        raise gap(path, name, int(np.flatnonzero(column.is_null().to_numpy())[0]))
    try:
        codes = column.dictionary_encode().combine_chunks()
    except pa.ArrowNotImplementedError:
        raise _no_names(path, name, column.type, column[0].as_py()) from None
    used, first, index = np.unique(
        codes.indices.to_numpy(zero_copy_only=False), return_index=True, return_inverse=True
    )
    texts = texts_of(path, name, codes.dictionary.take(pa.array(used)))
    if all(is_number(text.strip()) for text in texts):
        texts = [text.strip() for text in texts]
    _check_gaps(path, name, dict(zip(texts, first.tolist(), strict=True)))
    return _numbered(texts, index.reshape(-1))


def texts_of(path: Path | str, name: str, values: _Column) -> list[str]:
    """Return the texts of the values of a column.

    Args:
        path: the file, for messages.
        name: name of the column, for messages.
        values: texts, whole numbers, truth values, dates or times; none missing.

    Raises:
        DataError: a value is something else.
    """
    import pyarrow as pa

    kind, types = values.type, pa.types
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind)
    if is_bytes or types.is_string(kind) or types.is_large_string(kind):
        try:  # damaged texts are found here
            return [value.decode() if is_bytes else value for value in values.to_pylist()]
        except UnicodeDecodeError:
            raise _not_utf8(path, name) from None
    if types.is_floating(kind):
        numbers = values.to_pylist()
        odd = next((value for value in numbers if value % 1 != 0), None)  # also NaN and infinity
        if odd is not None:
            raise _no_names(path, name, kind, odd)
        return [str(int(value)) for value in numbers]
    if types.is_integer(kind) or types.is_boolean(kind):
        return [str(value) for value in values.to_pylist()]
    if not (types.is_decimal(kind) or types.is_temporal(kind)):
        raise _no_names(path, name, kind, values[0].as_py())
    try:
        texts: list[str] = values.cast(pa.string()).to_pylist()
    except pa.ArrowException:
        raise _no_names(path, name, kind, values[0]) from None
    return texts


def _numbered(texts: Sequence[str], index: Ints) -> Encoded:
    """Return the names in their order, and each example's number among them.

    Args:
        texts: names, each once or several times.
        index: [N] place of each example's name in `texts`.
    """
    names = in_order(set(texts))
    by_form: dict[str, str] = {}
    for name in names:
        other = by_form.setdefault(unicodedata.normalize("NFC", name.strip()), name)
        if other == name:
            continue
        if other.strip() == name.strip():
            what = "Two names in the data differ only by spaces around them."
            got, do = f"{other!r} and {name!r}", "take the spaces out of the file"
        else:
            what = "Two names in the data look the same and are written in other code points."
            got = f"{other!a} and {name!a}"
            do = "write them in one form, e.g. unicodedata.normalize('NFC', name)"
        raise DataError(what, got=got, why="they would be two classes, or two clients", do=do)
    number_of = {name: number for number, name in enumerate(names)}
    numbers = np.array([number_of[text] for text in texts], dtype=np.int64)
    return numbers[index], names


def encode_as(encoded: Encoded, names: tuple[str, ...], where: str) -> Ints:
    """Number labels by names that are already known.

    Args:
        encoded: the labels with numbers of their own.
        names: the known names.
        where: what to call the labels' file in messages.

    Raises:
        DataError: a label is not among the names; the message says which and in what row.
    """
    index, present = encoded
    number_of = {name: number for number, name in enumerate(names)}
    unknown = [name for name in present if name not in number_of]
    if unknown:
        row = int(np.flatnonzero(index == present.index(unknown[0]))[0])
        raise DataError(
            f"{where}: a label of the test data does not occur in the training data.",
            got=f"label {unknown[0]!r} in row {row} (counted from 0)",
            why="a class that nobody trains on cannot be predicted",
            do=did_you_mean(unknown[0], names),
        )
    return np.array([number_of[name] for name in present], dtype=np.int64)[index]


def check_written_alike(
    first: str, first_names: Sequence[str], second: str, second_names: Sequence[str]
) -> None:
    """Refuse names of two files that are one number, such as 1 and 1.0.

    Where one of the files has both, they are two names.

    Raises:
        DataError: two names are one number, and only one file has each.
    """
    only_first, only_second = set(first_names), set(second_names)
    only_first, only_second = only_first - only_second, only_second - only_first
    by_value = {Decimal(name): name for name in only_first if is_number(name)}
    for name in sorted(filter(is_number, only_second)):
        other = by_value.get(Decimal(name))
        if other is not None:
            raise DataError(
                f"{first} and {second} write one number in two ways.",
                got=f"{other!r} and {name!r}",
                why="names are kept as they are written, so these would be two classes, or two "
                "clients",
                do="write labels and clients in one way in all files",
            )


def _check_gaps(path: Path | str, name: str, row_of: dict[str, int]) -> None:
    gaps = [text for text in row_of if text.strip().lower() in MISSING]
    if gaps:
        text = min(gaps, key=row_of.__getitem__)
        raise gap(path, name, row_of[text], text)


def gap(path: Path | str, name: str, row: int, text: str | None = None) -> DataError:
    """Return the error of a column without a value in a row."""
    got = "no value" if text is None else repr(text) if text else "an empty text"
    return DataError(
        f"{path}: column {name!r} has a gap.",
        got=f"{got} in row {row} (counted from 0)",
        expected="a value in every row",
        do="drop the row or fill the gap before training"
        + (f"; where {text!r} is a name, write another one" if (text or "").strip() else ""),
    )


def _not_utf8(path: Path | str, name: str) -> DataError:
    return not_utf8(path, f"column {name!r}")


def not_utf8(path: Path | str, what: str) -> DataError:
    """Return the error of a text in another encoding."""
    return DataError(
        f"{path}: {what} is not text in UTF-8.",
        why="it is in another encoding, such as Latin-1 or UTF-16",
        do="save the file in the encoding UTF-8, e.g. iconv -f LATIN1 -t UTF-8 OLD.csv > NEW.csv",
    )


def _no_names(path: Path | str, name: str, kind: object, value: object) -> DataError:
    return DataError(
        f"{path}: {name!r} holds neither texts nor whole numbers.",
        got=f"{kind}, such as {str(value)[:40]}",
        expected="texts, whole numbers, dates or times",
        why="the column has to name classes or clients, and a decimal number may be written in "
        "several ways",
        do=_WRITE_AS_TEXTS.format(name),
    )


def check_no_quantity(path: Path | str, encoded: Encoded) -> None:
    """Refuse labels that are decimal numbers, most of which occur only once.

    Raises:
        DataError: they are.
    """
    index, names = encoded
    if 2 * len(names) <= len(index) or not all(map(is_number, names)):
        return
    odd = next((text for text in names if Decimal(text).to_integral_value() != Decimal(text)), None)
    if odd is not None:
        raise DataError(
            f"{path}: the labels are quantities.",
            got=f"{len(names):,} different numbers in {len(index):,} rows, such as {odd}",
            expected="labels, each of several examples",
            why="labels name classes",
            do="set data.target = 'quantity' to predict numbers (regression); write codes with a "
            "letter, such as D427.31",
        )
