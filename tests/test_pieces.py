"""Comparisons piece by piece are those of whole tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedkeel.base.pieces import (
    PIECE,
    are_close,
    are_equal,
    largest_difference,
    largest_entry,
    pieces,
)

SIZES = (0, 1, PIECE, PIECE + 1, 3 * PIECE - 2)


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", SIZES)
def test_pieces_hold_every_entry_once(count: int) -> None:
    t = numbers(count)
    assert torch.equal(torch.cat([part for (part,) in pieces(t)]), t)


@pytest.mark.parametrize("count", SIZES[1:])
def test_the_largest_entry_and_difference(count: int) -> None:
    a, b = numbers(count), numbers(count, 1)
    assert largest_entry(a) == float(a.abs().max())
    assert largest_difference(a, b) == float((a - b).abs().max())


def test_of_nothing_they_are_zero() -> None:
    empty = torch.zeros(0, 3)
    assert largest_entry(empty) == largest_difference(empty, empty) == 0.0
    assert are_equal(empty, empty)


def test_entries_of_a_matrix_with_other_strides() -> None:
    a = numbers(2 * PIECE).view(2, PIECE)
    assert are_equal(a.t().contiguous().t(), a)
    assert largest_difference(a.t(), a.t().contiguous()) == 0.0


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 2 * PIECE + 4])
def test_one_other_entry_is_found_wherever_it_lies(place: int) -> None:
    a = numbers(2 * PIECE + 5)
    b = a.clone()
    b[place] += 1e-3
    assert not are_equal(a, b)
    assert are_close(a, b, 0.0, 2e-3)
    assert not are_close(a, b, 0.0, 5e-4)
    b[place] = math.nan
    assert math.isnan(largest_entry(b))
    assert math.isnan(largest_difference(a, b))
    assert are_equal(b, b.clone())
    assert are_close(b, b.clone(), 0.0, 0.0)
    assert not are_equal(a, b)
