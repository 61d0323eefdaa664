"""Robust rules on the distances of K vectors, as coefficients of these vectors.

Everything here is computed in float64 on the K x K Gram matrix, see `fedkeel.solve.span`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedkeel.solve.span import Floats

Ints = NDArray[np.int64]


def count_of_share(share: float, count: int, most: int) -> int:
    """Return floor(share * count), at most `most`, at least 0.

    >>> count_of_share(0.3, 10, 5), count_of_share(0.4, 10, 3), count_of_share(0.4, 1, -1)
    (3, 3, 0)
    """
    return max(0, min(math.floor(share * count + 1e-9), most))


def squared_distances(gram: Floats, rounding: float) -> Floats:
    """Return the [K, K] squared distances of vectors; those that are 0 but for rounding are 0.

    Args:
        gram: [K, K] their inner products.
        rounding: relative rounding error of these.
    """
    squares = np.diagonal(gram)
    scale = squares[:, None] + squares[None, :]
    distances = scale - (gram + gram.T)  # symmetric, so that two nearest ones have one score
    distances[distances <= rounding * scale] = 0.0
    np.fill_diagonal(distances, 0.0)
    return distances


def krum_scores(distances: Floats, neighbours: int) -> Floats:
    """Return [K] the sum of the squared distances of each vector to its nearest others.

    Args:
        distances: [K, K] squared distances.
        neighbours: how many of the others; kept within 1..K-1.
    """
    count = len(distances)
    others = np.sort(distances + np.diag(np.full(count, np.inf)), axis=1)
    scores: Floats = others[:, : min(max(neighbours, 1), count - 1)].sum(axis=1)
    return scores


def bulyan_selection(distances: Floats, broken: int) -> Ints:
    """Return the positions of the n - 2 f vectors that Krum chooses one after the other.

    Args:
        distances: [K, K] squared distances.
        broken: f, vectors that may be broken.
    """
    left = np.arange(len(distances))
    chosen = []
    for _ in range(len(distances) - 2 * broken):
        scores = krum_scores(distances[np.ix_(left, left)], len(left) - broken - 2)
        best = int(np.argmin(scores))
        chosen.append(left[best])
        left = np.delete(left, best)
    return np.array(chosen, dtype=np.int64)


def nearest_mean(distances: Floats, count: int) -> Floats:
    """Return [K, K] coefficients: each vector becomes the mean of its `count` nearest, and itself.

    Args:
        distances: [K, K] squared distances.
        count: how many, itself among them, >= 1.
    """
    order = np.argsort(distances - np.eye(len(distances)), axis=1, kind="stable")[:, :count]
    mix = np.zeros_like(distances)
    np.put_along_axis(mix, order, 1.0 / count, axis=1)
    return mix


def geometric_median(gram: Floats, weights: Floats, nu: float, steps: int) -> Floats:
    """Return [K] coefficients of the smoothed geometric median, after steps of Weiszfeld from 0.

    Args:
        gram: [K, K] inner products of the vectors.
        weights: [K] of the vectors.
        nu: distances count as no less than this.
        steps: how many.
    """
    point = np.zeros(len(gram))
    for _ in range(steps):
        squares = np.diagonal(gram) - 2.0 * (gram @ point) + point @ gram @ point
        pull = weights / np.maximum(np.sqrt(np.maximum(squares, 0.0)), nu)
        point = pull / pull.sum()
    return point


def centred_clipping(gram: Floats, radius: float, steps: int) -> Floats:
    """Return [K + 1] coefficients of the clipped mean around the last vector.

    Args:
        gram: [K + 1, K + 1] inner products of the K vectors, and of the one to begin at.
        radius: largest distance that a vector may pull by.
        steps: how often the centre moves.
    """
    count = len(gram) - 1
    centre = np.zeros(count + 1)
    centre[-1] = 1.0
    for _ in range(steps):
        squares = np.diagonal(gram)[:-1] - 2.0 * (gram[:-1] @ centre) + centre @ gram @ centre
        distance = np.sqrt(np.maximum(squares, 0.0))
        pull = np.append(np.minimum(1.0, radius / np.maximum(distance, 1e-300)) / count, 0.0)
        centre = pull if (pull[:-1] * count == 1.0).all() else (1.0 - pull.sum()) * centre + pull
    return centre
