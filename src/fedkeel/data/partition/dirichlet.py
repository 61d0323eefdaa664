"""Three ways to divide data by Dirichlet draws, as published; see `partition` for the others.

They share a name in the literature and differ in who is drawn for what: `dirichlet` and
`dirichlet_gradma` draw shares of each class over clients, `dirichlet_prior` draws a mixture of
classes for each client. C clients, N examples, Y classes.
"""

from __future__ import annotations

import warnings
from time import monotonic

import numpy as np
from numpy.random import Generator, RandomState
from numpy.typing import ArrayLike, NDArray

from fedkeel.base.rng import generator
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import (
    Floats,
    Lists,
    Sizes,
    check,
    draw_sizes,
    group,
    legacy,
    members,
    rows_by_share,
)
from fedkeel.errors import DataError, SlowWork, counted

_ATTEMPTS = 10_000
"""Attempts of `dirichlet` before it gives up, where these are quick."""

_WORK = 10**9
"""Work of all attempts together, in shuffled rows: about a minute on one core."""

_PATIENCE = 10.0
"""Seconds after which there is a word about the attempts."""


def dirichlet(
    labels: ArrayLike,
    clients: int,
    alpha: float,
    min_size: int = 1,
    seed: int = 0,
    *,
    classes: int | None = None,
    attempts: int | None = None,
) -> Lists:
    """Divide each class by a Dirichlet draw over clients, and try until no client is too small.

    For each class in order: shuffle its rows, draw p ~ Dir(alpha 1_C), set p_j = 0 for clients that
    already own N / C rows or more, renormalise, cut the rows at floor(cumsum(p) n_class). The whole
    attempt is repeated until the smallest client has `min_size` rows. Then each client's rows are
    shuffled.

    Source
        ``hetero_dir_partition`` of FedLab; the same recipe as in Yurochkin et al., Bayesian
        Nonparametric Federated Learning (ICML 2019), Wang et al., Federated Learning with Matched
        Averaging (ICLR 2020), and NIID-Bench. Row for row equal to FedLab's function after
        ``numpy.random.seed(seed)``.

    Args:
        labels: [N] labels 0..Y-1.
        clients: C.
        alpha: concentration, > 0.
        min_size: smallest number of rows of a client, >= 1 (FedLab's own default is Y).
        seed: seed, 0..2^32 - 1.
        classes: Y; the largest label + 1 where it is not given. A class without examples takes a
            draw all the same.
        attempts: give up after so many; None takes 10,000, or as many as take a minute or so: where
            there are many rows, or many classes and clients, these are fewer, down to 10.

    Deviations: FedLab repeats for ever; this gives up. Where all clients that may still receive
    rows have a share of exactly 0 (alpha below 0.01 or so), FedLab divides by 0 and hands the class
    to the last client; here the attempt counts as failed.

    Raises:
        DataError: no partition with this minimum size can exist, or none was found.
    """
    return dirichlet_attempts(
        labels, clients, alpha, min_size, seed, classes=classes, attempts=attempts
    )[0]


def dirichlet_attempts(
    labels: ArrayLike,
    clients: int,
    alpha: float,
    min_size: int = 1,
    seed: int = 0,
    *,
    classes: int | None = None,
    attempts: int | None = None,
) -> tuple[Lists, int]:
    """Return the partition of `dirichlet` and the number of attempts that it took."""
    y, count = check(labels, classes, clients, alpha)
    if min_size * clients > len(y):
        raise DataError(
            "There are not enough examples for that minimum size.",
            got=f"min_size {min_size} for {clients} clients of {len(y)} examples",
            expected=f"at most min_size {len(y) // clients}",
            do="use a smaller min_size or fewer clients",
        )
    work = len(y) + 2 * count * (clients + 1000)  # a draw for a client is two rows' work
    limit = attempts or min(_ATTEMPTS, max(10, _WORK // work))
    random, each, best = legacy(seed), members(y, count), 0
    began, is_silent = monotonic(), True
    for attempt in range(1, limit + 1):
        if is_silent and monotonic() - began > _PATIENCE:
            is_silent = False
            warnings.warn(
                f"dirichlet is at attempt {attempt:,} of at most {limit:,} to give every client "
                f"{counted(min_size, 'example')}; the smallest one had {best:,} at best",
                SlowWork,
                stacklevel=3,
            )
        rows, owner = _attempt(random, each, clients, alpha)
        if len(rows) == len(y):
            smallest = int(np.bincount(owner, minlength=clients).min())
            best = max(best, smallest)
            if smallest >= min_size:
                lists = group(owner, clients, rows)
                for part in lists:
                    random.shuffle(part)
                return lists, attempt
    raise DataError(
        f"dirichlet: {limit:,} attempts gave no partition with that minimum size.",
        got=f"a smallest client of {counted(best, 'example')} at best",
        expected=f"min_size {min_size} (alpha {alpha:g}, {clients} clients, {len(y)} examples)",
        do="use a smaller min_size, a larger alpha or fewer clients, or kind 'dirichlet_prior', "
        "where 'sizes' says how many examples a client has",
    )


def _attempt(random: RandomState, each: Lists, clients: int, alpha: float) -> tuple[Ints, Ints]:
    """Return (rows, owner of each) of one attempt; it stops short where no share is left."""
    fair = sum(map(len, each)) / clients
    owned = np.zeros(clients, dtype=np.int64)
    rows: Lists = []
    owner: Lists = []
    for member in each:
        mixed = member.copy()
        random.shuffle(mixed)
        share = random.dirichlet(np.repeat(alpha, clients)) * (owned < fair)
        if len(mixed) == 0:
            continue
        mass = share.sum()
        if not mass > 0:  # also where all gamma variates underflowed and the shares are NaN
            break
        counts = rows_by_share(share / mass, len(mixed))
        owned += counts
        rows.append(mixed)
        owner.append(np.repeat(np.arange(clients), counts))
    return np.concatenate(rows or [owned[:0]]), np.concatenate(owner or [owned[:0]])


def dirichlet_gradma(
    labels: ArrayLike, clients: int, alpha: float, seed: int = 0, *, classes: int | None = None
) -> Lists:
    """Give each client two examples of random classes, then divide each class by a Dirichlet draw.

    Draw p_y ~ Dir(alpha 1_C) for every class. Twice, for each client in order: take the last row
    left of a class drawn uniformly. Then for each class in order: shuffle what is left of it and
    cut it at floor(cumsum(p_y) n_left). Then shuffle each client's rows. Nothing is balanced: small
    alpha leaves many clients with little more than their two examples.

    Source
        Luo et al., GradMA (CVPR 2023), ``data_distributer.py`` of the public code, in its order of
        draws: row for row equal to it after ``numpy.random.seed(seed)``.

    Args:
        labels: [N] labels 0..Y-1.
        clients: C.
        alpha: the paper's omega, > 0.
        seed: seed, 0..2^32 - 1.
        classes: Y; the largest label + 1 where it is not given.

    Deviations: where the class drawn for one of the two examples has run out, the public code stops
    with an IndexError; here another class is drawn.

    Raises:
        DataError: there are fewer than 2 examples for each client, or alpha is so small that the
            Dirichlet draw underflows.
    """
    y, count = check(labels, classes, clients, alpha)
    if len(y) < 2 * clients:
        raise DataError(
            "dirichlet_gradma gives every client two examples first, and there are too few.",
            got=f"{len(y)} examples for {clients} clients",
            expected=f"at most {len(y) // 2} clients",
        )
    random = legacy(seed)
    shares = _class_shares(count, clients, alpha, random)
    first, left = _take_last(members(y, count), 2 * clients, random)
    rows, owner = [first], [np.tile(np.arange(clients), 2)]
    for share, mixed in zip(shares, left, strict=True):
        random.shuffle(mixed)
        rows.append(mixed)
        owner.append(np.repeat(np.arange(clients), rows_by_share(share, len(mixed))))
    lists = group(np.concatenate(owner), clients, np.concatenate(rows))
    for part in lists:
        random.shuffle(part)
    return lists


def _class_shares(count: int, clients: int, alpha: float, random: RandomState) -> Floats:
    """Return [Y, C] one Dirichlet draw over the clients for each class."""
    drawn = random.dirichlet(np.full(clients, alpha), size=count)  # [Y, C]
    if not np.isfinite(drawn).all():
        raise DataError(
            "dirichlet_gradma: alpha is too small, all shares of a class underflowed.",
            got=f"alpha {alpha:g} for {clients} clients",
            do="use a larger alpha",
        )
    return drawn


def _take_last(each: Lists, count: int, random: RandomState) -> tuple[Ints, Lists]:
    """Return (the last rows left of `count` random classes, a copy of what is left)."""
    left = [rows.tolist() for rows in each]
    chosen = []
    for drawn in random.randint(0, len(left), size=count).tolist():
        label = drawn
        while not left[label]:
            label = int(random.randint(0, len(left)))
        chosen.append(left[label].pop())
    return np.array(chosen, dtype=np.int64), [np.array(rows, dtype=np.int64) for rows in left]


def dirichlet_prior(
    labels: ArrayLike,
    clients: int,
    alpha: float,
    sizes: Sizes = "equal",
    sigma: float = 2.0,
    seed: int = 0,
    *,
    classes: int | None = None,
) -> Lists:
    """Draw each client's examples by its own class prior p_k ~ Dir(alpha 1_Y).

    One example after the other: a client is drawn uniformly among those that are not full yet, a
    class from its prior, and a random example left of that class. Where the class has run out, the
    class is drawn again from the prior restricted to the classes that have not, renormalised; where
    the prior has no mass there, uniformly among these classes.

    Source
        Acar et al., Federated Learning Based on Dynamic Regularization (ICLR 2021),
        ``utils_dataset.py`` of the public code; the same distribution, not the same draws. FedLab
        calls it ``client_inner_dirichlet_partition``.

    Args:
        labels: [N] labels 0..Y-1.
        clients: C.
        alpha: concentration, > 0.
        sizes: as in `partition.iid`.
        sigma: as in `partition.iid`.
        seed: seed, >= 0.
        classes: Y; the largest label + 1 where it is not given.

    Deviations: ``equal`` assigns all examples, sizes differing by at most one, where FedDyn drops
    the N mod C last; ``power`` as in `split.draw_sizes`, where FedDyn can make empty clients.
    FedDyn does not end where a client's prior has no mass on what is left.

    Cost: Y passes over the examples at most, no loop over them.
    """
    y, count = check(labels, classes, clients, alpha)
    random = generator(seed, "partition")
    each = members(y, count)
    supply = np.array([len(rows) for rows in each])
    turns = _turns(draw_sizes(len(y), clients, sizes, sigma, random), random)
    prior = random.dirichlet(np.full(count, alpha), size=clients)  # [C, Y]
    drawn = _draw_without_replacement(prior, turns, supply, random)
    owner = np.full(len(y), -1, dtype=np.int64)
    for label, rows in enumerate(each):
        takers = turns[drawn == label]
        owner[random.permutation(rows)[: len(takers)]] = takers
    return group(owner, clients)


def _turns(counts: Ints, random: Generator) -> Ints:
    """Return the client of each draw, uniform among the clients that are not full yet.

    Client k draws at the first counts[k] points of a Poisson process of rate 1: the next point of
    all processes that still run belongs to each of them with the same probability.
    """
    gaps = random.standard_exponential(int(counts.sum()))
    times = np.cumsum(gaps)
    starts = np.cumsum(counts) - counts
    times -= np.repeat(times[starts] - gaps[starts], counts)
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(times)]


def _draw_without_replacement(prior: Floats, turns: Ints, supply: Ints, random: Generator) -> Ints:
    """Return the class of each turn, no class more often than its supply.

    All turns are drawn at once. Then the first turn at which a class is asked for once too often is
    found, and that turn and all later ones of that class are drawn again among the classes that
    have not run out by then: the same distribution as one turn after the other, by rejection.
    """
    narrow = np.min_scalar_type(len(supply))  # 16-bit integers are sorted in linear time
    drawn = _draw(prior, turns, supply > 0, random)
    while True:
        order = np.argsort(drawn.astype(narrow), kind="stable")
        requested = np.bincount(drawn, minlength=len(supply))
        over = np.flatnonzero(requested > supply)
        if len(over) == 0:
            return drawn
        starts = np.cumsum(requested) - requested
        excess = order[starts[over] + supply[over]]  # the turn that asks once too often
        label, turn = over[excess.argmin()], excess.min()
        left = supply > np.bincount(drawn[:turn], minlength=len(supply))
        again = turn + np.flatnonzero(drawn[turn:] == label)
        drawn[again] = _draw(prior, turns[again], left, random)


def _draw(
    prior: Floats, turns: Ints, left: NDArray[np.bool_], random: Generator, block: int = 1 << 16
) -> Ints:
    """Return one class for each turn from its client's prior, restricted to the classes left."""
    who, at = np.unique(turns, return_inverse=True)
    mass = prior[who] * left
    mass[mass.sum(axis=1) == 0] = left
    cumulative = np.cumsum(mass, axis=1)
    cumulative /= cumulative[:, -1:]
    chance = random.random((len(turns), 1))
    parts = [
        (cumulative[at[i : i + block]] <= chance[i : i + block]).sum(axis=1)
        for i in range(0, len(turns), block)
    ]
    return np.concatenate(parts).astype(np.int64)
