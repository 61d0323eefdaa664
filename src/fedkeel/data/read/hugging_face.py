"""Data sets of Hugging Face by name or folder, and text as tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.optional import imported
from fedkeel.base.rng import generator
from fedkeel.base.user_code import one_line
from fedkeel.config import Data, Text
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.read.load import check_augment, load
from fedkeel.data.read.raw_examples import train_and_test_rows
from fedkeel.data.read.user_data import Reading, dataset, like
from fedkeel.data.user_objects import target_of
from fedkeel.errors import DataError, did_you_mean

PREFIX = "hf:"
"""What `data.source` begins with where it names a data set of Hugging Face."""


@dataclass(frozen=True)
class Columns(Reading):
    """What the columns of a data set mean, beside what those of any table do.

    Args:
        client: name of the column that says whose an example is; None where there is none.
        text: which column holds text, and how it becomes tokens; None of other inputs.
        tokenizer: in place of that which `text` names: a tokenizer of `transformers`, or any
            callable with its arguments.
    """

    client: str | None = None
    text: Text | None = None
    tokenizer: Any = None


def load_any(settings: Data, group: str | None = None) -> tuple[Dataset, Dataset]:
    """Load the data that settings name, of Hugging Face or any other, as `load` does."""
    if isinstance(settings.source, str) and settings.source.startswith(PREFIX):
        return load_hugging_face(settings, group)
    if settings.text is not None:
        raise DataError(
            "data.text is for a data set of Hugging Face.",
            got=f"data.source = {settings.source!r}",
            do='name one: data.source = "hf:NAME", or take data.text away '
            "(docs/guides/hugging-face.md, A table with text)",
        )
    return load(settings, group=group)


def load_hugging_face(settings: Data, group: str | None = None) -> tuple[Dataset, Dataset]:
    """Load the data set that ``data.source = "hf:NAME"`` names.

    Args:
        settings: see `fedkeel.config.Data`. Where the data set has no test split, all runs draw the
            same examples to test on.
        group: name of the column of groups, see `fedkeel.config.Partition.holdout_by`.

    Returns:
        The training set and the test set.

    Raises:
        DataError: it is not here, a column is not there, or a setting is for other sources.
        ConfigError: a package is not installed.
    """
    for key in ("test", "shape", "normalize", "target"):
        if getattr(settings, key) != Data.model_fields[key].default:
            raise DataError(
                f"data.{key} is not for a data set of Hugging Face.",
                got=f"data.{key} = {getattr(settings, key)!r}",
                do=f"take data.{key} away, and change the data set itself with `datasets`",
            )
    splits = read_splits(str(settings.source).removeprefix(PREFIX))
    target = settings.label if settings.label != "label" else None
    columns = Columns(
        target,
        settings.drop,
        settings.categories,
        settings.missing,
        group=group,
        client=settings.client,
        text=settings.text,
    )
    train, test = train_and_test(splits, columns)
    check_augment(settings, isinstance(train.shape, tuple) and len(train.shape) == 3)
    if settings.limit is not None and settings.limit < len(train):
        rows = generator(0, "data.limit").permutation(len(train))[: settings.limit]
        train = train.take(np.sort(rows))
    if test is not None:
        return train, test
    kept, test_rows = train_and_test_rows(train, settings.test_fraction, generator(0, "data.test"))
    if group is not None and not len(test_rows):
        raise DataError(
            f"The data set has one value of {group!r} only.",
            got=f"partition.holdout_by = {group!r}",
            why="all examples of one value are trained on, or all are tested on",
            do="give a data set with a split 'test'",
        )
    return train.take(kept), train.take(test_rows)


def read_splits(name: str) -> dict[str, Any]:
    """Return the splits of a data set: of a folder that `save_to_disk` wrote, or by its name.

    By its name it is taken from the cache of `datasets`, or downloaded.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: there is no such data set.
    """
    datasets = imported("datasets", "data.source = 'hf:...'")
    path = os.path.expanduser(name)
    try:
        is_folder = os.path.isdir(path)
        loaded = datasets.load_from_disk(path) if is_folder else datasets.load_dataset(name)
    except Exception as error:  # whatever its network, its cache or its files give
        raise DataError(
            f"The data set {name!r} of Hugging Face cannot be read.",
            got=one_line(error),
            expected="a folder that save_to_disk wrote, or a name on the hub",
            do="check the name; without a network it has to be in the cache",
        ) from error
    return splits_of(loaded)


def splits_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a Dataset or a DatasetDict
    """Return the splits of a loaded data set, by name."""
    return dict(value) if isinstance(value, Mapping) else {"train": value}


def train_and_test(splits: Mapping[str, Any], columns: Columns) -> tuple[Dataset, Dataset | None]:
    """Return the split ``train`` and the split ``test``, None where there is none.

    Labels, tokens and the schema of a table are those of the training split.

    Raises:
        DataError: there is no split ``train``; a column is not there.
    """
    if "train" not in splits:
        raise DataError(
            "The data set has no split 'train'.", do=did_you_mean("train", list(splits))
        )
    if columns.text is not None and columns.tokenizer is None:
        columns = replace(columns, tokenizer=load_tokenizer(columns.text.tokenizer))
    train = read_split(splits["train"], columns, "train")
    if "test" not in splits:
        return train, None
    test = read_split(splits["test"], columns, "test", train)
    if train.label_names:  # of which the test split may know some only
        test = test.with_label_names(train.label_names, "The split 'test'")
    classes = max(train.classes, test.classes)
    return replace(train, classes=classes), replace(test, classes=classes)


def read_split(
    split: Any,  # noqa: ANN401 - of `datasets`
    columns: Columns,
    name: str,
    train: Dataset | None = None,
) -> Dataset:
    """Return the examples of one split, with the clients that a column names.

    Args:
        split: the split.
        columns: what its columns mean.
        name: what to call it in messages.
        train: the training split, where another is read: a table is made ready as it was.
    """
    client: Ints | None = None
    group: Ints | None = None
    names: tuple[str, ...] = ()
    if columns.client is not None:
        _check_column(split, columns.client, "client")
        values, number = np.unique(np.asarray(split[columns.client]), return_inverse=True)
        client, names = number.astype(np.int64), tuple(map(str, values))
    if columns.group is not None and (train is None or columns.group in split.column_names):
        _check_column(split, columns.group, "partition.holdout_by")
        group = np.unique(np.asarray(split[columns.group]), return_inverse=True)[1].astype(np.int64)
    used = [name for name in split.column_names if name in (columns.client, columns.group)]
    split = split.remove_columns(used) if used else split
    if columns.tokenizer is not None:
        data = _read_text(split, columns, name)
    elif train is not None and train.schema is not None:
        data = like(train, split, name)
    else:
        data = dataset(
            split,
            target=columns.target,
            drop=columns.drop,
            categories=columns.categories,
            missing=columns.missing,
            name=name,
        )
    group = group if train is None else None  # of two splits, each has numbers of its own
    named = "" if group is None else str(columns.group)
    return replace(data, client=client, clients=names, group=group, grouped_by=named)


def _read_text(split: Any, columns: Columns, name: str) -> Dataset:  # noqa: ANN401
    """Return text as ``input_ids`` and ``attention_mask`` [N, T] by name, with labels."""
    text = columns.text or Text()
    target = target_of(split.column_names, name, columns.target)
    column = text.column or _only_text(split, target, columns.drop)
    _check_column(split, column, "data.text.column")
    x = tokens_of(list(split[column]), columns.tokenizer, text.length)
    label_names = tuple(getattr(split.features[target], "names", None) or ())
    y = np.asarray(split[target])
    if y.dtype.kind not in "iuf":
        raise DataError(
            f"{name}: the labels in {target!r} are text.",
            got=repr(y[0]),
            expected="numbers from 0, or a ClassLabel",
            do=f"data.class_encode_column({target!r}) of `datasets` numbers them",
        )
    more: dict[str, Any] = {}
    if label_names:
        more = {"label_names": label_names, "classes": len(label_names)}
    return dataset(x, y, name=name, tokens=True, text_column=column, **more)


def tokens_of(texts: list[str], tokenizer: Any, length: int) -> dict[str, NDArray[np.int64]]:  # noqa: ANN401
    """Return ``input_ids`` and ``attention_mask`` [N, T] by name, as far as the tokenizer has them.

    Args:
        texts: N texts.
        tokenizer: of `transformers`, or any callable with its arguments.
        length: T; longer text is cut, shorter text padded.
    """
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length)
    kept = [key for key in ("input_ids", "attention_mask") if key in encoded]
    return {key: np.asarray(encoded[key], dtype=np.int64) for key in kept}


def load_tokenizer(name: str | None) -> Any:  # noqa: ANN401 - of `transformers`
    """Return the tokenizer of this name or folder, from the cache, or downloaded.

    Raises:
        ConfigError: `transformers` is not installed.
        DataError: none is named, or there is no such tokenizer.
    """
    if name is None:
        raise DataError(
            "Text needs a tokenizer.",
            do='name it: data.text.tokenizer = "bert-base-uncased", or give from_hf a tokenizer',
        )
    transformers = imported("transformers", "data.text.tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever its network, its cache or its files give
        raise DataError(
            f"The tokenizer {name!r} cannot be read.",
            got=one_line(error),
            do="check the name; without a network it has to be a folder or in the cache",
        ) from error


def _only_text(split: Any, target: str, drop: Sequence[str]) -> str:  # noqa: ANN401
    """Return the one column of text."""
    texts = [
        key
        for key, feature in split.features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
        and key != target
        and key not in drop
    ]
    if len(texts) == 1:
        return str(texts[0])
    raise DataError(
        "It is not known which column holds the text.",
        got=", ".join(map(repr, texts)) or "no column of text",
        do='name it: data.text.column = "..."',
    )


def _check_column(split: Any, column: str, what: str) -> None:  # noqa: ANN401
    if column not in split.column_names:
        raise DataError(
            f"The data set has no column {column!r}, which {what} names.",
            do=did_you_mean(column, split.column_names),
        )
