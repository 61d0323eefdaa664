"""Computes with clients' matrices that are sums of terms, without making the matrices.

After a few steps from a common model P, a client's matrix is P - rate * sum of A B, where A and B
have as small a rank as a batch has examples. Corrections and client states of methods add multiples
of what the server sent and of what the client keeps. As long as this holds, the sum is kept as its
terms. Inputs are multiplied by the terms: by what all clients have in common in one product, by the
factors, and by what belongs to each client. The weighted sum over clients is taken term by term.
What is needed as a matrix at the end is made once. `low_rank_pass.py` finds where this saves work.

Letters: n clients, B rows of a batch, r the rank, a x b the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeel.base.matmul import add_product, bmm, mm
from fedkeel.engine.compiler.low_rank_matrix import saves_work

TermScale = tuple[float, tuple[Any, ...]]
"""A number and the values it is multiplied by: the learning rate, or [n, 1, 1] one per client."""

Terms = Sequence[tuple[tuple[Tensor, ...], Sequence[TermScale]]]
"""Of each term: one tensor, [a, b] or [n, a, b], or two that stand for their product, [n, a, r] and
[n, r, b]; and the scales whose sum it is multiplied by."""

ValuedTerms = list[tuple[tuple[Tensor, ...], float | Tensor]]
"""Of each term: its tensors, and the number or the [n, 1, 1] it is multiplied by."""

ROUNDING = 4.0
"""What rounding leaves of scales that cancel, at most, in units of their last place."""


def multiply(x: Tensor, transposed: bool, terms: Terms) -> Tensor:
    """Return x times each client's matrix, or its transpose.

    Args:
        x: [n, B, a], or [n, B, b] for the transpose.
        transposed: whether the matrices are transposed.
        terms: of the matrices; at least one is the same for all clients.
    """
    common_terms: list[tuple[Tensor, float]] = []
    other_terms: ValuedTerms = []
    for parts, scale in _with_values(terms):
        if parts[0].ndim == 2 and not isinstance(scale, Tensor):
            common_terms.append((parts[0], scale))
        else:
            other_terms.append((parts, scale))
    (first, number), *more = common_terms
    common = first if number == 1.0 else first * number
    for matrix, number in more:
        common = torch.add(common, matrix, alpha=number)
    rows = x.reshape(-1, x.shape[2])
    out = mm(rows, common.t() if transposed else common).view(*x.shape[:2], -1)
    for parts, scale in other_terms:
        factors = [part.mT for part in reversed(parts)] if transposed else list(parts)
        if factors[0].ndim == 2:
            out.addcmul_(mm(rows, factors[0]).view(out.shape), torch.as_tensor(scale))
            continue
        inputs = x if len(factors) == 1 else bmm(x, factors[0])
        if isinstance(scale, Tensor):
            add_product(out, inputs * scale, factors[-1], 1.0)
        else:
            add_product(out, inputs, factors[-1], scale)
    return out


def sum_of_entries(terms: Terms, entry_sums: Sequence[Tensor | None]) -> Tensor:
    """Return [n] the sum of all entries of each client's matrix.

    Args:
        terms: of the matrices, at least one of them a product.
        entry_sums: the sum of the entries of each term, [] or [n]; None for a product.
    """
    totals = []
    for (parts, scales), known in zip(terms, entry_sums, strict=True):
        scale = _value(scales)
        total = (parts[0].sum(1) * parts[-1].sum(2)).sum(1) if known is None else known
        totals.append(total * (scale.view(-1) if isinstance(scale, Tensor) else scale))
    return torch.stack(torch.broadcast_tensors(*totals)).sum(0)  # type: ignore[no-untyped-call]


def weighted_sum(weights: Tensor, terms: Terms) -> Tensor:
    """Return [1, a * b] the sum of the clients' matrices, by weights [1, n]."""
    left, right = next(parts for parts, _ in terms if len(parts) == 2)
    total = weights.new_zeros(left.shape[1], right.shape[2])
    for parts, scale in _with_values(terms):
        factors = weights * (scale.view(1, -1) if isinstance(scale, Tensor) else scale)
        if len(parts) == 2:
            weighted = (parts[0].mT * factors.view(-1, 1, 1)).flatten(0, 1).t()
            add_product(total, weighted, parts[1].reshape(-1, parts[1].shape[2]), 1.0)
        elif parts[0].ndim == 3:
            total.view(1, -1).addmm_(factors, parts[0].reshape(len(parts[0]), -1))
        else:
            total.addcmul_(parts[0], factors.sum())
    return total.view(1, -1)


def dense(terms: Terms) -> Tensor:
    """Return the matrices, [n, a, b], of terms with a product among them."""
    valued = _with_values(terms)
    out = bmm(*_joined_factors(valued))
    for parts, scale in valued:
        if len(parts) == 2:
            continue
        if isinstance(scale, Tensor):
            out.addcmul_(parts[0], scale)
        else:
            out.add_(parts[0], alpha=scale)
    return out


def factors_or_dense(terms: Terms) -> Tensor | tuple[Tensor, Tensor]:
    """Return the factors of the matrices, [n, a, r] and [n, r, b], or only the matrices.

    Factors are returned where every term is a product and they are less work in the next round.
    """
    nonzero = [(parts, scale) for parts, scale in _with_values(terms) if not _is_zero(scale)]
    if not nonzero or any(len(parts) == 1 for parts, _ in nonzero):
        return dense(terms)
    rank = sum(parts[0].shape[2] for parts, _ in nonzero)
    (left, right), _ = nonzero[0]
    if not saves_work(rank, left.shape[1], right.shape[2]):
        return dense(terms)
    return _joined_factors(nonzero)


def _joined_factors(valued: ValuedTerms) -> tuple[Tensor, Tensor]:
    """Return the factors of all products among terms, one beside the other."""
    pairs = [(parts[0] * scale, parts[1]) for parts, scale in valued if len(parts) == 2]
    left = torch.cat([left for left, _ in pairs], dim=2)
    return left, torch.cat([right for _, right in pairs], dim=1)


def _with_values(terms: Terms) -> ValuedTerms:
    """Return the terms with their scales' values, without matrices that are scaled by zero."""
    valued = [(parts, _value(scales)) for parts, scales in terms]
    return [(parts, scale) for parts, scale in valued if len(parts) == 2 or not _is_zero(scale)]


def _is_zero(scale: float | Tensor) -> bool:
    """Return whether a scale is zero for every client, as far as that is known on the CPU."""
    return isinstance(scale, Tensor) and scale.device.type == "cpu" and not scale.any()


def _value(scales: Sequence[TermScale]) -> float | Tensor:
    """Return the sum of scales, a number or [n, 1, 1]; 0 where they cancel up to rounding.

    SCAFFOLD's new c_k is c_k less S times lr c_k / (S lr): rounding would leave something of it.
    """
    total: float | Tensor = 0.0
    size: float | Tensor = 0.0
    for number, factors in scales:
        value: float | Tensor = number
        for factor in factors:
            value = factor * value
        total = value + total
        size = (value.abs() if isinstance(value, Tensor) else abs(value)) + size
    if isinstance(total, Tensor) and len(scales) > 1:
        return total * (total.abs() > ROUNDING * torch.finfo(total.dtype).eps * size)
    return total
