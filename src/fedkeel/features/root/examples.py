"""The server's own examples: drawn from those of all clients, or read from a file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedkeel.base.named_files import expanded
from fedkeel.base.rng import generator
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation import Federation
from fedkeel.data.read.arrays import read_arrays
from fedkeel.data.read.scaling import CONSTANT, Scale
from fedkeel.errors import DataError, counted
from fedkeel.task.predict.preparation import InputPreparation


def drawn(clients: Federation, count: int, seed: int) -> Ints:
    """Return places among the rows of all clients, ascending, drawn from the stream (seed, "root").

    Every client keeps at least one example.

    Args:
        clients: the clients as the data are divided.
        count: number of examples.
        seed: seed of the run.

    Raises:
        DataError: the clients have too few examples.

    >>> from fedkeel.data.dataset import dataset
    >>> from fedkeel.data.federation import federation
    >>> two = federation(dataset(np.zeros((5, 1)), [0, 1, 0, 1, 0]), [[0, 1, 2], [3, 4]])
    >>> len(drawn(two, 3, seed=0)), without(two, drawn(two, 3, seed=0)).sizes.tolist()
    (3, [1, 1])
    """
    left, owner = clients.sizes.copy(), clients.client_of_row()
    spare = int(np.maximum(left - 1, 0).sum())
    if count > spare:
        raise DataError(
            "The clients have too few examples for the server's own.",
            got=f"root.examples = {count}",
            expected=f"at most {spare}: every client keeps one of {len(owner)}",
        )
    places: list[int] = []
    for place in generator(seed, "root").permutation(len(owner)).tolist():
        if left[owner[place]] > 1:
            left[owner[place]] -= 1
            places.append(place)
        if len(places) == count:
            break
    return np.sort(np.array(places, dtype=np.int64))


def without(clients: Federation, places: Ints) -> Federation:
    """Return the clients without the examples at some places among their rows."""
    taken = np.bincount(clients.client_of_row()[places], minlength=len(clients))
    offsets = np.concatenate([[0], np.cumsum(clients.sizes - taken)])
    return replace(clients, rows=np.delete(clients.rows, places), offsets=offsets)


def read_file(file: str, like: Dataset) -> Dataset:
    """Return the examples of a file, prepared as those of the clients were.

    Args:
        file: path of an ``.npz`` file with arrays ``x`` and ``label``.
        like: the clients' examples, for shape, type, scale and labels.

    Raises:
        DataError: it cannot be read, or does not fit the clients' examples.
    """
    path, shape = expanded(file), like.shape
    if like.client_scales or isinstance(shape, dict) or not isinstance(like.x, torch.Tensor):
        raise DataError(
            "The server's examples cannot be read from a file here.",
            got=f"root.file = {file!r}",
            why="the inputs of each client were standardised by its own mean and deviation"
            if like.client_scales
            else "the clients have several inputs by name",
            do="take root.examples, drawn from those of the clients",
        )
    raw = read_arrays(path, "label", None, is_quantity=not like.has_labels)
    prepared = InputPreparation(shape, like.x.dtype, scale=_scale_of(like)).apply(str(path), file)
    if not like.has_labels:
        targets = like.y.dtype if isinstance(like.y, torch.Tensor) else like.x.dtype
        y = torch.from_numpy(raw.y).to(targets)
        return Dataset(prepared.x, y, classes=0)
    names = like.label_names or tuple(map(str, range(like.classes)))
    own = Dataset(
        prepared.x, torch.from_numpy(raw.y), len(raw.label_names), label_names=raw.label_names
    )
    return own.with_label_names(names, f"root.file = {file!r}")


def _scale_of(data: Dataset) -> Scale | None:
    """Return what the inputs were standardised by, None where they were not."""
    if data.scale is None:
        return None
    scale = Scale.of(*data.scale)
    return Scale(scale.mean, torch.where(scale.std == CONSTANT, 0.0, scale.std))


def in_words(count: int, file: str | None) -> str:
    """Return where the examples come from, and how many there are."""
    where = "drawn from those of all clients" if file is None else f"read from {file}"
    return f"{counted(count, 'example')} at the server, {where}"
