"""How clients differ: in their labels, in the number of their examples, and in their inputs.

Everything is computed of sums: of the histogram of labels, of sizes, and of the moments of inputs,
which nodes can send. The one exception is `tell_clients_apart`, which needs examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.rng import generator
from fedkeel.data.read.scaling import Moments

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LabelSkew:
    """How the labels of clients differ from those of all clients together.

    Args:
        variation: mean over clients of the total variation distance, 0 to 1: the share of a
            client's examples that would need another label.
        by_chance: what `variation` is expected to be where labels are the same and clients draw as
            many examples as they have.
        divergence: mean over clients of the Jensen-Shannon distance (root of the divergence in
            bits), 0 to 1.
        classes: median number of classes of a client.
        of_classes: number of classes that any client has.
    """

    variation: float
    by_chance: float
    divergence: float
    classes: float
    of_classes: int

    @property
    def beyond_chance(self) -> float:
        """The part of `variation` that small samples do not explain."""
        return max(self.variation - self.by_chance, 0.0)


def label_skew(histogram: NDArray[Any]) -> LabelSkew:
    r"""Return the skew of labels of a histogram; clients without examples do not count.

    .. math:: \mathrm{TV}_k = \tfrac12 \sum_c |p_{kc} - p_c|, \qquad
        \mathrm{E}\,\mathrm{TV}_k \approx \sum_c \sqrt{p_c (1 - p_c) / (2 \pi n_k)}

    The second is the mean of the half-normal distribution to which a multinomial share tends.

    Args:
        histogram: [C, Y] examples of each client and class.

    >>> round(label_skew(np.array([[4, 0], [0, 4]])).variation, 3)
    0.5
    """
    counts = np.asarray(histogram, dtype=np.float64)
    counts = counts[counts.sum(axis=1) > 0]
    sizes = counts.sum(axis=1)
    shares, pooled = counts / sizes[:, None], counts.sum(axis=0) / counts.sum()
    variation = 0.5 * np.abs(shares - pooled).sum(axis=1)
    chance = np.sqrt(pooled * (1 - pooled) / (2 * math.pi * sizes[:, None])).sum(axis=1)
    middle = 0.5 * (shares + pooled)
    divergence = 0.5 * (_relative_entropy(shares, middle) + _relative_entropy(pooled, middle))
    return LabelSkew(
        variation=float(variation.mean()),
        by_chance=float(np.minimum(chance, 1.0).mean()),
        divergence=float(np.sqrt(np.maximum(divergence, 0.0)).mean()),
        classes=float(np.median((counts > 0).sum(axis=1))),
        of_classes=int((pooled > 0).sum()),
    )


def _relative_entropy(p: Floats, q: Floats) -> Floats:
    """Return [C] the Kullback-Leibler divergence in bits, where q is 0 only where p is."""
    ratio = np.divide(p, q, out=np.ones(np.broadcast(p, q).shape), where=p > 0)
    divergence: Floats = (p * np.log2(ratio)).sum(axis=-1)
    return divergence


@dataclass(frozen=True)
class SizeSkew:
    """How the numbers of examples differ.

    Args:
        gini: Gini coefficient of the sizes, 0 where all are equal.
        ratio: the largest over the smallest size.
        largest: share of all examples that the largest client has.
        smallest: the smallest size.
    """

    gini: float
    ratio: float
    largest: float
    smallest: int


def size_skew(sizes: Sequence[int] | NDArray[Any]) -> SizeSkew:
    r"""Return how sizes differ; clients without examples do not count.

    .. math:: G = \frac{\sum_{ij} |n_i - n_j|}{2 C^2 \bar n}

    >>> size_skew([1, 3])
    SizeSkew(gini=0.25, ratio=3.0, largest=0.75, smallest=1)
    """
    ordered = np.sort(np.asarray(sizes, dtype=np.float64))
    ordered = ordered[ordered > 0]
    count, total = len(ordered), ordered.sum()
    ranks = np.arange(1, count + 1)
    gini = float((2 * ranks - count - 1) @ ordered / (count * total))
    return SizeSkew(
        gini=gini,
        ratio=float(ordered[-1] / ordered[0]),
        largest=float(ordered[-1] / total),
        smallest=int(ordered[0]),
    )


@dataclass(frozen=True)
class MomentSkew:
    """How far the clients' mean inputs, or targets, are from those of all.

    Args:
        distance: mean over clients of the root mean square over columns of a client's mean minus
            that of all, in standard deviations of all.
        by_chance: what `distance` is expected to be of samples of the same distribution.
        between: share of the variance that lies between clients, mean over columns; 0 to 1.
        of_clients: [C] the distance of each client.
        of_columns: [F] the distance in each column, root mean square over clients; 0 of columns
            that do not vary.
        constant: (client, column) where a column that varies does not vary at a client of at least
            `MIN_EXAMPLES` examples.
    """

    distance: float
    by_chance: float
    between: float
    of_clients: tuple[float, ...]
    of_columns: tuple[float, ...] = ()
    constant: tuple[tuple[int, int], ...] = ()

    @property
    def beyond_chance(self) -> float:
        """The part of `distance` that small samples do not explain."""
        return math.sqrt(max(self.distance**2 - self.by_chance**2, 0.0))

    def most_apart(self, names: Sequence[str]) -> tuple[tuple[str, float], ...]:
        """Return name and distance of the columns in which clients differ most, beyond chance.

        Args:
            names: F names of the columns.
        """
        order = sorted(range(len(names)), key=lambda column: -self.of_columns[column])
        return tuple(
            (names[column], self.of_columns[column])
            for column in order[:NAMED_COLUMNS]
            if self.of_columns[column] > self.by_chance
        )


NAMED_COLUMNS = 3
"""Columns that are named as those in which clients differ most."""

MIN_EXAMPLES = 4
"""Examples of a client from which on it is worth a word that a column does not vary there."""


def moment_skew(moments: Sequence[Moments], sizes: Sequence[int]) -> MomentSkew | None:
    """Return how clients' moments differ, of columns that vary; None where there are none.

    Args:
        moments: of each client's inputs, as nodes send them.
        sizes: examples of each client.
    """
    counts = np.array([client.count for client in moments], dtype=np.float64)
    means = np.stack([client.mean.numpy() for client in moments])
    squares = np.stack([client.squares.numpy() for client in moments])
    pooled = (counts @ means) / counts.sum()
    between = (counts @ (means - pooled) ** 2) / counts.sum()
    variance = squares.sum(axis=0) / counts.sum() + between
    varies = variance > 1e-12 * (1.0 + pooled**2)
    if not varies.any():
        return None
    difference = ((means - pooled)[:, varies]) ** 2 / variance[varies]
    distances = np.sqrt(difference.mean(axis=1))
    of_columns = np.zeros(len(pooled))
    of_columns[varies] = np.sqrt(difference.mean(axis=0))
    still = varies & (squares <= 1e-12 * counts[:, None] * variance)
    constant = np.argwhere(still & (counts >= MIN_EXAMPLES)[:, None])
    return MomentSkew(
        distance=float(distances.mean()),
        by_chance=float(np.mean(1.0 / np.sqrt(np.maximum(np.asarray(sizes, dtype=float), 1.0)))),
        between=float((between[varies] / variance[varies]).mean()),
        of_clients=tuple(distances.tolist()),
        of_columns=tuple(of_columns.tolist()),
        constant=tuple((client, column) for client, column in constant.tolist()),
    )


@dataclass(frozen=True)
class Separability:
    """How well a linear classifier tells from an input which client it is of.

    Args:
        accuracy: mean over clients of the share of their held-out examples that it knows.
        by_chance: one over the number of clients.
        clients: number of clients that took part, at most `MAX_SEPARATED`.
    """

    accuracy: float
    by_chance: float
    clients: int


MAX_SEPARATED, MAX_EXAMPLES, MAX_COLUMNS = 20, 100, 256
"""Clients, examples of each, and columns of the classifier that tells clients apart."""


def tell_clients_apart(
    x: Floats, clients: NDArray[Any], labels: NDArray[Any] | None, seed: int
) -> Separability | None:
    """Return how well clients are told apart by their inputs, beyond what their labels explain.

    A ridge regression on the indicator of each client, with a penalty of a tenth of the mean
    variance, is fitted on half of each client's examples and asked about the other half; the
    largest output names the client. Where there are labels, the mean input of each class over all
    clients is taken off first, so that clients which only have other labels are not told apart.

    Args:
        x: [N, F] inputs.
        clients: [N] client of each.
        labels: [N] labels, None where there are none.
        seed: draws clients, examples and, beyond `MAX_COLUMNS`, a projection of the columns.

    Returns:
        None where fewer than two clients have four examples.
    """
    random = generator(seed, "doctor")
    known, sizes = np.unique(clients, return_counts=True)
    known = known[sizes >= 4]
    if len(known) < 2:
        return None
    if len(known) > MAX_SEPARATED:
        known = np.sort(random.choice(known, MAX_SEPARATED, replace=False))
    if labels is not None:
        x = x - _class_means(x, labels)
    if x.shape[1] > MAX_COLUMNS:
        x = x @ random.standard_normal((x.shape[1], MAX_COLUMNS)) / math.sqrt(x.shape[1])
    train, test = [], []
    for client in known:
        rows = random.permutation(np.flatnonzero(clients == client))[:MAX_EXAMPLES]
        train.append(rows[: len(rows) // 2])
        test.append(rows[len(rows) // 2 :])
    weights = np.concatenate([np.full(len(rows), 1.0 / len(rows)) for rows in train])
    inputs = x[np.concatenate(train)]
    indicator = np.repeat(np.eye(len(known)), [len(rows) for rows in train], axis=0)
    mean, target = np.average(inputs, axis=0, weights=weights), 1.0 / len(known)
    centred = inputs - mean
    gram = centred.T @ (centred * weights[:, None])
    ridge = 0.1 * np.trace(gram) / len(gram) + 1e-12
    right = centred.T @ ((indicator - target) * weights[:, None])
    solved = np.linalg.solve(gram + ridge * np.eye(len(gram)), right)
    hits = [
        float((((x[rows] - mean) @ solved).argmax(axis=1) == place).mean())
        for place, rows in enumerate(test)
    ]
    return Separability(float(np.mean(hits)), target, len(known))


def _class_means(x: Floats, labels: NDArray[Any]) -> Floats:
    """Return [N, F] the mean input of each example's class."""
    classes, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(classes), x.shape[1]))
    np.add.at(sums, place, x)
    means: Floats = (sums / counts[:, None])[place]
    return means
