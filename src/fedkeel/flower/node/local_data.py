"""Data that stays on the nodes: how a node reads its own, and what the server knows of it.

The server is told shape, number of examples and a digest, and makes a stand-in of two blank
examples of it: enough to make the model, to rehearse a reply, and to draw cohorts. It never sees
the data.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from fedkeel.config import Experiment
from fedkeel.data.dataset import Dataset, Federation, Ints, dataset
from fedkeel.data.read.images import normalise
from fedkeel.data.read.load import check_augment, load
from fedkeel.data.read.raw_examples import stratified
from fedkeel.data.user_arrays import array_of
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import ConfigError, DataError
from fedkeel.flower.server.membership import LARGEST, Presence
from fedkeel.rng import generator
from fedkeel.runner.prepare import DTYPES, task
from fedkeel.user_code import ImportTarget, import_object, one_line

NODES = "nodes"
"""What ``data.source`` and ``partition.kind`` say where data stays on the nodes."""

_WANTED = ImportTarget(
    "data",
    DataError,
    "my_data:load",
    callable,
    "write a function there that returns a Dataset, a pair (x, y), or a training and a test set",
)


def away(experiment: Experiment) -> bool:
    """Return whether the data stays on the nodes.

    Raises:
        DataError: only one of ``data.source`` and ``partition.kind`` says so, the names of the
            labels are missing or not different, or a hold-out is asked for.
    """
    source, kind = experiment.data.source == NODES, experiment.partition.kind == NODES
    if source != kind:
        raise DataError(
            "Data on the nodes needs data.source = 'nodes' and partition.kind = 'nodes'.",
            got=f"{experiment.data.source!r} and {experiment.partition.kind!r}",
        )
    if source and not experiment.data.labels:
        raise DataError(
            "Data on the nodes needs data.labels, the names of the labels in their order.",
            why="every node has to number the classes in the same way, also those it has not",
            do='set data.labels = ["benign", "malignant"], or ["0", "1", ...] for numbers',
        )
    labels = experiment.data.labels
    if len(set(labels)) < len(labels):
        twice = next(name for name in labels if labels.count(name) > 1)
        raise DataError(f"data.labels names {twice!r} twice.", expected="each label once")
    if source and experiment.partition.holdout:
        raise DataError(
            "Data on the nodes takes no partition.holdout.",
            got=experiment.partition.holdout,
            why="each node is evaluated on what data.test_fraction keeps aside there",
            do="leave it out, and set data.test_fraction",
        )
    return source


def own(experiment: Experiment, config: Mapping[str, object], client: int) -> Ingredients:
    """Return the ingredients of a node: its own data, as one client of a federation.

    Args:
        experiment: the same as at the server.
        config: the node's configuration; ``data`` is a path, or an import path of a function.
        client: which client the node is.

    Raises:
        DataError: there are no data, or they cannot be used.
    """
    text = config.get("data")
    if not isinstance(text, str) or not text:
        raise DataError(
            "The node's configuration needs 'data'.",
            got=text,
            expected="a path, or an import path of a function",
            do="start it with --node-config 'data=\"/path/to/file.csv\" ...'",
        )
    train, test = _called(text, experiment) if _is_import(text) else _read(text, experiment)
    count = experiment.partition.clients or 0
    if not 0 <= client < count:
        raise ConfigError(
            f"This node is client {client}, and there are {count}.",
            expected=f"a partition-id from 0 to {count - 1}",
            do="start it with another one, or with the experiment that the server has",
        )
    joined = replace(train, x=torch.cat([train.x, test.x]), y=torch.cat([train.y, test.y]))
    rows = np.arange(len(joined), dtype=np.int64)
    federation = Federation(
        joined,
        rows[: len(train)],
        _offsets(client, count, len(train)),
        {"kind": NODES},
        holdout_rows=rows[len(train) :],
        holdout_offsets=_offsets(client, count, len(test)),
    )
    return _ingredients(experiment, federation, test)


def _ingredients(experiment: Experiment, federation: Federation, test: Dataset) -> Ingredients:
    """Return the ingredients of either end, from a federation with data or a stand-in."""
    data = federation.data
    check_augment(experiment.data, images=len(data.shape) == 3)
    augment = experiment.data.augment == "crop_flip"
    made = task(experiment, data)
    return Ingredients(made, lambda seed: federation, test, experiment.model.name, augment)


def _offsets(client: int, count: int, size: int) -> Ints:
    return np.where(np.arange(count + 1) > client, size, 0).astype(np.int64)


def _is_import(text: str) -> bool:
    return all(word.isidentifier() for word in text.replace(":", ".").split(".")) and ":" in text


def _read(text: str, experiment: Experiment) -> tuple[Dataset, Dataset]:
    settings = experiment.data.model_copy(update={"source": text, "labels": ()})
    train, test = load(settings)
    labels = experiment.data.labels
    train, test = (
        replace(half.with_label_names(labels, text), classes=len(labels), sources=(NODES,))
        for half in (train, test)
    )
    return train, test


def _called(text: str, experiment: Experiment) -> tuple[Dataset, Dataset]:
    function: Any = import_object(text, _WANTED)
    try:
        found = function()
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"data {text!r} raised an error.", got=one_line(error)) from error
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Dataset):
        train, test = found
    else:
        whole = found if isinstance(found, Dataset) else _arrays(text, found, experiment)
        random = generator(experiment.seed, f"data.test/{text}")
        first, second = stratified(whole.y.numpy(), experiment.data.test_fraction, random)
        train, test = whole.take(first), whole.take(second)
    if (train.shape, train.x.dtype) != (test.shape, test.x.dtype):
        raise DataError(
            f"The training and test inputs of data {text!r} differ in form.",
            got=f"{list(train.shape)} {train.x.dtype} and {list(test.shape)} {test.x.dtype}",
        )
    labels = experiment.data.labels
    train, test = (half.with_label_names(labels, f"data {text!r}") for half in (train, test))
    both = torch.cat([train.y, test.y])
    if not len(train) or int(both.max()) >= len(labels):
        what = "a label beyond the" if len(train) else "no training example of the"
        raise DataError(f"data {text!r} holds {what} {len(labels)} of data.labels.")
    form = torch.contiguous_format
    inputs = train.x.clone(memory_format=form), test.x.clone(memory_format=form)
    scale = None
    if inputs[0].is_floating_point():
        scale = normalise(*inputs, experiment.data.normalize)
    own = train.scale if scale is None else scale.plain()
    train, test = (
        replace(half, x=x, classes=len(labels), label_names=labels, sources=(NODES,), scale=own)
        for half, x in zip((train, test), inputs, strict=True)
    )
    return train, test


def _arrays(text: str, found: object, experiment: Experiment) -> Dataset:
    if not isinstance(found, tuple) or len(found) != 2:
        raise DataError(
            f"data {text!r} did not return data.",
            got=type(found).__name__,
            expected="a Dataset, a pair (x, y), or a training and a test set",
        )
    x, y = found
    texts = array_of(y, f"{text}: labels")
    if texts.ndim == 1 and all(isinstance(one, str) for one in texts.tolist()):
        names, places = np.unique(texts.astype(str), return_inverse=True)
        return dataset(x, places, name=text, label_names=tuple(names.tolist()))
    return dataset(x, y, classes=len(experiment.data.labels), name=text)


def stand_in(experiment: Experiment, said: Mapping[int, Presence]) -> Ingredients:
    """Return the ingredients of the server, which has no data.

    Args:
        experiment: what runs.
        said: what each client's node says of its data, for all clients.

    Raises:
        DataError: the nodes' data do not fit together.
    """
    first = said[0]
    for client, one in sorted(said.items()):
        form, same = (
            (one.shape, one.classes, one.tokens),
            (first.shape, first.classes, first.tokens),
        )
        if form != same:
            raise DataError(
                f"The data of client {client} and client 0 differ in form.",
                got=f"shape {list(one.shape)}, {one.classes} classes",
                expected=f"shape {list(first.shape)}, {first.classes} classes",
            )
    columns = _columns(said)
    sizes = [_one(said[k].examples) for k in sorted(said)]
    held = [_one(said[k].held) for k in sorted(said)]
    if sum(sizes) + sum(held) > 3 * LARGEST:
        raise DataError(
            "The nodes say that they have more examples than can be.",
            got=sum(sizes) + sum(held),
            expected=f"at most {3 * LARGEST} in all",
        )
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr([said[k].digest for k in sorted(said)]).encode())
    data = _blank(experiment, first, 2, (f"nodes {digest.hexdigest()}",))
    data = replace(data, columns=columns)
    names = _names(said)
    federation = Federation(
        data,
        np.zeros(sum(sizes), dtype=np.int64),
        np.cumsum([0, *sizes]),
        {"kind": NODES},
        names,
        np.zeros(sum(held), dtype=np.int64),
        np.cumsum([0, *held]),
    )
    test = replace(
        _blank(experiment, first, sum(held), names), source=np.repeat(np.arange(len(held)), held)
    )
    return _ingredients(experiment, federation, test)


def _names(said: Mapping[int, Presence]) -> tuple[str, ...]:
    """Return what the clients are called, told apart where two nodes have one name.

    A name that ends as these do is told apart too: all of them are different.
    """
    given = {k: said[k].name or f"client {k}" for k in sorted(said)}
    count = Counter(given.values())
    return tuple(
        name if count[name] == 1 and " (client " not in name else f"{name} (client {k})"
        for k, name in given.items()
    )


def _columns(said: Mapping[int, Presence]) -> tuple[str, ...]:
    """Return the columns of those that have tables; refuse inputs that mean different things."""
    named = [(client, one.columns) for client, one in sorted(said.items()) if one.columns]
    first, expected = named[0] if named else (0, ())
    for client, found in named:
        for place, (one, other) in enumerate(zip_longest(found, expected), start=1):
            if one != other:
                raise DataError(
                    f"The columns of client {client} and client {first} differ.",
                    got=f"{one!r} as column {place}",
                    expected=f"{other!r}",
                    why="an input is known by its place alone",
                    do="write the same columns in the same order on every node, or use data.drop",
                )
    return expected


def _one(column: tuple[int, ...]) -> int:
    return column[0]


def _blank(experiment: Experiment, like: Presence, count: int, names: tuple[str, ...]) -> Dataset:
    dtype = torch.int64 if like.tokens else DTYPES[experiment.engine.dtype]
    return Dataset(
        x=torch.zeros((), dtype=dtype).expand(count, *like.shape),
        y=torch.zeros(count, dtype=torch.int64),
        classes=like.classes,
        sources=names,
        label_names=experiment.data.labels,
    )
