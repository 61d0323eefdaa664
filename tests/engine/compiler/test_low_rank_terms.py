"""Computing with the terms of matrices gives what computing with the matrices gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedkeel.engine.compiler.low_rank_terms import (
    Terms,
    TermScale,
    dense,
    factors_or_dense,
    multiply,
    sum_of_entries,
    weighted_sum,
)

N, BATCH, A, B = 3, 2, 5, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def whole(terms: Terms) -> Tensor:
    """The matrices, [n, a, b], term after term."""
    total = torch.zeros(N, A, B, dtype=torch.float64)
    for parts, scales in terms:
        value = parts[0] if len(parts) == 1 else torch.bmm(*parts)
        for number, factors in scales:
            one = value * number
            for factor in factors:
                one = one * factor
            total = total + one
    return total


def sample() -> tuple[Terms, Tensor, Tensor]:
    """Terms of a step's products, of what was sent, of what clients keep; and the latter two."""
    torch.manual_seed(3)
    per_client = normal(N, 1, 1)
    sent, kept = normal(A, B), normal(N, A, B)
    terms: Terms = (
        (
            (normal(N, A, BATCH), normal(N, BATCH, B)),
            ((-1.0, (0.1,)), (0.5, (per_client,))),
        ),
        ((sent,), ((1.0, ()),)),
        ((kept,), ((2.0, (0.1, per_client)), (1.0, ()))),
    )
    return terms, sent, kept


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-12)


def test_terms_give_what_the_matrices_give() -> None:
    terms, sent, kept = sample()
    matrices = whole(terms)
    assert close(dense(terms), matrices)
    x, y = normal(N, 6, A), normal(N, 6, B)
    assert close(multiply(x, False, terms), torch.bmm(x, matrices))
    assert close(multiply(y, True, terms), torch.bmm(y, matrices.mT))
    weights = normal(1, N)
    assert close(weighted_sum(weights, terms), weights @ matrices.flatten(1))
    sums = (None, sent.sum(), kept.sum((1, 2)))
    assert close(sum_of_entries(terms, sums), matrices.sum((1, 2)))


def scaffold(steps: int, rate: float, dtype: torch.dtype) -> tuple[TermScale, ...]:
    """What c_k is multiplied by in the new c_k: 1 - S lr / (S lr), as it is worked out."""
    inverse = -1.0 / (steps * torch.full((N, 1, 1), rate, dtype=dtype))
    return (1.0, ()), *((1.0, (rate, inverse)) for _ in range(steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cancels_is_not_looked_at(dtype: torch.dtype) -> None:
    """Also where rounding leaves something of it: a kept matrix may be of any size."""
    left = 0
    product = (
        torch.randn(N, A, BATCH, dtype=dtype),
        torch.randn(N, BATCH, B, dtype=dtype),
    )
    for steps in range(1, 9):
        for rate in (0.1, 0.05, 0.03, 0.007):
            scales = scaffold(steps, rate, dtype)
            total = sum(torch.as_tensor(n) * f[0] * f[1] for n, f in scales[1:]) + 1.0
            left += int(bool(torch.as_tensor(total).any()))
            kept = torch.full((N, A, B), float("inf"), dtype=dtype)
            found = dense(((product, ((1.0, ()),)), ((kept,), scales)))
            assert torch.equal(found, torch.bmm(*product))
    assert left > 5  # of 32


def test_what_does_not_cancel_is() -> None:
    terms, _, kept = sample()
    small = torch.tensor([1e-9, 0.0, -1e-9], dtype=torch.float64).view(N, 1, 1)
    found = dense((*terms[:1], ((kept,), ((1.0, (small,)), (1e-12, (small,))))))
    assert close(found - whole(terms[:1]), kept * small)
    assert (found != whole(terms[:1]))[[0, 2]].any()


@pytest.mark.parametrize(("rank", "are_factors"), [(1, True), (2, False)])
def test_factors_are_returned_where_the_next_round_can_begin_with_them(
    rank: int, are_factors: bool
) -> None:
    """The next round adds as many terms: otherwise factors and matrices would take turns."""
    terms: Terms = (((normal(N, 10, rank), normal(N, rank, 8)), ((-1.0, (0.1,)),)),)
    result = factors_or_dense(terms)
    assert isinstance(result, tuple) == are_factors
    product = torch.bmm(*result) if isinstance(result, tuple) else result
    assert close(product, -0.1 * torch.bmm(*terms[0][0]))
