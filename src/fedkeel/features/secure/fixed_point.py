"""Real numbers as whole numbers modulo 2^64, so that masks can be added and taken off exactly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedkeel.features.secure.primitives import SecureSumError, Words

BITS = 42
"""Binary places. A number is rounded to the next multiple of 2^-42, so it is off by 2^-43 at most,
and a sum of K numbers by K 2^-43."""

LARGEST = 2.0**20
"""Absolute value of a number, at most. Nothing is clipped: a larger one is refused. Numbers are
checked before they are multiplied with their shares of a mean. The shares add up to 1 at most, so
the sum is no larger either, and far from 2^63 2^-42, where it would wrap around."""


def in_range(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the numbers, all of which a secure sum can take.

    Raises:
        SecureSumError: one is not finite, or too large.
    """
    size = np.abs(values).max(initial=0.0)
    if not size <= LARGEST:  # also where it is NaN
        raise SecureSumError(
            "A message holds numbers that a secure sum cannot take.",
            got="NaN" if np.isnan(size) else f"{size:.3g}",
            expected=f"numbers between -2^{int(np.log2(LARGEST))} and 2^{int(np.log2(LARGEST))}",
        )
    return values


def encoded(values: NDArray[np.float64]) -> Words:
    """Return [n] numbers in fixed point.

    Raises:
        SecureSumError: one is not finite, or too large.

    >>> decoded(encoded(np.array([0.5, -2.0])) + encoded(np.array([0.25, 1.0])))
    array([ 0.75, -1.  ])
    """
    return np.rint(in_range(values) * 2.0**BITS).astype(np.int64).view(np.uint64)


def decoded(words: Words) -> NDArray[np.float64]:
    """Return [n] numbers of their fixed point, or of a sum of such."""
    return words.view(np.int64).astype(np.float64) / 2.0**BITS
