"""The server's placeholder for data that only the nodes have.

The nodes tell the server shapes, numbers of examples and digests. From that it makes a data set of
two blank examples. It is enough to make the model, to rehearse a reply and to draw cohorts. No
memory and no work grows with the numbers that the nodes claim.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import numpy as np
import torch

from fedkeel.base.values import Values
from fedkeel.config import Experiment
from fedkeel.data.dataset import Dataset, ScalePair
from fedkeel.data.federation import Federation
from fedkeel.data.read.scaling import Moments
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import DataError, printable
from fedkeel.flower.data_on_nodes import NODES, ingredients
from fedkeel.flower.protocol import Form, NodeDescription
from fedkeel.runner.prepare import DTYPES


def placeholder(experiment: Experiment, descriptions: Mapping[int, NodeDescription]) -> Ingredients:
    """Return the ingredients of the server.

    Args:
        experiment: what runs.
        descriptions: what each client's node says of its data, for all clients.

    Raises:
        DataError: the nodes' data do not fit together.
    """
    nodes = [descriptions[client] for client in sorted(descriptions)]
    first, columns = nodes[0], _common_columns(nodes)
    if not first.labels:  # the largest number that any node has seen
        first = first.model_copy(update={"classes": max(node.classes for node in nodes)})
    for client, node in enumerate(nodes):
        if _form(node) != _form(first):
            raise DataError(
                f"The data of client {client} and client 0 differ in form.",
                got=_form_text(node),
                expected=_form_text(first),
            )
    train_sizes = [node.clients[0].train_examples for node in nodes]
    test_sizes = np.array([node.clients[0].test_examples for node in nodes], dtype=np.int64)
    owners = np.flatnonzero(test_sizes)
    digests = repr([node.data_digest for node in nodes]).encode()
    digest = hashlib.blake2b(digests, digest_size=6).hexdigest()
    names = _unique_names(nodes)
    data = replace(
        _blank(experiment, first, 2, (f"nodes {digest}",)),
        columns=columns,
        scale=_common_scale(experiment, nodes),
    )
    federation = Federation(
        data,
        np.broadcast_to(np.zeros((), dtype=np.int64), sum(train_sizes)),
        np.cumsum([0, *train_sizes]),
        {"kind": NODES} | ({"channels": "last"} if experiment.data.channels == "last" else {}),
        names,
        np.zeros(len(owners), dtype=np.int64),
        np.cumsum([0, *(test_sizes > 0)]),
    )
    test = replace(
        _blank(experiment, first, len(owners), names), source=owners, counts=test_sizes[owners]
    )
    return ingredients(experiment, federation, test)


def _unique_names(nodes: list[NodeDescription]) -> tuple[str, ...]:
    """Return the clients' names, with a number where two nodes have the same name.

    A name that already ends like that gets a number too, so that all names differ.
    """
    names = [printable(node.name) or f"client {client}" for client, node in enumerate(nodes)]
    count = Counter(names)
    return tuple(
        name if count[name] == 1 and " (client " not in name else f"{name} (client {client})"
        for client, name in enumerate(names)
    )


def _common_columns(nodes: list[NodeDescription]) -> tuple[str, ...]:
    """Return the columns of the nodes' tables; refuse columns that differ."""
    tables = [(client, node.columns) for client, node in enumerate(nodes) if node.columns]
    first, expected = tables[0] if tables else (0, ())
    for client, columns in tables:
        what = f"The columns of client {client} and client {first} differ."
        facts = [
            f"{verb} {', '.join(map(repr, names[:4]))}{', ...' * (len(names) > 4)}"
            for verb, names in (
                ("lacks", [name for name in expected if name not in columns]),
                ("also has", [name for name in columns if name not in expected]),
            )
            if names
        ]
        if facts:
            raise DataError(
                what,
                got=f"client {client} {' and '.join(facts)}",
                expected=f"the {len(expected)} columns of client {first}",
                do="write the same columns in the same order on every node, or leave out those "
                "that not all have, in the experiment of all: data.drop",
            )
        for place, (name, other) in enumerate(zip(columns, expected, strict=False), start=1):
            if name != other:
                raise DataError(
                    what,
                    got=f"{name!r} as column {place}",
                    expected=f"{other!r}",
                    why="columns are matched by their position, not by their name",
                    do="write the same columns in the same order on every node, or use data.drop",
                )
    return expected


def _common_scale(experiment: Experiment, nodes: list[NodeDescription]) -> ScalePair | None:
    """Return the mean and deviation of the training inputs of all nodes, by their sums.

    Raises:
        DataError: a node standardises otherwise than the server's experiment says.
    """
    is_wanted = experiment.data.normalize == "standardize"
    for client, node in enumerate(nodes):
        if (node.sums is not None) != (is_wanted and _is_scaled(node)):
            raise DataError(
                f"Client {client} standardises its inputs otherwise than the server.",
                expected=f"data.normalize = {experiment.data.normalize!r}",
                do="use the same experiment file at the server and on every node",
            )
    sums = [node.sums.moments() for node in nodes if node.sums is not None]
    if not sums:
        return None
    shape, is_last = nodes[0].inputs[""].shape, experiment.data.channels == "last"
    channels, width = shape[-1 if is_last else 0] if shape else 0, len(sums[0].mean)
    if width != channels:
        raise DataError(
            "The nodes take another axis of their inputs for channels than the server.",
            got=f"sums of {width} channels",
            expected=f"{channels}, the {experiment.data.channels} axis of inputs {list(shape)}",
            do="use the same experiment file, with its data.channels, at the server and nodes",
        )
    scale = reduce(Moments.merged, sums).scale()
    return (scale.of_last_axis(shape) if is_last else scale).recorded()


def _blank(
    experiment: Experiment, like: NodeDescription, count: int, sources: tuple[str, ...]
) -> Dataset:
    floating = DTYPES[experiment.engine.dtype]
    return Dataset(
        x=_zeros(like.inputs, count, floating),
        y=_zeros(like.targets, count, floating),
        classes=like.classes,
        sources=sources,
        label_names=experiment.data.labels,
    )


def _form(node: NodeDescription) -> tuple[object, ...]:
    """Return what has to be the same of the data of all nodes."""
    classes = node.classes if node.labels else bool(node.classes)
    columns = None if node.sums is None else len(node.sums.mean)
    return (node.inputs, node.targets, classes, columns)


def _is_scaled(node: NodeDescription) -> bool:
    """Return whether a node has inputs that can be standardised: one array of numbers."""
    return set(node.inputs) == {""} and not node.inputs[""].whole


def _form_text(node: NodeDescription) -> str:
    forms = [*node.inputs.items(), *node.targets.items()]
    shapes = (f"{name} {list(form.shape)}".strip() for name, form in forms)
    return f"shapes {', '.join(shapes)}, {node.classes} classes"


def _zeros(forms: Mapping[str, Form], count: int, floating: torch.dtype) -> Values:
    """Return zeros of some forms for so many examples, which take no memory."""
    tensors = {
        name: torch.zeros((), dtype=torch.int64 if form.whole else floating).expand(
            count, *form.shape
        )
        for name, form in forms.items()
    }
    return tensors[""] if set(tensors) == {""} else tensors
