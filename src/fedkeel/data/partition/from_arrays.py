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
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedkeel.config import Partition, build
from fedkeel.data.dataset import Dataset, Federation, dataset
from fedkeel.data.partition.recipes import divide
from fedkeel.data.user_arrays import check_in_memory
from fedkeel.data.values import joined
from fedkeel.errors import DataError

Array = ArrayLike | Tensor


def iid(
    x: Array,
    y: Array,
    clients: int,
    *,
    sizes: Literal["equal", "power"] | Sequence[int] = "equal",
    sigma: float = 2.0,
    holdout: float = 0.0,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Divide examples at random among clients; see `partition.iid`.

    Args:
        x: [N, ...] inputs.
        y: [N] labels from 0.
        clients: number of clients.
        sizes: ``equal``, ``power`` (log-normal), or one number for each client.
        sigma: deviation of the logarithm of the size, for ``power``.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        seed: seed of the partition.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    >>> iid([[0.0], [1.0], [2.0]], [0, 1, 0], clients=3).sizes
    array([1, 1, 1])
    """
    more = {"sizes": _sizes(sizes), "sigma": sigma}
    data = dataset(x, y, classes=classes, tokens=tokens)
    return _divide("iid", data, seed, holdout, clients=clients, **more)


def dirichlet(
    x: Array,
    y: Array,
    clients: int,
    alpha: float,
    *,
    min_size: int = 1,
    holdout: float = 0.0,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Divide each class by a Dirichlet draw over clients; see `dirichlet.dirichlet`.

    Args:
        x: [N, ...] inputs.
        y: [N] labels from 0.
        clients: number of clients.
        alpha: concentration, > 0; small is strongly non-IID.
        min_size: smallest number of examples of a client.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        seed: seed of the partition.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.
    """
    more = {"clients": clients, "alpha": alpha, "min_size": min_size}
    data = dataset(x, y, classes=classes, tokens=tokens)
    return _divide("dirichlet", data, seed, holdout, **more)


def by_classes(
    x: Array,
    y: Array,
    clients: int,
    k: int,
    *,
    sizes: Literal["equal", "power"] | Sequence[int] = "equal",
    sigma: float = 2.0,
    holdout: float = 0.0,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Give each client examples of k classes; see `partition.classes`.

    Args:
        x: [N, ...] inputs.
        y: [N] labels from 0.
        clients: number of clients.
        k: number of classes of each client.
        sizes: ``equal``, ``power`` (log-normal), or one number for each client.
        sigma: deviation of the logarithm of a share, for ``power``.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        seed: seed of the partition.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    >>> by_classes([[0.0], [1.0], [2.0]], [0, 1, 0], clients=2, k=1).histogram()
    array([[2, 0],
           [0, 1]])
    """
    more = {"sizes": _sizes(sizes), "sigma": sigma, "classes_per_client": k}
    data = dataset(x, y, classes=classes, tokens=tokens)
    return _divide("classes", data, seed, holdout, clients=clients, **more)


def by_client(
    x: Array,
    y: Array,
    client_ids: ArrayLike,
    *,
    holdout: float = 0.0,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Make one client of each distinct id.

    Args:
        x: [N, ...] inputs.
        y: [N] labels from 0.
        client_ids: [N] names or numbers; clients are in their order.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        seed: seed of the hold-out.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    Raises:
        DataError: there is not one id for each example, or an id is missing.

    >>> by_client([[0.0], [1.0], [2.0]], [0, 1, 0], ["b", "a", "b"]).names
    ('a', 'b')
    """
    data = dataset(x, y, classes=classes, tokens=tokens)
    ids = _ids(client_ids, len(data))
    names, client = np.unique(ids, return_inverse=True)
    named = tuple(str(name) for name in names)
    data = replace(data, client=client.astype(np.int64), clients=named)
    return _divide("client", data, seed, holdout)


def from_clients(
    clients: Mapping[str, tuple[Array, Array]] | Sequence[tuple[Array, Array]],
    *,
    holdout: float = 0.0,
    seed: int = 0,
    classes: int | None = None,
    tokens: bool = False,
) -> Federation:
    """Join clients that have arrays of their own, such as hospitals; they keep their order.

    Args:
        clients: of each client, by name or in a list, a pair: [N_k, ...] inputs, of one shape for
            all clients, and [N_k] labels from 0, which mean the same at all, or other targets.
        holdout: share of each client's examples kept aside to evaluate it on, in [0, 1).
        seed: seed of the hold-out.
        classes: number of classes; the largest label + 1 where it is not given.
        tokens: whether inputs are whole numbers >= 0 that the model looks up.

    Raises:
        DataError: there are no clients, one of them is no pair, has no examples or others than
            can be trained on (the message names it), or inputs differ in shape.

    >>> from_clients({"north": ([[0.0], [1.0]], [0, 1]), "south": ([[2.0]], [0])}).sizes
    array([2, 1])
    """
    if not isinstance(clients, (Mapping, list, tuple)):
        raise DataError(
            "These are no clients.",
            got=f"an object of type {type(clients).__name__}",
            expected="a pair (x, y) of each client, by name or in a list",
        )
    named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    twice = next((k for k, n in Counter(map(str, named)).items() if n > 1), None)
    if twice is not None:
        raise DataError(f"Two clients are called {twice!r}.", do="give each a name of its own")
    if not named:
        raise DataError("There are no clients.", expected="a pair (x, y) for each client")
    parts = {
        name: _client_data(f"client {name}", pair, tokens, classes) for name, pair in named.items()
    }
    first, *_ = parts
    shape = parts[first].shape
    for name, part in parts.items():
        if part.shape != shape:
            raise DataError(
                f"client {name}: inputs have another shape than those of client {first}.",
                got=f"{part.shape} for one example",
                expected=f"{shape}",
            )
    x, y = (joined([getattr(part, of) for part in parts.values()]) for of in ("x", "y"))
    index = np.repeat(np.arange(len(parts)), [len(part) for part in parts.values()])
    data = dataset(
        x, y, classes=classes, tokens=tokens, client=index, clients=tuple(map(str, parts))
    )
    return _divide("client", data, seed, holdout)


def _client_data(
    client: str, pair: tuple[Array, Array], tokens: bool, classes: int | None
) -> Dataset:
    """Return the examples of one client."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(
            f"{client} has no pair of arrays.",
            got=f"an object of type {type(pair).__name__}",
            expected="a pair (x, y) of inputs and targets",
            do="of a Dataset give (data.x, data.y)" if isinstance(pair, Dataset) else None,
        )
    return dataset(*pair, name=client, tokens=tokens, classes=0 if classes == 0 else None)


def _ids(client_ids: ArrayLike, n: int) -> NDArray[Any]:
    """Return [N] ids of one type that can be sorted, none of them missing."""
    check_in_memory(client_ids, "The client ids")
    ids = np.asarray(client_ids, dtype=object)
    if isinstance(client_ids, np.ma.MaskedArray):
        ids = ids.copy()
        ids[np.ma.getmaskarray(client_ids)] = None
    if ids.shape != (n,):
        raise DataError(
            "There must be one client id for each example.",
            got=f"client ids of shape {ids.shape}",
            expected=f"({n},)",
        )
    values = [v.item() if isinstance(v, np.integer) else v for v in ids.tolist()]
    for row, value in enumerate(values):
        if value is None or value != value:  # NaN is not itself
            raise DataError(
                "A client id is missing.",
                got=f"{value} in row {row} (counted from 0)",
                do="name a client for every example",
            )
    array = np.array(values)
    if array.dtype.kind == "f" and any(a != b for a, b in zip(values, array.tolist(), strict=True)):
        return np.array(values, dtype=object)  # floats would make one of several large numbers
    return array


def _divide(
    kind: str,
    data: Dataset,
    seed: int,
    holdout: float,
    **more: Any,  # noqa: ANN401 - settings of the partition, checked by `build`
) -> Federation:
    values = {"kind": kind, "holdout": holdout, "seed": seed, **more}
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
    return divide(data, build(Partition, plain, kind), seed)


def _sizes(sizes: Literal["equal", "power"] | Sequence[int]) -> str | tuple[int, ...]:
    if isinstance(sizes, str):
        return sizes
    check_in_memory(sizes, "The sizes of the clients")
    return tuple(np.asarray(sizes).tolist())
