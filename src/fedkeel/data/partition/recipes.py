"""Who owns which examples: published recipes for dividing a data set among clients.

Every recipe is a function from labels to one array of row numbers for each client. It is a pure
function of its arguments: the same seed gives the same partition. No row goes to two clients.
`divide` applies the recipe that the settings name. C clients, N examples, Y classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedkeel.base.rng import generator
from fedkeel.base.values import shape_text
from fedkeel.config import Partition
from fedkeel.data.dataset import Dataset, Ints
from fedkeel.data.federation import Federation, federation, federation_of_rows
from fedkeel.data.partition.common import (
    Lists,
    Sizes,
    check,
    draw_sizes,
    given_sizes,
    group,
    members,
    shares,
)
from fedkeel.data.partition.dirichlet import (
    dirichlet,
    dirichlet_attempts,
    dirichlet_gradma,
    dirichlet_prior,
)
from fedkeel.errors import DataError, counted

__all__ = [
    "by_source_class",
    "by_value",
    "classes",
    "dirichlet",
    "dirichlet_gradma",
    "dirichlet_prior",
    "divide",
    "iid",
]

_FIRST = 5  # examples of each class that FedProx's recipe gives to each of its holders


def iid(n: int, clients: int, seed: int = 0, sizes: Sizes = "equal", sigma: float = 2.0) -> Lists:
    """Divide N rows at random, whatever their labels.

    Args:
        n: N, the number of rows.
        clients: C.
        seed: seed, >= 0.
        sizes: ``equal``: sizes differ by at most one; ``power``: log-normal sizes, at least one
            row each, see `split.draw_sizes`; or C numbers, whose sum may be less than N.
        sigma: deviation of the logarithm of the size, for ``power``.

    Returns:
        C arrays of ascending rows; all rows are assigned except by numbers of a smaller sum.

    >>> [len(rows) for rows in iid(10, 3)]
    [4, 3, 3]
    """
    random = generator(seed, "partition")
    counts = draw_sizes(n, clients, sizes, sigma, random)
    owner = np.full(n, -1, dtype=np.int64)
    owner[random.permutation(n)[: counts.sum()]] = np.repeat(np.arange(clients), counts)
    return group(owner, clients)


def classes(
    labels: ArrayLike,
    clients: int,
    k: int,
    sizes: Sizes = "equal",
    sigma: float = 2.0,
    seed: int = 0,
) -> Lists:
    """Give each client examples of exactly k classes, neighbours on the ring of classes.

    Client u holds the k classes from u mod Y on; with fewer clients than classes, from
    floor(u Y / C) on. Y counts the classes that occur, and every one of them is held. Each class's
    rows are shuffled and divided among its holders, in order:

    - ``equal``: numbers differ by at most one, every row is assigned. With k = 1 and C = Y, client
      c owns all of class c.
    - ``power``: 5 rows for each holder, or as many as there are for all; of the r rows then left,
      floor(q r) for a holder with share q, log-normal(0, sigma) normalised over the holders.
      Rows lost to rounding down go to nobody.
    - C numbers: client u takes sizes[u] // k of each of its classes, and one more of its first
      sizes[u] mod k. Rows not asked for go to nobody.

    Source
        k = 1, C = Y: FedGC's one-class clients. k = 2, ``power``: Li et al., Federated Optimization
        in Heterogeneous Networks (FedProx, MLSys 2020), ``data/mnist/generate_niid.py`` of the
        public code, there with 1,000 clients.

    Args:
        labels: [N] labels, >= 0.
        clients: C.
        k: number of classes of each client, 1..Y.
        sizes: see above.
        sigma: deviation of the logarithm of a holder's share, > 0; FedProx has 2.
        seed: seed, >= 0.

    Deviations: FedProx takes rows in stored order, here they are drawn; it drops an extra that
    uses up the class's last row, here it is given; it needs 5 rows of a class for each holder. Its
    90:10 split of each client's rows is left to the hold-out.

    Raises:
        DataError: k is out of range, C k < Y, or a class has too few rows for its holders.

    >>> [rows.tolist() for rows in classes([0, 1, 1, 0, 2], 3, 1)]
    [[0, 3], [1, 2], [4]]
    """
    y, count = check(labels, None, clients)
    present = [rows for rows in members(y, count) if len(rows)]
    classes_of_clients = _ring(clients, len(present), k)  # [C, k]
    return group(
        _deal(y, present, classes_of_clients, sizes, sigma, generator(seed, "partition")), clients
    )


def _deal(
    y: Ints, present: Lists, held: Ints, sizes: Sizes, sigma: float, random: Generator
) -> Ints:
    """Return [N] the owner of each row, when each class is divided among those that hold it."""
    clients, k = held.shape
    requested = None if isinstance(sizes, str) else _requested(len(y), clients, k, sizes)
    owner = np.full(len(y), -1, dtype=np.int64)
    for rank, places in enumerate(group(held.ravel(), len(present))):
        rows = random.permutation(present[rank])
        label = int(y[rows[0]])
        if requested is None:
            quota = _quota(len(rows), len(places), sizes, sigma, random, label)
        else:
            quota = _demand(requested[places], len(rows), label)
        owner[rows[: quota.sum()]] = np.repeat(places // k, quota)
    return owner


def _ring(clients: int, count: int, k: int) -> Ints:
    """Return [C, k] the classes that each client holds."""
    if not 1 <= k <= count:
        raise DataError(
            "That number of classes for each client cannot be given.",
            got=f"{k} classes for each client",
            expected=f"1..{count}, the number of classes that occur",
        )
    if clients * k < count:
        raise DataError(
            "Some classes would belong to nobody.",
            got=f"{clients} clients of {k} of {count} classes",
            do=f"use at least {-(-count // k)} clients or {-(-count // clients)} classes for each",
        )
    first = np.arange(clients)
    first = first % count if clients >= count else first * count // clients
    return (first[:, None] + np.arange(k)) % count


def _requested(n: int, clients: int, k: int, sizes: Sequence[int]) -> Ints:
    """Return [C k] how many rows each client asks of each of its classes."""
    total = given_sizes(n, clients, sizes)[:, None]
    return (total // k + (np.arange(k) < total % k)).ravel()


def _quota(
    n: int, holders: int, sizes: object, sigma: float, random: Generator, label: int
) -> Ints:
    """Return how many of a class's n rows each of its holders gets."""
    if holders > n:
        raise DataError(
            f"Class {label} has fewer examples than clients that should hold it.",
            got=f"{n} examples for {holders} clients",
            do="use fewer clients or fewer classes for each client",
        )
    if sizes == "equal":
        return draw_sizes(n, holders, "equal", sigma, random)
    if sizes != "power":
        raise DataError("sizes cannot be used.", got=sizes, expected="equal, power, or numbers")
    first = min(_FIRST, n // holders)
    rest = n - first * holders
    return first + np.floor(shares(holders, sigma, random) * rest).astype(np.int64)


def _demand(requested: Ints, n: int, label: int) -> Ints:
    if requested.sum() > n or requested.min() < 1:
        raise DataError(
            f"The sizes given for the clients do not fit class {label}.",
            got=f"{requested.sum()} examples asked for, "
            f"from {requested.min()} to {requested.max()} a client",
            expected=f"at least 1 for each of {len(requested)} clients, at most {n} in all",
            do="use smaller sizes, or at least one example for each class of a client",
        )
    return requested


def by_value(ids: Ints, names: Sequence[str]) -> tuple[Ints, Ints, tuple[str, ...]]:
    """Make one client of each value that occurs, in order.

    Args:
        ids: [N] value of each row, an index into `names`.
        names: name of each value; values without rows are left out.

    Returns:
        [N] the rows of all clients, one client after the other and ascending for each; [C + 1]
        where each client's begin; and the clients' names.

    >>> rows, offsets, names = by_value(np.array([2, 0, 2]), ["a", "b", "c"])
    >>> rows.tolist(), offsets.tolist(), names
    ([1, 0, 2], [0, 1, 3], ('a', 'c'))
    """
    sizes = np.bincount(ids, minlength=len(names))
    kept = np.flatnonzero(sizes)
    rows = np.argsort(ids, kind="stable").astype(np.int64, copy=False)
    used = tuple(names) if len(kept) == len(names) else tuple(names[k] for k in kept.tolist())
    offsets = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(sizes[kept], out=offsets[1:])
    return rows, offsets, used


def by_source_class(data: Dataset) -> tuple[Ints, Ints, tuple[str, ...]]:
    """Make one client of each class of each source, source by source; names are "source/class"."""
    known = data.label_names or tuple(str(label) for label in range(data.classes))
    names = [f"{source}/{label}" for source in data.sources for label in known]
    return by_value(data.source_ids * data.classes + data.labels, names)


def divide(data: Dataset, settings: Partition, seed: int) -> Federation:
    """Divide a training set among clients as the settings say.

    Args:
        data: the training set.
        settings: kind and parameters.
        seed: the run's seed, used where the settings have none.

    Returns:
        The federation. Its `how` holds kind, clients, seed, the settings that mattered, attempts
        (for ``dirichlet``), examples, unassigned, holdout, held_out, and `says`, all in one line;
        and, where they are set, holdout_by and stratify.

    Raises:
        DataError: the data cannot be divided so, or a client would have no examples.
    """
    seed = seed if settings.seed is None else settings.seed
    _check_labels(data, settings.kind)
    used: dict[str, Any] = {}
    if settings.kind in ("source", "source_class", "client"):
        rows, offsets, names = _of_the_data(data, settings.kind)
        clients = federation_of_rows(data, rows, offsets, names=names)
    else:
        lists, used = _drawn(data, settings, seed)
        clients = federation(data, lists)
    unassigned = len(data) - len(clients.rows)
    if settings.holdout > 0:
        clients = clients.hold_out(settings.holdout, seed, settings.stratify)
    held = 0 if clients.holdout_rows is None else len(clients.holdout_rows)
    how = {
        "kind": settings.kind,
        "clients": len(clients),
        "seed": seed,
        **used,
        "examples": len(data),
        "unassigned": unassigned,
        "holdout": settings.holdout,
        "held_out": held,
        **({"holdout_by": data.grouped_by} if data.grouped_by else {}),
        **({"stratify": True} if settings.stratify else {}),
    }
    return replace(clients, how={**how, "says": _say(clients, how)})


def _check_labels(data: Dataset, kind: str) -> None:
    if not (data.has_labels or kind in ("source", "client", "iid")):
        raise DataError(
            f"Partition {kind!r} divides examples by their labels, and these have none.",
            got=f"targets {shape_text(data.y)}",
            do="take 'iid', 'client' or 'source', or fk.federation(data, rows_of_each_client)",
        )


def _of_the_data(data: Dataset, kind: str) -> tuple[Ints, Ints, tuple[str, ...]]:
    """Return rows, offsets and names of clients that the data themselves tell, see `by_value`."""
    if kind == "source":
        return by_value(data.source_ids, data.sources)
    if kind == "source_class":
        return by_source_class(data)
    if data.client is None:
        raise DataError(
            "The partition asks for the data's own clients, but the data names none.",
            got='partition.kind = "client"',
            do="set data.client to the name of the client column, or choose another kind",
        )
    return by_value(data.client, data.clients)


def _drawn(data: Dataset, settings: Partition, seed: int) -> tuple[Lists, dict[str, Any]]:
    """Return the rows of each client, drawn as the settings say, and the settings that mattered."""
    count, wanted, alpha = data.classes, settings.clients, settings.alpha
    given: dict[str, Any] = {"sizes": settings.sizes, "sigma": settings.sigma}
    sized = given if settings.sizes == "power" else {"sizes": "equal"}
    sized = {"sizes": "given"} if isinstance(settings.sizes, tuple) else sized
    if wanted is None:
        raise DataError(f"Partition {settings.kind!r} needs the number of clients.")
    if settings.kind == "iid":
        return iid(len(data), wanted, seed, **given), sized
    y = data.labels
    if settings.kind == "classes":
        k = settings.classes_per_client
        return classes(y, wanted, k, seed=seed, **given), {"classes_per_client": k, **sized}
    if alpha is None:
        raise DataError(f"Partition {settings.kind!r} needs alpha.", expected="alpha > 0")
    if settings.kind == "dirichlet":
        min_size = settings.min_size
        lists, took = dirichlet_attempts(y, wanted, alpha, min_size, seed, classes=count)
        return lists, {"alpha": alpha, "min_size": min_size, "attempts": took}
    if settings.kind == "dirichlet_gradma":
        return dirichlet_gradma(y, wanted, alpha, seed, classes=count), {"alpha": alpha}
    lists = dirichlet_prior(y, wanted, alpha, seed=seed, classes=count, **given)
    return lists, {"alpha": alpha, **sized}


def _say(made: Federation, how: dict[str, Any]) -> str:
    """Return in words what the partition is."""
    sizes = made.sizes
    spread = made.classes_of_clients()
    kind = [str(how["kind"])]
    if "alpha" in how:
        kind.append(f"alpha {how['alpha']:g}")
    if how.get("sizes") == "power":
        kind.append(f"log-normal sizes (sigma {how['sigma']:g})")
    words = f"{', '.join(kind)}: {len(made)} client{'s' * (len(made) > 1)} of "
    words += f"{_range(sizes)} example{'s' * bool(sizes.max() > 1)}"
    words += f" (median {np.median(sizes):g})" if sizes.min() < sizes.max() else ""
    words += f", {_range(spread)} class{'es' * bool(spread.max() > 1)} each"
    held_out = "held out" + (" by class" if "stratify" in how else "")
    if made.data.group is not None and made.holdout_rows is not None:
        held_out += _of_groups(made.data.group[made.holdout_rows], how["holdout_by"])
    for count, what in ((how["unassigned"], "unassigned"), (how["held_out"], held_out)):
        words += f", {count} more {what}" if count else ""
    return words


def _of_groups(group: Ints, name: str) -> str:
    return f", the whole of {counted(len(np.unique(group)), 'value')} of {name!r}"


def _range(values: Ints) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}"
