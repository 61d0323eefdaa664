"""Matrices of lanes that are kept as sums, and never made: each lane's model, update and memory.

After a few steps from a common model P, a lane's matrix is P - rate * sum of A B, where A and B are
as thin as a batch is small; corrections and memories of methods add multiples of what the server
sent and of what the client keeps. As long as that is so, the sum is kept as its terms. Inputs are
multiplied by the terms: by what all lanes have in common in one product, by thin factors, and by
what belongs to a lane. The weighted sum of the lanes is taken term by term too. What is wanted
whole in the end is made once. `recording.expand` finds where this can be done.

Letters: n lanes, B rows of a batch, r the thin side, a x b the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeel.engine.vectorized.low_rank import saves_work
from fedkeel.matmul import add_product, bmm, mm

Scale = tuple[float, tuple[Any, ...]]
"""A number, and others by which it is multiplied: the learning rate, or [n, 1, 1] of the lanes."""

Terms = Sequence[tuple[tuple[Tensor, ...], Sequence[Scale]]]
"""One tensor, [a, b] or [n, a, b], or two whose product is meant, [n, a, r] and [n, r, b]; and the
scales whose sum it is multiplied by."""


ROUNDING = 4.0
"""What is left of a sum of scales that cancels, at most, in units of its terms' last place."""


def times(x: Tensor, turned: bool, terms: Terms) -> Tensor:
    """Return x times each lane's matrix, or its transpose where `turned`.

    Args:
        x: [n, B, a], or [n, B, b] where turned.
        turned: whether the matrices are transposed.
        terms: of the matrices; one of them is the same for all lanes.
    """
    alike: list[tuple[Tensor, float]] = []
    others = []
    for parts, scale in _valued(terms):
        if parts[0].ndim == 2 and not isinstance(scale, Tensor):
            alike.append((parts[0], scale))
        else:
            others.append((parts, scale))
    (first, number), *more = alike
    common = first if number == 1.0 else first * number
    for part, number in more:
        common = torch.add(common, part, alpha=number)
    flat = x.reshape(-1, x.shape[2])
    out = mm(flat, common.t() if turned else common).view(*x.shape[:2], -1)
    for parts, scale in others:
        ways = [part.mT for part in reversed(parts)] if turned else list(parts)
        if ways[0].ndim == 2:
            out.addcmul_(mm(flat, ways[0]).view(out.shape), torch.as_tensor(scale))
            continue
        seen = x if len(ways) == 1 else bmm(x, ways[0])
        if isinstance(scale, Tensor):
            add_product(out, seen * scale, ways[-1], 1.0)
        else:
            add_product(out, seen, ways[-1], scale)
    return out


def entries(terms: Terms, sums: Sequence[Tensor | None]) -> Tensor:
    """Return [n] the sum of all entries of each lane's matrix.

    Args:
        terms: of the matrices, a product among them.
        sums: of the entries of each term of one tensor, [] or [n].
    """
    found = []
    for (parts, scales), known in zip(terms, sums, strict=True):
        scale = _value(scales)
        one = (parts[0].sum(1) * parts[-1].sum(2)).sum(1) if known is None else known
        found.append(one * (scale.view(-1) if isinstance(scale, Tensor) else scale))
    return torch.stack(torch.broadcast_tensors(*found)).sum(0)  # type: ignore[no-untyped-call]


def added(weights: Tensor, terms: Terms) -> Tensor:
    """Return [1, a * b] the sum of the lanes' matrices, by weights [1, n]."""
    first, *_ = (parts for parts, _ in terms if len(parts) == 2)
    total = weights.new_zeros(first[0].shape[1], first[1].shape[2])
    for parts, scale in _valued(terms):
        factors = weights * (scale.view(1, -1) if isinstance(scale, Tensor) else scale)
        if len(parts) == 2:
            left = (parts[0].mT * factors.view(-1, 1, 1)).flatten(0, 1).t()
            add_product(total, left, parts[1].reshape(-1, parts[1].shape[2]), 1.0)
        elif parts[0].ndim == 3:
            total.view(1, -1).addmm_(factors, parts[0].reshape(len(parts[0]), -1))
        else:
            total.addcmul_(parts[0], factors.sum())
    return total.view(1, -1)


def made(terms: Terms) -> Tensor:
    """Return the matrices themselves, [n, a, b]; there is a product among the terms."""
    valued = _valued(terms)
    out = bmm(*_joined(valued))
    for parts, scale in valued:
        if len(parts) == 2:
            continue
        if isinstance(scale, Tensor):
            out.addcmul_(parts[0], scale)
        else:
            out.add_(parts[0], alpha=scale)
    return out


def slim(terms: Terms) -> tuple[Tensor, ...]:
    """Return factors of the matrices, [n, a, r] and [n, r, b], where that pays, or themselves."""
    some = [(parts, scale) for parts, scale in _valued(terms) if not _nobody(scale)]
    if not some or any(len(parts) == 1 for parts, _ in some):
        return (made(terms),)
    side = sum(parts[0].shape[2] for parts, _ in some)
    (left, right), _ = some[0]
    return _joined(some) if saves_work(side, left.shape[1], right.shape[2]) else (made(terms),)


def _joined(valued: Sequence[tuple[tuple[Tensor, ...], float | Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the factors of all products among terms, one beside the other."""
    thin = [(parts[0] * scale, parts[1]) for parts, scale in valued if len(parts) == 2]
    left = torch.cat([one for one, _ in thin], dim=2)
    return left, torch.cat([other for _, other in thin], dim=1)


def _valued(terms: Terms) -> list[tuple[tuple[Tensor, ...], float | Tensor]]:
    """Return the terms with their scales, without tensors that no lane has anything of."""
    found = [(parts, _value(scales)) for parts, scales in terms]
    return [(parts, scale) for parts, scale in found if len(parts) == 2 or not _nobody(scale)]


def _nobody(scale: float | Tensor) -> bool:
    """Return whether no lane has anything of a term."""
    return isinstance(scale, Tensor) and scale.device.type == "cpu" and not scale.any()


def _value(scales: Sequence[Scale]) -> float | Tensor:
    """Return the sum of scales: a number, or [n, 1, 1].

    What cancels is 0, not what rounding leaves of it: SCAFFOLD's c_k less S times lr c_k / (S lr).
    """
    total: float | Tensor = 0.0
    size: float | Tensor = 0.0
    for number, factors in scales:
        one: float | Tensor = number
        for factor in factors:
            one = factor * one
        total = one + total
        size = (one.abs() if isinstance(one, Tensor) else abs(one)) + size
    if isinstance(total, Tensor) and len(scales) > 1:
        return total * (total.abs() > ROUNDING * torch.finfo(total.dtype).eps * size)
    return total
