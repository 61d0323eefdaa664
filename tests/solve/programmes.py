"""Quadratic programmes of every awkward kind, and the conditions that only their answers meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedkeel.solve import qp, span

Rng = np.random.Generator
Array = np.ndarray


def _random(rng: Rng, m: int, d: int) -> Array:
    return rng.normal(size=(m, d))


def _duplicate(rng: Rng, m: int, d: int) -> Array:
    rows = rng.normal(size=(m, d))
    rows[m // 2 :] = rows[: m - m // 2] * rng.uniform(0.5, 2.0, size=(m - m // 2, 1))
    return rows


def _opposite(rng: Rng, m: int, d: int) -> Array:
    rows = rng.normal(size=(m, d))
    rows[-1] = -rng.uniform(0.5, 2.0) * rows[0]
    return rows


def _zero(rng: Rng, m: int, d: int) -> Array:
    rows = rng.normal(size=(m, d))
    rows[rng.integers(m)] = 0.0
    return rows


def _tall(rng: Rng, m: int, d: int) -> Array:
    """More rows than dimensions."""
    return rng.normal(size=(2 * d + m, d))


def _deficient(rng: Rng, m: int, d: int) -> Array:
    rank = max(1, min(m, d) // 2)
    return rng.normal(size=(m, rank)) @ rng.normal(size=(rank, d))


def _line(rng: Rng, m: int, d: int) -> Array:
    """One dimension, both signs."""
    return rng.normal(size=(m, 1))


def _unlike(rng: Rng, m: int, d: int) -> Array:
    """Rows from 1e-6 to 1e6 in length."""
    return rng.normal(size=(m, d)) * 10.0 ** rng.integers(-6, 7, size=(m, 1))


def _worker(rng: Rng, m: int, d: int) -> Array:
    """GradMA's worker after a full-batch step: a gradient twice, and a step against it."""
    g = rng.normal(size=d)
    return np.stack([g, g, -0.1 * g])


KINDS: dict[str, Callable[[Rng, int, int], Array]] = {
    f.__name__.removeprefix("_"): f
    for f in (_random, _duplicate, _opposite, _zero, _tall, _deficient, _line, _unlike, _worker)
}
SCALES = (1.0, 1e-8, 1e8)


def draw(kind: str, seed: int, scale: float = 1.0, rows: int = 0) -> tuple[Array, Array]:
    """Rows [m, d] and a point [d], both of the given scale; `rows` is the most of them."""
    rng = np.random.default_rng([seed, len(kind)])
    m, d = int(rng.integers(2, (rows or 8) + 1)), int(rng.integers(2, 10))
    M = KINDS[kind](rng, m, d)
    return scale * M, scale * rng.normal(size=M.shape[1])


def lengths(M: Array) -> Array:
    """[m] lengths of the rows, 1 for a row of zeros."""
    length = np.linalg.norm(M, axis=1)
    return np.where(length > 0.0, length, 1.0)


def departure(M: Array, p: Array, b: Array | float, multipliers: Array) -> float:
    """How far multipliers are from the optimality conditions, relative to the size of the problem.

    The programme is convex: whoever meets the conditions has the answer. Stationarity is how the
    answer is made of the multipliers; the rest is lambda >= 0, Mu >= b and complementarity.
    """
    length = lengths(M)
    slack = (M @ (p + M.T @ multipliers) - b) / length
    push = multipliers * length
    size = max(float(np.linalg.norm(p)), float(np.abs(b / length).max()), 1e-300)
    complementary = np.abs(push * slack).max() / max(float(push.max(initial=0.0)), 1e-300)
    return float(max((-push).max(), (-slack).max(), complementary) / size)


def project(M: Array, p: Array, b: Array | float = 0.0, noise: float = 1e-13) -> qp.Solution:
    """`qp.project`, of the vectors themselves."""
    return qp.project(M @ M.T, M @ p, b, noise)


def single(M: Array, p: Array) -> tuple[Array, Array, Array, Array, float]:
    """The same in float32: rows, point, Gram matrix, inner products with the point, noise."""
    rows = {"w": torch.from_numpy(M).float()}
    point = {"w": torch.from_numpy(p).float()}
    one = span.Span(rows)
    gram, inner = one.gram(["w"]), one.inner_products(point, ["w"])
    found = rows["w"].double().numpy(), point["w"].double().numpy()
    return *found, gram, inner, span.relative_rounding(rows, ["w"])
