r"""The one quadratic programme behind CGC, SGC, GradMA-W and GradMA-S.

Nearest point to p that has at least a given inner product with each row of M,

.. math:: \min_u \tfrac12\lVert u-p\rVert^2 \quad\text{s.t.}\quad Mu \ge b,

has the solution :math:`u = p + M^\top\lambda` with :math:`\lambda\ge0`, and needs of p and M only
the Gram matrix :math:`G = MM^\top` and the inner products :math:`c = Mp`. This module works in that
small space, in float64. Three functions solve the same problem:

- `halfspace`: one constraint, in closed form.
- `enumerate_cone`: up to four constraints, by trying every set of active ones. It does not branch
  on data, so it can be part of a client's vectorized step.
- `project`: any number of constraints, by block pivoting and, where that fails, by
  non-negative least squares. G may be singular, and the answer says whether the constraints can be
  met at all. For b = 0 they always can, at least by u = 0.

Source: the duals in FedGC Eq. (7) and (10), GradMA Eq. (4); block pivoting in Portugal, Judice and
Vicente, Mathematics of Computation 63 (1994); the reduction of least distance to non-negative least
squares in Lawson and Hanson, Solving Least Squares Problems (1974), ch. 23.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedkeel.base.lazy import Tensor, torch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """The answer to a quadratic programme.

    Args:
        multipliers: [m] lambda >= 0; zeros where `feasible` is false.
        feasible: whether the constraints can be met together.
    """

    multipliers: Floats
    feasible: bool


def halfspace(inner: Tensor, norm2: Tensor, bound: float) -> Tensor:
    r"""Return the multiplier of one constraint :math:`\langle u, z\rangle \ge b`.

    .. math:: \lambda = \max(0, (b - \langle p, z\rangle) / \lVert z\rVert^2)

    and 0 where z = 0, which leaves p as it is: no multiple of zero could help.

    Args:
        inner: [] inner product of p and z.
        norm2: [] squared norm of z.
        bound: b.

    >>> halfspace(torch.tensor(-3.0), torch.tensor(2.0), bound=1.0)
    tensor(2.)
    """
    gap = torch.clamp(bound - inner, min=0.0)
    return torch.where(norm2 > 0, gap / torch.where(norm2 > 0, norm2, 1.0), 0.0)


def enumerate_cone(gram: Tensor, inner: Tensor, solvable: bool = False) -> Tensor:
    r"""Return the multipliers of :math:`Mu \ge b` for a few constraints, trying all active sets.

    For every subset of rows, taken as active, the equations are solved; the answer is that of the
    subset which violates the optimality conditions least. Zero and duplicate rows are allowed: a
    subset with them is singular or useless, and another one gives the same point.

    Args:
        gram: [n, n] inner products of the rows of M, n <= 4.
        inner: [n] inner products of the rows with p, less b.
        solvable: whether it is known that a solution exists, as for b = 0. Where float32 rows are
            nearly opposite, rounding may leave no subset that meets the conditions closely enough;
            the closest one is then the answer.

    Returns:
        [n] multipliers, in float64; zeros where no subset meets the conditions.
    """
    g, c = gram.double(), inner.double()
    length = torch.diagonal(g).clamp(min=0.0).sqrt()
    unit = torch.where(length > 0, 1.0 / torch.where(length > 0, length, 1.0), 0.0)
    g = g * unit[:, None] * unit[None, :]
    c = c * unit
    sets, both, outside = _subsets(len(c), g.device)
    solved = torch.linalg.solve_ex(both * g + outside, -(sets * c)[:, :, None]).result
    solved = solved[:, :, 0] * sets
    slack = c + solved @ g
    worst = torch.maximum(-solved, -slack).amax(dim=1)
    worst = torch.where(torch.isfinite(worst), worst, torch.inf)
    pick = worst.argmin().expand(1, len(c))
    best = torch.where(torch.isfinite(solved), solved, 0.0).gather(0, pick)[0]
    push = best.clamp(min=0.0) * unit
    return push if solvable else torch.where(worst.amin() <= 1e-5 * c.abs().amax(), push, 0.0)


@lru_cache(maxsize=16)
def _subsets(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return every subset of n rows, [2^n, n], its pairs, and 1 on the diagonal outside it."""
    members = [[(s >> i) & 1 for i in range(n)] for s in range(2**n)]
    sets = torch.tensor(members, dtype=torch.float64, device=device)
    return sets, sets[:, :, None] * sets[:, None, :], torch.diag_embed(1.0 - sets)


def project(
    gram: Floats, inner: Floats, bound: Floats | float = 0.0, noise: float = 1e-13
) -> Solution:
    r"""Return the multipliers of :math:`Mu \ge b` for any number of constraints.

    Args:
        gram: [m, m] inner products of the rows of M. May be singular.
        inner: [m] inner products of the rows with p.
        bound: [m] or scalar, b.
        noise: relative size below which an eigenvalue of the (row-normalised) Gram matrix counts
            as zero: rounding of the products it was made of.

    Returns:
        The multipliers, or `feasible` = False where no u meets all constraints within `noise`, or
        where the products are not finite, as when training diverges.
    """
    m = len(inner)
    if not (np.isfinite(gram).all() and np.isfinite(inner).all()):
        return Solution(np.zeros(m), feasible=False)
    lower = np.broadcast_to(np.asarray(bound, dtype=np.float64), (m,))
    length = np.sqrt(np.clip(np.diagonal(gram), 0.0, None))
    empty = length <= 0.0
    if np.any(lower[empty] > 0.0):
        return Solution(np.zeros(m), feasible=False)
    required = lower - inner  # lower bound of M(u - p)
    if not np.any(required[~empty] > 0.0):
        return Solution(np.zeros(m), feasible=True)
    rows = np.flatnonzero(~empty)
    unit = 1.0 / length[rows]
    g = gram[np.ix_(rows, rows)] * unit[:, None] * unit[None, :]
    h = required[rows] * unit
    g = 0.5 * (g + g.T)
    scaled = _block_pivoting(g, h, noise)
    if scaled is None:
        solve = _least_distance if np.any(lower) else _nearest_in_cone
        scaled = solve(g, h, noise)
    multipliers = np.zeros(m)
    if scaled is None:
        return Solution(multipliers, feasible=False)
    multipliers[rows] = scaled * unit
    return Solution(multipliers, feasible=True)


def singular(gram: Floats, noise: float = 1e-13) -> bool:
    """Return whether the rows of M are linearly dependent, within `noise`, or not finite.

    Args:
        gram: [m, m] inner products of the rows.
        noise: as in `project`.

    >>> singular(np.array([[1.0, 2.0], [2.0, 4.0]])), singular(np.array([[1.0, 2.0], [2.0, 5.0]]))
    (True, False)
    """
    length = np.sqrt(np.clip(np.diagonal(gram), 0.0, None))
    if not length.all() or not np.isfinite(gram).all():
        return True
    values = np.linalg.eigvalsh(gram / np.outer(length, length))
    return bool(values[0] <= noise * len(gram) * values[-1])


MAX_PIVOTS = 50
"""Largest number of active sets that are tried; five or six are usual."""

MAX_VIOLATION = 1e-10
"""Largest violation of the optimality conditions by an answer of block pivoting."""


def _block_pivoting(g: Floats, h: Floats, noise: float) -> Floats | None:
    """Return lambda >= 0 with G lambda >= h and complementary slack; None where pivoting fails.

    In each pivot the equations of the active constraints are solved, and every constraint with a
    wrong sign changes sides. If that does not lower the number of wrong signs three times in a row,
    only the last such constraint changes sides, which terminates for every regular G. An answer is
    refused where nearby ones would be equally good.
    """
    size = float(np.abs(h).max())
    active = np.zeros(len(h), dtype=np.bool_)
    fewest, patience = len(h) + 1, 3
    for _ in range(MAX_PIVOTS):
        answer = np.zeros(len(h))
        try:
            answer[active] = np.linalg.solve(g[np.ix_(active, active)], h[active])
        except np.linalg.LinAlgError:
            return None
        wrong = np.where(active, answer < 0.0, g @ answer < h)
        count = int(wrong.sum())
        if not count:
            is_too_long = answer @ h * np.sqrt(noise) > size**2
            is_bad = is_too_long or _violation(g, h, answer, size) > MAX_VIOLATION
            return None if is_bad else answer
        patience = 3 if count < fewest else patience - 1
        fewest = min(fewest, count)
        if patience < 0:
            wrong[: np.flatnonzero(wrong)[-1]] = False
        active ^= wrong
    return None


def _basis(g: Floats, noise: float) -> tuple[Floats, Floats]:
    """Return M [m, r] in an orthonormal basis of the span of its rows, and its pseudo-inverse."""
    values, vectors = np.linalg.eigh(g)
    is_nonzero = values > noise * len(g) * values[-1]
    root = np.sqrt(values[is_nonzero])
    return vectors[:, is_nonzero] * root, (vectors[:, is_nonzero] / root).T


def _nearest_in_cone(g: Floats, h: Floats, noise: float) -> Floats | None:
    """Return lambda >= 0 for b = 0, where h = -Mp lies in the span of M's columns.

    Then p is known within the span of the rows, and its polar part is a least squares problem, also
    where u = 0 is the only solution. Where rows cancel each other, only rounding may make their
    multipliers grow without bound; a tiny ridge prevents that, and `_polish` removes its bias.
    """
    rows, inverse = _basis(g, noise)
    size = float(np.abs(h).max())
    target = inverse @ (h / size)
    raw = _nnls(rows.T, target)
    if raw is not None:
        answer = _polish(g, h, raw * size, size)
        if _violation(g, h, answer, size) <= np.sqrt(noise):
            return answer
    ridge = np.sqrt(noise) * np.eye(len(h))
    raw = _nnls(np.vstack([rows.T, ridge]), np.concatenate([target, np.zeros(len(h))]))
    return None if raw is None else _polish(g, h, raw * size, size)


def _least_distance(g: Floats, h: Floats, noise: float) -> Floats | None:
    """Return lambda >= 0 of the shortest x with Mx >= h, where MM' = g has unit diagonal."""
    rows, _ = _basis(g, noise)
    size = float(np.abs(h).max())
    lhs = np.vstack([rows.T, h / size])
    rhs = np.zeros(len(lhs))
    rhs[-1] = 1.0
    raw = _nnls(lhs, rhs)
    if raw is None:
        return None
    distance2 = float(rhs[-1] - lhs[-1] @ raw)  # the squared distance of rhs from the cone
    if distance2 <= np.sqrt(noise):
        return None
    return _polish(g, h, raw * size / distance2, size)


def _nnls(lhs: Floats, rhs: Floats) -> Floats | None:
    """Return x >= 0 that minimises |lhs x - rhs|; None where the iteration limit was reached."""
    from scipy.optimize import nnls  # slow to import

    try:
        return np.asarray(nnls(lhs, rhs, maxiter=10 * lhs.shape[1])[0])
    except RuntimeError:
        return None


def _polish(g: Floats, h: Floats, guess: Floats, size: float) -> Floats:
    """Solve the active equations once more, which recovers digits lost in the division."""
    active = np.flatnonzero(guess > 0.0)
    solved = np.zeros_like(guess)
    solved[active] = np.linalg.lstsq(g[np.ix_(active, active)], h[active], rcond=None)[0]
    is_better = _violation(g, h, solved, size) < _violation(g, h, guess, size)
    best = solved if is_better else guess
    return np.asarray(np.clip(best, 0.0, None))


def _violation(g: Floats, h: Floats, multipliers: Floats, size: float) -> float:
    """Return how far the multipliers are from meeting the optimality conditions."""
    slack = g @ multipliers - h
    complementary = np.abs(multipliers * slack) / max(float(np.abs(multipliers).max()), 1e-300)
    return float(max((-multipliers).max(), (-slack).max() / size, complementary.max() / size))
