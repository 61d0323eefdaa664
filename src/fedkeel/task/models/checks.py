"""What the arguments of networks must be, said in the words of who wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from fedkeel.errors import ModelError


def flat(shape: Sequence[int]) -> int:
    """Return how many numbers one input has.

    >>> flat((1, 28, 28))
    784
    """
    if not shape or not all(_positive(n) for n in shape):
        raise ModelError(
            "the shape of one input must be one or more whole numbers >= 1",
            got=f"shape {tuple(shape)}",
        )
    return math.prod(shape)


def image(shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of inputs that are images of at least `least` pixels a side.

    >>> image((3, 32, 32), least=4)
    (3, 32, 32)
    """
    flat(shape)
    if len(shape) != 3:
        raise ModelError(
            "the network takes images",
            got=f"inputs of shape {tuple(shape)}",
            expected="(channels, height, width)",
            do="give the data that shape, or take a network for any shape, such as 'mlp'",
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise ModelError(
            "the images are too small for the network",
            got=f"{height} x {width} pixels",
            expected=f"at least {least} x {least}",
            why="its convolutions and pools would leave nothing",
            do="enlarge the images, or take a network for smaller ones, such as 'cnn_gcfed'",
        )
    return channels, height, width


def whole(name: str, value: object) -> int:
    """Return an argument that is a whole number >= 1."""
    if not _positive(value):
        raise ModelError(f"`{name}` must be a whole number >= 1", got=repr(value))
    return value


def widths(name: str, value: object) -> tuple[int, ...]:
    """Return an argument that is one or more whole numbers >= 1."""
    if isinstance(value, list | tuple) and value and all(_positive(n) for n in value):
        return tuple(value)
    raise ModelError(f"`{name}` must be one or more whole numbers >= 1 in a list", got=repr(value))


def rate(name: str, value: object) -> float:
    """Return an argument that is a share of units to drop: from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ModelError(f"`{name}` must be a number >= 0 and < 1", got=repr(value))
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return an argument that is true or false."""
    if not isinstance(value, bool):
        raise ModelError(f"`{name}` must be true or false", got=repr(value))
    return value


def choice(name: str, value: object, known: Iterable[str]) -> str:
    """Return an argument that is one of some words."""
    words = tuple(known)
    if not isinstance(value, str) or value not in words:
        raise ModelError(f"`{name}` must be one of: {', '.join(words)}", got=repr(value))
    return value


def _positive(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
