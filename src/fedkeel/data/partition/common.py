"""What the recipes that divide data share: checks, sizes, and grouping rows by their owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.random import Generator, RandomState
from numpy.typing import ArrayLike, NDArray

from fedkeel.data.dataset import Ints
from fedkeel.data.user_arrays import check_in_memory
from fedkeel.errors import DataError, counted

Floats = NDArray[np.float64]
Lists = list[Ints]
Sizes = Literal["equal", "power"] | Sequence[int]


LARGEST_SIGMA = 1e6
"""With a larger deviation of the logarithm one client would still have everything."""


def check(
    labels: ArrayLike, classes: int | None, clients: int, alpha: float | None = None
) -> tuple[Ints, int]:
    """Return ([N] labels, Y), and refuse what no recipe can use.

    Raises:
        DataError: there are no labels, fewer than one client, alpha is not > 0, or a label is not
            in 0..Y-1.
    """
    check_in_memory(labels, "The labels")
    raw = np.asarray(labels)
    if raw.ndim != 1 or len(raw) == 0 or raw.dtype.kind not in "iub":
        raise DataError(
            "These labels cannot be divided.",
            got=f"{raw.dtype} of shape {raw.shape}",
            expected="whole numbers of shape [N], N >= 1",
        )
    y = raw.astype(np.int64)
    check_clients(len(y), clients)
    if alpha is not None and not 0.0 < alpha < np.inf:
        raise DataError("alpha cannot be used.", got=alpha, expected="a number > 0")
    count = int(y.max()) + 1 if classes is None else classes
    if y.min() < 0 or y.max() >= count:
        bad = y.min() if y.min() < 0 else y.max()
        raise DataError("A label is out of range.", got=bad, expected=f"labels 0..{count - 1}")
    return y, count


def check_clients(n: int, clients: int) -> None:
    """Refuse a number of clients that `n` examples cannot feed.

    Raises:
        DataError: fewer than one client, or more clients than examples.
    """
    if not 1 <= clients <= n:
        raise DataError(
            "That number of clients cannot be made.",
            got=f"{counted(clients, 'client')} for {counted(n, 'example')}",
            expected=f"1..{n} clients, so that each has an example",
        )


def legacy(seed: int) -> RandomState:
    """Return NumPy's legacy generator, which published recipes were drawn with.

    Raises:
        DataError: the seed is out of its range.
    """
    if not 0 <= seed < 2**32:
        raise DataError(
            "That seed cannot be used by this partition.",
            got=seed,
            expected="0..4294967295",
            why="it repeats public code that seeds NumPy's legacy generator",
        )
    return RandomState(seed)


def draw_sizes(n: int, clients: int, sizes: Sizes, sigma: float, random: Generator) -> Ints:
    """Return the number of examples of each client, each >= 1.

    ``equal``: N // C, and one more for the first N mod C. ``power``: one each, and the other N - C
    in proportion to exp(sigma z), z standard normal, rounded by largest remainder, so that the sum
    is N. A sequence is taken as it stands.

    Raises:
        DataError: fewer than one client, more clients than examples, or numbers that do not fit.

    >>> draw_sizes(10, 3, "equal", 1.0, np.random.default_rng(0)).tolist()
    [4, 3, 3]
    """
    check_clients(n, clients)
    if not isinstance(sizes, str):
        return given_sizes(n, clients, sizes)
    if sizes == "equal":
        return n // clients + (np.arange(clients) < n % clients).astype(np.int64)
    if sizes != "power":
        raise DataError("sizes cannot be used.", got=sizes, expected="equal, power, or numbers")
    exact = shares(clients, sigma, random) * (n - clients)
    counts = np.floor(exact).astype(np.int64)
    missing = n - clients - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return 1 + counts


def shares(count: int, sigma: float, random: Generator) -> Floats:
    """Return log-normal shares: [count], in proportion to exp(sigma z), of sum 1.

    Raises:
        DataError: sigma is too large, or not > 0.
    """
    if not 0.0 < sigma <= LARGEST_SIGMA:
        expected = f"more than 0, at most {LARGEST_SIGMA:g}"
        raise DataError("sigma cannot be used.", got=sigma, expected=expected)
    drawn = sigma * random.standard_normal(count)
    weight: Floats = np.exp(drawn - drawn.max())  # no overflow, whatever sigma
    weight /= weight.sum()
    return weight


def given_sizes(n: int, clients: int, sizes: Sequence[int]) -> Ints:
    """Return the sizes given for the clients, or refuse them (DataError)."""
    check_in_memory(sizes, "The sizes of the clients")
    counts = np.asarray(sizes)
    is_whole = counts.dtype.kind in "iu" and counts.shape == (clients,)
    # none beyond n is summed: the sum would go beyond 64 bits
    if not is_whole or counts.min() < 1 or counts.max() > n or counts.sum() > n:
        numbers = (
            f"{counts.size} sizes from {counts.min()} to {counts.max()}" if counts.size else "0"
        )
        raise DataError(
            "The sizes given for the clients do not fit.",
            got=f"{numbers}, {sum(counts.ravel().tolist())} in all",
            expected=f"{clients} whole numbers >= 1, at most {n} in all",
        )
    return counts.astype(np.int64)


def members(labels: Ints, classes: int) -> Lists:
    """Return the rows of each class, ascending.

    >>> [rows.tolist() for rows in members(np.array([1, 0, 1]), 3)]
    [[1], [0, 2], []]
    """
    return group(labels, classes)


def group(owner: Ints, count: int, rows: Ints | None = None) -> Lists:
    """Return the entries of `rows` of each owner, in their order; owner -1 means: of no client.

    Args:
        owner: [N] owner of each entry, -1..count-1.
        count: number of owners.
        rows: [N] entries; 0..N-1 where they are not given.

    >>> [part.tolist() for part in group(np.array([1, -1, 0, 1]), 2)]
    [[2], [0, 3]]
    """
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    sizes = np.bincount(owner[order], minlength=count)
    ends = np.cumsum(sizes)
    entries = order if rows is None else rows[order]
    return [
        entries[start:end]
        for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    ]


def rows_by_share(share: Floats, n: int) -> Ints:
    """Return the number of rows of each client, where n rows are divided at floor(cumsum(share) n).

    >>> rows_by_share(np.array([0.5, 0.25, 0.25]), 7).tolist()
    [3, 2, 2]
    """
    ends = (np.cumsum(share) * n).astype(np.int64)
    ends[-1] = n
    return np.diff(ends, prepend=0)
