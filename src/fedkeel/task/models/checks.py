"""Checks of the arguments of networks, with messages that name the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from fedkeel.errors import ModelError

_DEEPEST = 1000
"""Layers that an argument may ask for, at most."""


def input_size(shape: Sequence[int]) -> int:
    """Return how many numbers one input has.

    >>> input_size((1, 28, 28))
    784
    """
    if not shape or not all(_is_positive_int(n) for n in shape):
        raise ModelError(
            "the shape of one input must be one or more whole numbers >= 1",
            got=f"shape {tuple(shape)}",
        )
    return math.prod(shape)


def image_shape(shape: Sequence[int], min_side: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of images that have at least `min_side` pixels a side.

    >>> image_shape((3, 32, 32), min_side=4)
    (3, 32, 32)
    """
    input_size(shape)
    if len(shape) != 3:
        raise ModelError(
            "the network takes images",
            got=f"inputs of shape {tuple(shape)}",
            expected="(channels, height, width)",
            do="give the data that shape, or take a network for any shape, such as 'mlp'",
        )
    channels, height, width = shape
    if min(height, width) < min_side:
        raise ModelError(
            "the images are too small for the network",
            got=f"{height} x {width} pixels",
            expected=f"at least {min_side} x {min_side}",
            why="its convolutions and pools would leave nothing",
            do="enlarge the images, or take a network for smaller ones, such as 'cnn_gcfed'",
        )
    return channels, height, width


def positive_int(name: str, value: object) -> int:
    """Return an argument that is a whole number >= 1."""
    if not _is_positive_int(value):
        raise ModelError(f"`{name}` must be a whole number >= 1", got=repr(value))
    return value


def depth(name: str, value: object) -> int:
    """Return an argument that is a number of layers, of which each takes time to make."""
    layers = positive_int(name, value)
    if layers > _DEEPEST:
        raise ModelError(f"`{name}` must be at most {_DEEPEST}", got=repr(value))
    return layers


def positive_ints(name: str, value: object) -> tuple[int, ...]:
    """Return an argument that is one or more whole numbers >= 1."""
    if isinstance(value, list | tuple) and value and all(_is_positive_int(n) for n in value):
        return tuple(value)
    raise ModelError(f"`{name}` must be one or more whole numbers >= 1 in a list", got=repr(value))


def dropout_rate(name: str, value: object) -> float:
    """Return an argument that is a share of units to drop, in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ModelError(f"`{name}` must be a number >= 0 and < 1", got=repr(value))
    return float(value)


def boolean(name: str, value: object) -> bool:
    """Return an argument that is true or false."""
    if not isinstance(value, bool):
        raise ModelError(f"`{name}` must be true or false", got=repr(value))
    return value


def one_of(name: str, value: object, known: Iterable[str]) -> str:
    """Return an argument that is one of the known texts."""
    texts = tuple(known)
    if not isinstance(value, str) or value not in texts:
        raise ModelError(f"`{name}` must be one of: {', '.join(texts)}", got=repr(value))
    return value


def _is_positive_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
