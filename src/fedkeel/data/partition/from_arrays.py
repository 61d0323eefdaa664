"""Federations of a user's own arrays, in one call.

    import fedkeel as fk
    clients = fk.dirichlet(x, y, clients=100, alpha=0.1)

Each function checks the arrays, divides them as `partition.divide` does, and returns a
`Federation`. N examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkeel.config import Partition, build
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation import Federation, concatenate_rows
from fedkeel.data.ids import as_ids, distinct
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.user_data import (
    Array,
    Examples,
    GroupIds,
    Reading,
    dataset,
    read_clients,
)
from fedkeel.data.user_arrays import check_in_memory
from fedkeel.errors import DataError, counted, did_you_mean


def iid(
    x: Examples,
    y: Array | None = None,
    clients: int | None = None,
    *,
    target: str | None = None,
    sizes: Literal["equal", "power"] | Sequence[int] = "equal",
    sigma: float = 2.0,
    holdout: float = 0.0,
    holdout_by: GroupIds = None,
    stratify: bool = False,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Divide examples at random among clients; see `partition.iid`.

    Args:
        x: [N, ...] inputs; or, without `y`, one object that holds inputs and labels, see
            `fedkeel.dataset`.
        y: [N] labels from 0.
        clients: number of clients.
        sizes: ``equal``, ``power`` (log-normal), or one number for each client.
        sigma: deviation of the logarithm of the size, for ``power``.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: [N] what belongs together, such as the patient of each example, which is held
            out as a whole; or the name of the column that says so, which is then no input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the partition.
        target: name of the column or key of the labels, where `x` holds them.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    >>> iid([[0.0], [1.0], [2.0]], [0, 1, 0], clients=3).sizes
    array([1, 1, 1])
    """
    more = {"sizes": _sizes(sizes), "sigma": sigma}
    holdout_settings = {"holdout": holdout, "stratify": stratify}
    data = dataset(x, y, target=target, group=holdout_by, classes=classes, tokens=tokens)
    return _divide("iid", data, seed, holdout_settings, clients=clients, **more)


def dirichlet(
    x: Examples,
    y: Array | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    *,
    target: str | None = None,
    min_size: int = 1,
    holdout: float = 0.0,
    holdout_by: GroupIds = None,
    stratify: bool = False,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Divide each class by a Dirichlet draw over clients; see `dirichlet.dirichlet`.

    Args:
        x: [N, ...] inputs; or, without `y`, one object that holds inputs and labels, see
            `fedkeel.dataset`.
        y: [N] labels from 0.
        clients: number of clients.
        alpha: concentration, > 0; small is strongly non-IID.
        min_size: smallest number of examples of a client.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: [N] what belongs together, such as the patient of each example, which is held
            out as a whole; or the name of the column that says so, which is then no input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the partition.
        target: name of the column or key of the labels, where `x` holds them.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.
    """
    more = {"clients": clients, "alpha": alpha, "min_size": min_size}
    holdout_settings = {"holdout": holdout, "stratify": stratify}
    data = dataset(x, y, target=target, group=holdout_by, classes=classes, tokens=tokens)
    return _divide("dirichlet", data, seed, holdout_settings, **more)


def by_classes(
    x: Examples,
    y: Array | None = None,
    clients: int | None = None,
    k: int = 1,
    *,
    target: str | None = None,
    sizes: Literal["equal", "power"] | Sequence[int] = "equal",
    sigma: float = 2.0,
    holdout: float = 0.0,
    holdout_by: GroupIds = None,
    stratify: bool = False,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Give each client examples of k classes; see `partition.classes`.

    Args:
        x: [N, ...] inputs; or, without `y`, one object that holds inputs and labels, see
            `fedkeel.dataset`.
        y: [N] labels from 0.
        clients: number of clients.
        k: number of classes of each client.
        sizes: ``equal``, ``power`` (log-normal), or one number for each client.
        sigma: deviation of the logarithm of a share, for ``power``.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: [N] what belongs together, such as the patient of each example, which is held
            out as a whole; or the name of the column that says so, which is then no input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the partition.
        target: name of the column or key of the labels, where `x` holds them.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    >>> by_classes([[0.0], [1.0], [2.0]], [0, 1, 0], clients=2, k=1).histogram()
    array([[2, 0],
           [0, 1]])
    """
    more = {"sizes": _sizes(sizes), "sigma": sigma, "classes_per_client": k}
    holdout_settings = {"holdout": holdout, "stratify": stratify}
    data = dataset(x, y, target=target, group=holdout_by, classes=classes, tokens=tokens)
    return _divide("classes", data, seed, holdout_settings, clients=clients, **more)


def by_client(
    x: Examples,
    y: Array | None = None,
    client_ids: ArrayLike | None = None,
    *,
    target: str | None = None,
    holdout: float = 0.0,
    holdout_by: GroupIds = None,
    stratify: bool = False,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Make one client of each distinct id.

    Args:
        x: [N, ...] inputs; or, without `y`, one object that holds inputs and labels, see
            `fedkeel.dataset`.
        y: [N] labels from 0.
        client_ids: [N] names or numbers; clients are in their order.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: [N] what belongs together, such as the patient of each example, which is held
            out as a whole; or the name of the column that says so, which is then no input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the hold-out.
        target: name of the column or key of the labels, where `x` holds them.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    Raises:
        DataError: there is not one id for each example, or an id is missing.

    >>> by_client([[0.0], [1.0], [2.0]], [0, 1, 0], ["b", "a", "b"]).names
    ('a', 'b')
    """
    holdout_settings = {"holdout": holdout, "stratify": stratify}
    data = dataset(x, y, target=target, group=holdout_by, classes=classes, tokens=tokens)
    names, client = distinct(as_ids(client_ids, len(data)))
    data = replace(data, client=client, clients=tuple(map(str, names.tolist())))
    return _divide("client", data, seed, holdout_settings)


def from_clients(
    clients: Mapping[str, Examples] | Sequence[Examples],
    *,
    test: Mapping[str, Examples] | None = None,
    target: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] | Mapping[str, Sequence[str]] = (),
    missing: Literal["refuse", "mean", "indicator"] = "refuse",
    normalize: Literal["none", "standardize", "client", "pixels"] = "none",
    channels: Literal["first", "last"] = "first",
    holdout: float = 0.0,
    holdout_by: GroupIds = None,
    stratify: bool = False,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
    missing_targets: Literal["refuse", "leave_out"] = "refuse",
) -> Federation:
    """Join clients that have examples of their own, such as hospitals; they keep their order.

    The examples of a client are a pair of arrays, [N_k, ...] inputs of one shape for all clients
    and [N_k] labels from 0 that mean the same at all; or one object that holds both: a frame of
    pandas or another table, a map-style data set of torch, a Hugging Face data set, a path of a
    file. Tables of all clients have one schema (`Dataset.schema`). A ``.npy`` file that is opened
    by ``numpy.load(file, mmap_mode="r")`` stays on disk; those of several clients are joined in a
    temporary file.

    Args:
        clients: the training examples of each client, by name or in a list.
        test: test examples of some clients, by name. They are the test set of `fedkeel.run`, where
            no other is given, or else what clients hold out is; and, without `holdout`, what each
            client is evaluated on.
        target: name of the column or key of the target, where one object holds inputs and target.
        drop: names of columns that are not inputs.
        categories: columns of tables that hold categories; see `fedkeel.config.Data`.
        missing: what becomes of missing values of tables; see `fedkeel.config.Data`.
        normalize: ``standardize`` brings each column, or each channel, to mean 0 and deviation 1 by
            the training examples of all clients, ``client`` at each client by its own; see
            `fedkeel.config.Data`.
        channels: ``last`` where the channels of the inputs are their last axis, as in series
            [steps, channels]: each then has one mean and one deviation, over all steps.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        holdout_by: what belongs together, such as the patient of each example, which is held out
            as a whole: an array for each client, by name or in a list; one array for all clients
            in their order; or the name of the column that says so, which is then no input.
        stratify: whether `holdout` keeps the share of each class of a client.
        seed: seed of the hold-out.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.
        missing_targets: ``leave_out`` takes quantities [N_k, D] of which some are NaN, not known,
            and leaves those out of losses and metrics; see `fedkeel.config.Data`.

    Raises:
        DataError: there are no clients, one of them has no examples or such as cannot be trained on
            (the message names it), inputs differ in shape, tables do not fit each other.

    >>> from_clients({"north": ([[0.0], [1.0]], [0, 1]), "south": ([[2.0]], [0])}).sizes
    array([2, 1])
    """
    if not isinstance(clients, (Mapping, list, tuple)):
        raise DataError(
            "These are not clients.",
            got=f"an object of type {type(clients).__name__}",
            expected="the examples of each client, by name or in a list, such as pairs (x, y)",
        )
    named = _by_name(clients)
    if not named:
        raise DataError("There are no clients.", expected="a pair (x, y) for each client")
    tests = {} if test is None else _by_name(test)
    unknown = [name for name in tests if name not in named]
    if unknown:
        raise DataError(
            f"'test' names a client {unknown[0]!r} that trains on nothing.",
            do=did_you_mean(unknown[0], named),
        )
    column = holdout_by if isinstance(holdout_by, str) else None
    read = target, drop, categories, missing, normalize, classes, tokens, column, channels
    reading = Reading(*read, missing_targets)
    data, count = read_clients(named, tests, reading)
    if holdout_by is not None and column is None:
        data = replace(data, grouped_by="group", group=_groups(holdout_by, named, data, count))
    holdout_settings = {"holdout": holdout, "stratify": stratify}
    made = _divide("client", data.part(slice(None, count)), seed, holdout_settings)
    if normalize != "none":
        made = replace(made, how={**made.how, "normalize": normalize})
    if channels == "last":
        made = replace(made, how={**made.how, "channels": channels})
    return made if not tests else _with_test(made, data, data.part(slice(count, None)))


def _groups(
    holdout_by: GroupIds, clients: Mapping[str, Examples], data: Dataset, count: int
) -> Ints:
    """Return [N] the groups of all examples; test examples name none: -1.

    Args:
        holdout_by: the groups of each client's training examples, by its name or in a list; or
            of all.
        clients: the clients by name.
        data: the training examples, and then the test examples.
        count: number of training examples.
    """
    group = np.full(len(data), -1, dtype=np.int64)
    sizes = np.bincount(data.client_ids[:count], minlength=len(clients)).tolist()
    names = list(clients)
    if isinstance(holdout_by, Mapping):
        named = {str(name): ids for name, ids in holdout_by.items()}
        odd = sorted(set(named) ^ set(names))
        if odd:
            raise DataError(
                f"holdout_by and the clients do not have the same names: {odd[0]!r}.",
                expected="the groups of each client, by its name",
                do=did_you_mean(odd[0], named if odd[0] in names else names),
            )
        lists = [named[name] for name in names]
    elif isinstance(holdout_by, (list, tuple)) and all(map(_is_array, holdout_by)):
        lists = list(holdout_by)
        if len(lists) != len(names):
            raise DataError(
                "holdout_by does not have one array for each client.",
                got=f"{counted(len(lists), 'array')} for {counted(len(names), 'client')}",
            )
    else:
        group[:count] = distinct(as_ids(holdout_by, count, "group"))[1]
        return group
    ids = [
        as_ids(of_client, size, f"group of client {name!r}").astype(object)
        for of_client, size, name in zip(lists, sizes, names, strict=True)
    ]
    numbers: dict[object, int] = {}
    group[:count] = [numbers.setdefault(value, len(numbers)) for part in ids for value in part]
    return group


def _is_array(value: object) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes))


def _by_name(clients: Mapping[str, Examples] | Sequence[Examples]) -> dict[str, Examples]:
    """Return the examples of clients by their names, which are texts."""
    pairs = clients.items() if isinstance(clients, Mapping) else enumerate(clients)
    texts = [(str(name), examples) for name, examples in pairs]
    twice = next((k for k, n in Counter(name for name, _ in texts).items() if n > 1), None)
    if twice is not None:
        raise DataError(f"Two clients are called {twice!r}.", do="give each a name of its own")
    return dict(texts)


def _with_test(made: Federation, data: Dataset, test: Dataset) -> Federation:
    """Return a federation whose clients have test examples.

    Args:
        made: the federation of the training examples.
        data: the training examples, and then the test examples.
        test: the test examples.
    """
    owners, source = np.unique(test.client_ids, return_inverse=True)
    names = tuple(test.clients[k] for k in owners)
    made = replace(made, test=replace(test, sources=names, source=source.astype(np.int64)))
    if made.holdout_rows is not None:
        return made
    parts = [len(made.data) + np.flatnonzero(test.client_ids == k) for k in range(len(made))]
    rows, offsets = concatenate_rows(parts)
    says = f"{made.how['says']}, {len(test)} more held out"
    how = {**made.how, "held_out": len(test), "says": says}
    return replace(made, data=data, how=how, holdout_rows=rows, holdout_offsets=offsets)


def _divide(
    kind: str,
    data: Dataset,
    seed: int,
    holdout_settings: Mapping[str, Any],
    **more: Any,  # noqa: ANN401 - settings of the partition, checked by `build`
) -> Federation:
    values = {"kind": kind, "seed": seed, **holdout_settings, **more}
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
    return divide(data, build(Partition, plain, kind), seed)


def _sizes(sizes: Literal["equal", "power"] | Sequence[int]) -> str | tuple[int, ...]:
    if isinstance(sizes, str):
        return sizes
    check_in_memory(sizes, "The sizes of the clients")
    return tuple(np.asarray(sizes).tolist())
