"""Federations of Hugging Face data sets: by a column, by a partition, or by flwr-datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedkeel.config import Partition, Text, build
from fedkeel.data.federation import Federation, federation
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.hugging_face import (
    Columns,
    read_splits,
    splits_of,
    train_and_test,
)
from fedkeel.errors import ConfigError, DataError

_ROW = "fedkeel row"
"""Column with the number of each example, by which a partition is known again."""


def from_hf(
    dataset: Any,  # noqa: ANN401 - of `datasets`
    *,
    client: str | None = None,
    partition: Partition | Mapping[str, Any] | None = None,
    partitioner: Any = None,  # noqa: ANN401 - of flwr-datasets
    target: str | None = None,
    text: str | None = None,
    tokenizer: Any = None,  # noqa: ANN401 - of `transformers`
    length: int = 128,
    drop: Sequence[str] = (),
    categories: Sequence[str] | Mapping[str, Sequence[str]] = (),
    missing: str = "refuse",
    holdout: float = 0.0,
    holdout_by: str | None = None,
    stratify: bool = False,
    seed: int = 0,
) -> Federation:
    """Divide a data set of Hugging Face among clients, in one of three ways.

    Its split ``train`` is divided. Its split ``test``, where there is one, is the test set of
    `fedkeel.run`, which then needs no other.

    Args:
        dataset: a ``datasets.Dataset`` or ``DatasetDict``; its name; or the folder that
            ``save_to_disk`` wrote.
        client: name of the column that says whose an example is.
        partition: how examples are divided, such as ``{"kind": "dirichlet", "clients": 10,
            "alpha": 0.1}``; see `fedkeel.config.Partition`.
        partitioner: a partitioner of flwr-datasets: it divides as it does for Flower.
        target: name of the column of the target; None where its name says so.
        text: name of the column of text; None takes the only one, where there is a `tokenizer`.
        tokenizer: a tokenizer of transformers, or its name or folder. Text becomes ``input_ids``
            and ``attention_mask`` [N, T], which the module gets by these names.
        length: T; longer text is cut, shorter text padded.
        drop: columns that are not inputs.
        categories: columns of a table that hold categories; see `fedkeel.config.Data`.
        missing: what becomes of missing values of a table; see `fedkeel.config.Data`.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: name of the column that says what belongs together, such as the patient, which
            is held out as a whole; it is not an input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the partition and of the hold-out.

    Raises:
        ConfigError: not exactly one of the three ways is given, or a package is not installed.
        DataError: the data cannot be found, read or used.
    """
    ways = {"client": client, "partition": partition, "partitioner": partitioner}
    chosen = [name for name, way in ways.items() if way is not None]
    if len(chosen) != 1:
        raise ConfigError(
            "It is not clear how the data set is divided among clients.",
            got=" and ".join(chosen) or "nothing",
            expected="one of client, partition and partitioner",
            do='name a column: client="...", or give partition={"kind": "iid", "clients": 10}',
        )
    splits = read_splits(dataset) if isinstance(dataset, str) else splits_of(dataset)
    settings = None
    if text is not None or tokenizer is not None:
        named = tokenizer if isinstance(tokenizer, str) else None
        settings = Text(column=text, tokenizer=named, length=length)
        tokenizer = None if isinstance(tokenizer, str) else tokenizer
    columns = Columns(
        target,
        drop,
        categories,
        missing,
        group=holdout_by,
        client=client,
        text=settings,
        tokenizer=tokenizer,
    )
    if partitioner is not None:
        return _by_partitioner(splits, partitioner, columns, (holdout, seed, stratify))
    if partition is None:
        partition = {"kind": "client"}
    if isinstance(partition, Mapping):
        holdout_settings = {"holdout": holdout, "stratify": stratify}
        partition = build(Partition, {**holdout_settings, **partition}, "partition")
    train, test = train_and_test(splits, columns)
    return replace(divide(train, partition, seed), test=test)


def _by_partitioner(
    splits: Mapping[str, Any],
    partitioner: Any,  # noqa: ANN401
    columns: Columns,
    holdout_draw: tuple[float, int, bool],
) -> Federation:
    """Return the clients that a partitioner of flwr-datasets makes of the training split."""
    missing = [n for n in ("load_partition", "num_partitions") if not hasattr(partitioner, n)]
    if missing:
        raise DataError(
            "'partitioner' is not a partitioner of flwr-datasets.",
            got=f"an object of type {type(partitioner).__name__} without {missing[0]!r}",
            expected="such as flwr_datasets.partitioner.DirichletPartitioner(...)",
        )
    train, test = train_and_test(splits, columns)
    rows = splits["train"].add_column(_ROW, list(range(len(train))))
    partitioner.dataset = rows
    lists = [
        np.asarray(partitioner.load_partition(k)[_ROW], dtype=np.int64)
        for k in range(partitioner.num_partitions)
    ]
    how = {"kind": "flwr-datasets", "says": type(partitioner).__name__}
    clients = federation(train, lists, how=how)
    return replace(clients.hold_out(*holdout_draw) if holdout_draw[0] else clients, test=test)
