"""A node's own data: read from a file or from the user's function, as one client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedkeel.base.named_code import ImportTarget, import_object
from fedkeel.base.rng import generator
from fedkeel.base.user_code import one_line
from fedkeel.base.values import Values, joined, shape_text, tensors_of
from fedkeel.config import Experiment
from fedkeel.data.dataset import Dataset, Ints, dataset
from fedkeel.data.federation import Federation
from fedkeel.data.read.load import all_trained_on, load
from fedkeel.data.read.raw_examples import train_and_test_rows
from fedkeel.data.read.scaling import check_channels, normalise
from fedkeel.data.user_arrays import as_array
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import ConfigError, DataError
from fedkeel.flower.data_on_nodes import NODES, ingredients
from fedkeel.task.losses import OF_QUANTITIES, make_loss

_FUNCTION = ImportTarget(
    "data",
    DataError,
    "my_data:load",
    lambda value: False,
    "a function that returns data",
    "write a function there that returns a Dataset, a pair (x, y), or a training and a test set",
    arguments=0,
)


def read_local_data(experiment: Experiment, source: object, client: int) -> Ingredients:
    """Return the ingredients of a node: its own data, as one client of a federation.

    Args:
        experiment: the same as at the server.
        source: ``data`` of the node's configuration: a path, or an import path of a function.
        client: which client the node is.

    Raises:
        DataError: there are no data, or they cannot be used.
        ConfigError: there is no such client.
    """
    if not isinstance(source, str) or not source:
        raise DataError(
            "The node's configuration needs 'data'.",
            got=source,
            expected="a path, or an import path of a function",
            do="start it with --node-config 'data=\"/path/to/file.csv\" ...'",
        )
    read = _from_function if _is_import_path(source) else _from_file
    train, test = read(source, experiment)
    clients = experiment.partition.clients or 0
    if not 0 <= client < clients:
        raise ConfigError(
            f"This node is client {client}, and there are {clients}.",
            expected=f"a partition-id from 0 to {clients - 1}",
            do="start it with another one, or with the experiment that the server has",
        )
    how = {"kind": NODES}
    if experiment.data.normalize == "standardize" and _is_scaled(train.x):
        how["normalize"] = "standardize"  # by the sums of all nodes, which the server merges
    if experiment.data.channels == "last":
        how["channels"] = "last"
    both = replace(train, x=joined([train.x, test.x]), y=joined([train.y, test.y]), group=None)
    rows = np.arange(len(both), dtype=np.int64)
    federation = Federation(
        both,
        rows[: len(train)],
        _offsets(client, clients, len(train)),
        how,
        holdout_rows=rows[len(train) :],
        holdout_offsets=_offsets(client, clients, len(test)),
    )
    return ingredients(experiment, federation, test)


def _is_scaled(x: Values) -> bool:
    """Return whether inputs can be standardised: one array of numbers."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _by_itself(experiment: Experiment) -> str:
    """Return how the node normalises its inputs without those of the others."""
    how = experiment.data.normalize
    return {"standardize": "none", "client": "standardize"}.get(how, how)


def _offsets(client: int, clients: int, size: int) -> Ints:
    return np.where(np.arange(clients + 1) > client, size, 0).astype(np.int64)


def _is_import_path(text: str) -> bool:
    return ":" in text and all(name.isidentifier() for name in text.replace(":", ".").split("."))


def _from_file(path: str, experiment: Experiment) -> tuple[Dataset, Dataset]:
    """Return the training and the test set of a file or folder."""
    labels = experiment.data.labels
    train, test = (
        replace(part.with_label_names(labels, path), classes=len(labels), sources=(NODES,))
        for part in load(
            experiment.data.model_copy(
                update={"source": path, "labels": (), "normalize": _by_itself(experiment)}
            ),
            is_one_of_many=True,
            group=experiment.partition.holdout_by,
        )
    )
    return train, test


def _from_function(path: str, experiment: Experiment) -> tuple[Dataset, Dataset]:
    """Return the training and the test set of a user's function."""
    function: Any = import_object(path, _FUNCTION)
    try:
        result = function()
    except Exception as error:  # a user's function may raise anything
        raise DataError(f"data {path!r} raised an error.", got=one_line(error)) from error
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Dataset):
        train, test = result
    else:
        data = result if isinstance(result, Dataset) else _from_arrays(path, result, experiment)
        random = generator(experiment.seed, f"data.test/{path}")
        share = experiment.data.test_fraction
        group = experiment.partition.holdout_by
        if group is not None and data.group is None:
            raise DataError(
                f"partition.holdout_by = {group!r}, and data {path!r} names no groups.",
                do="return fedkeel.dataset(x, y, group=numbers), or a training and a test set",
            )
        train_rows, test_rows = train_and_test_rows(data, share, random)
        train, test = data.take(train_rows), data.take(test_rows)
        if not len(test):
            text = all_trained_on(f"data {path!r}", len(train), group)
            train = replace(train, warnings=(text,))
    if _form(train) != _form(test):
        raise DataError(
            f"The training and test examples of data {path!r} differ in shape or type.",
            got=f"{shape_text(train.x)} and {shape_text(test.x)}",
        )
    if not len(train):
        raise DataError(f"data {path!r} holds no training example.")
    labels = experiment.data.labels
    more: dict[str, Any] = {"sources": (NODES,)}
    if labels:
        train, test = (part.with_label_names(labels, f"data {path!r}") for part in (train, test))
        if not train.has_labels:
            raise DataError(
                f"data {path!r} holds no labels, and data.labels names some.",
                got=f"targets {shape_text(train.y)}",
            )
        if max(train.labels.max(), test.labels.max(initial=0)) >= len(labels):
            raise DataError(f"data {path!r} holds a label beyond the {len(labels)} of data.labels.")
        more |= {"classes": len(labels), "label_names": labels}
    if isinstance(train.x, dict) or isinstance(test.x, dict):
        return replace(train, **more), replace(test, **more)
    inputs = tuple(x.clone(memory_format=torch.contiguous_format) for x in (train.x, test.x))
    scale = train.scale
    if inputs[0].is_floating_point():
        channels = experiment.data.channels
        check_channels(inputs[0].shape[1:], channels, False, "data.channels")
        normalised = normalise(inputs[0], inputs[1], _by_itself(experiment), None, channels)
        scale = train.scale if normalised is None else normalised.recorded()
    train, test = (
        replace(part, x=x, scale=scale, **more)
        for part, x in zip((train, test), inputs, strict=True)
    )
    return train, test


def _form(data: Dataset) -> list[tuple[object, ...]]:
    """Return shape and type of each tensor of inputs and targets."""
    tensors = (*tensors_of(data.x), *tensors_of(data.y))
    return [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors]


def _from_arrays(path: str, result: object, experiment: Experiment) -> Dataset:
    """Return the dataset of a pair (x, y); labels may be texts."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(
            f"data {path!r} did not return data.",
            got=type(result).__name__,
            expected="a Dataset, a pair (x, y), or a training and a test set",
        )
    x, y = result
    if not experiment.data.labels:
        of_quantities = make_loss(experiment.task.loss) in OF_QUANTITIES
        classes = 0 if of_quantities else None
        missing = experiment.data.missing_targets
        return dataset(x, y, classes=classes, name=path, missing_targets=missing)
    labels = as_array(y, f"{path}: labels")
    if labels.ndim == 1 and all(isinstance(label, str) for label in labels.tolist()):
        names, numbers = np.unique(labels.astype(str), return_inverse=True)
        return dataset(x, numbers, name=path, label_names=tuple(names.tolist()))
    return dataset(x, y, classes=len(experiment.data.labels), name=path)
