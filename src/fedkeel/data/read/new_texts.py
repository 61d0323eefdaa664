"""Texts that a trained model is to answer: read from what holds them, and made tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.named_files import expanded
from fedkeel.config import Experiment, Text
from fedkeel.data.read.hugging_face import PREFIX, load_tokenizer, read_splits, splits_of, tokens_of
from fedkeel.data.read.load import check_path
from fedkeel.data.read.tables import TABLE_SUFFIXES, read_columns, read_names
from fedkeel.data.user_objects import TARGETS
from fedkeel.errors import DataError, did_you_mean

ACCEPTED = (
    "a .csv or .parquet file or a table with a column of text; a data set of `datasets`, its "
    "folder or hf:NAME; or in Python a list of texts"
)
"""What can be read."""


@dataclass(frozen=True)
class NewTexts:
    """Texts, made tokens. N examples.

    Args:
        x: tokens [N, T] by name.
        others: all columns by name, the text too: [N] texts each.
        warnings: what a user should know about the texts.
    """

    x: dict[str, NDArray[np.int64]]
    others: dict[str, list[str]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextReader:
    """Reads texts and makes them tokens, as it was done for training.

    Args:
        text: which column holds text, and how it becomes tokens.
        no_text: names of columns that hold something else: labels, clients and the like; for runs
            that do not record the column.
    """

    text: Text
    no_text: frozenset[str] = frozenset()

    @classmethod
    def of(cls, experiment: Experiment, column: str) -> Self | None:
        """Return the reader of an experiment, None of one that was not trained on text.

        Args:
            experiment: the experiment.
            column: name of the column that held the text, "" of a run that does not record it.
        """
        data = experiment.data
        if data.text is None:
            return None
        known = (data.client, experiment.partition.holdout_by, data.label, *data.drop, *TARGETS)
        text = data.text.model_copy(update={"column": column}) if column else data.text
        return cls(text, frozenset(filter(None, known)))

    def read(self, value: object, name: str) -> NewTexts:
        """Read texts, and make them tokens.

        Args:
            value: what `ACCEPTED` names.
            name: what to call it in messages.

        Raises:
            DataError: it cannot be read, it is not known which column holds the text, or the
                tokenizer is not there.
        """
        columns = _columns(value, name, self.text.column or "text")
        warnings: list[str] = []
        column = self._column(columns, name, warnings)
        texts = columns[column]
        for row, entry in enumerate(texts):
            if not isinstance(entry, str):
                raise DataError(
                    f"{name}: the column {column!r} does not hold text in every row.",
                    got=f"{entry!r} in row {row} (counted from 0)",
                    expected="a text",
                    do="leave the row out, or give the column of text",
                )
        if not texts:
            raise DataError(f"{name} has no rows.")
        others = {key: [_written(entry) for entry in column] for key, column in columns.items()}
        tokenizer = self._tokenizer()
        x = tokens_of(texts, tokenizer, self.text.length)
        warnings += [*_without_words(x, tokenizer, name), *_cut(x, self.text.length, name)]
        return NewTexts(x, others, tuple(warnings))

    def _column(self, columns: Mapping[str, Sequence[Any]], name: str, warnings: list[str]) -> str:
        """Return the name of the column of text; note where the run does not say it."""
        wanted = self.text.column
        if wanted is not None:
            if wanted not in columns:
                raise DataError(
                    f"{name} has no column {wanted!r}, which held the text in training.",
                    do=f"{did_you_mean(wanted, columns)}; call the column of text {wanted!r}",
                )
            return wanted
        found = [
            key
            for key, column in columns.items()
            if key not in self.no_text and any(map(_is_words, column))
        ]
        if "text" in found:
            return "text"
        if len(found) == 1:
            warnings.append(
                f"{name}: the text is taken from the column {found[0]!r}: the run was made by an "
                "earlier version, and does not say which column it was in training"
            )
            return found[0]
        raise DataError(
            f"{name}: it is not known which column holds the text.",
            got=", ".join(map(repr, found or columns)),
            why="the run was made by an earlier version, and does not say which it was in training",
            do="call the column of text 'text', or leave out other columns of text",
        )

    def _tokenizer(self) -> Any:  # noqa: ANN401 - of `transformers`
        try:
            return load_tokenizer(self.text.tokenizer)
        except DataError as error:
            raise DataError(
                f"The tokenizer {self.text.tokenizer!r} that the model was trained with cannot be "
                "read.",
                got=error.got,
                why="a folder is looked for from the current folder, as in training",
                do="call from the folder where the run was started, or put the tokenizer there",
            ) from error


def _columns(value: Any, name: str, text: str) -> dict[str, list[Any]]:  # noqa: ANN401
    """Return columns of whatever holds them; a list of texts is one, called `text`."""
    if isinstance(value, (str, os.PathLike)):
        return _of_path(str(value), name)
    if isinstance(value, Mapping):
        if value and all(hasattr(split, "column_names") for split in value.values()):
            return _of_splits(splits_of(value), name, "")
        return _of_mapping(value, name)
    if hasattr(value, "column_names") and hasattr(value, "with_format"):
        return _of_splits(splits_of(value), name, "")
    if isinstance(value, (list, tuple, np.ndarray)) or hasattr(value, "to_list"):  # a series
        return {text: list(value)}
    if hasattr(value, "__arrow_c_stream__"):
        return _of_arrow(value)
    raise _not_text(name, type(value).__name__)


def _of_path(path: str, name: str) -> dict[str, list[Any]]:
    """Return the columns of a file, of a folder of `save_to_disk`, or of a data set by its name."""
    if path.startswith(PREFIX):
        return _of_splits(read_splits(path.removeprefix(PREFIX)), name, path)
    file = expanded(path)
    if file.is_dir():
        return _of_splits(read_splits(str(file)), name, path)
    if not path.lower().endswith(TABLE_SUFFIXES):
        raise _not_text(name, "a file of another kind" if file.exists() else "no such file")
    check_path(file, str(file))
    columns = read_columns(file, read_names(file), ())
    return {key: [_decoded(x, name, key) for x in c.to_pylist()] for key, c in columns.items()}


def _of_splits(splits: Mapping[str, Any], name: str, path: str) -> dict[str, list[Any]]:
    """Return the columns of the only split of a data set."""
    if len(splits) != 1:
        first = next(iter(splits), "test")
        hint = "" if not path else f", in Python, or a folder of one split: {path}/{first}"
        raise DataError(
            f"{name} has several splits.",
            got=", ".join(splits),
            expected="one",
            do=f"give one of them, DATA[{first!r}]{hint}",
        )
    (split,) = splits.values()
    return _of_arrow(split.with_format("arrow")[:])


def _of_mapping(value: Mapping[Any, Any], name: str) -> dict[str, list[Any]]:
    """Return the columns of a mapping."""
    try:
        columns = {str(key): list(column) for key, column in value.items()}
    except TypeError:
        raise _not_text(name, "a value that is no list") from None
    if not columns or len({len(column) for column in columns.values()}) > 1:
        raise _not_text(name, f"columns of {[len(column) for column in columns.values()]} rows")
    return columns


def _of_arrow(value: object) -> dict[str, list[Any]]:
    """Return the columns of a table of Arrow, of pandas or the like."""
    import pyarrow as pa  # slow to import

    table = pa.table(value)
    return {
        key: column.to_pylist()
        for key, column in zip(table.column_names, table.columns, strict=True)
    }


def _decoded(entry: object, name: str, column: str) -> object:
    """Return a cell of a CSV file, which is read as bytes, as text."""
    if not isinstance(entry, bytes):
        return entry
    try:
        return entry.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"{name}: the column {column!r} is not in UTF-8.",
            got=repr(entry[:40]),
            do="save the file as UTF-8",
        ) from None


def _without_words(x: Mapping[str, NDArray[np.int64]], tokenizer: Any, name: str) -> Iterator[str]:  # noqa: ANN401
    """Yield a warning of texts of which the model sees no word: empty ones, and unknown words."""
    ids = next(iter(x.values()))
    rows = np.flatnonzero(np.isin(ids, tokenizer.all_special_ids).all(axis=1))
    if len(rows):
        yield (
            f"{name}: the text is empty, or has only words that the tokenizer does not know, in "
            f"{len(rows):,} of {len(ids):,} rows, first in row {rows[0]} (counted from 0): their "
            "answers do not depend on it"
        )


def _cut(x: Mapping[str, NDArray[np.int64]], length: int, name: str) -> Iterator[str]:
    """Yield a warning of texts that fill all places for tokens: the rest of them is not read."""
    mask = x.get("attention_mask")
    if mask is not None and (count := int(mask[:, -1].sum())):
        yield (
            f"{name}: the text has {length} tokens or more in {count:,} of {len(mask):,} rows: "
            "what is longer is cut, as in training (data.text.length), and not read"
        )


def _is_words(entry: object) -> bool:
    """Return whether a value is text that is no number."""
    if not isinstance(entry, str) or not entry:
        return False
    try:
        float(entry)
    except ValueError:
        return True
    return False


def _written(entry: object) -> str:
    return "" if entry is None else str(entry)


def _not_text(name: str, got: str) -> DataError:
    return DataError(
        f"{name}: the model was trained on text, and there is no text here.",
        got=got,
        expected=ACCEPTED,
    )
