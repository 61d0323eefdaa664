"""Bringing inputs to mean 0 and deviation 1: by all clients' examples, or by each client's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedkeel.data.user_arrays import Ints
from fedkeel.errors import DataError

Channels = Literal["first", "last"]
"""Which axis of an input has the channels: the first of [C, T], or the last of [T, C]."""

CONSTANT = 1e30
"""Recorded deviation of a value that all training examples share: (x - mean) / CONSTANT is 0."""

_ROWS = 1024  # examples handled at a time, so that no copy of a whole set is made

_PIXEL_EPS = 0.001 / 255
"""Added to the deviation of a pixel, as in FedProx's recipe, whose images have values to 255."""


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of each channel or column, or of each single number. F of them.

    `spread` says which numbers of an input they are for.

    Args:
        mean: [F] float64.
        std: [F] float64, >= 0; what has deviation 0 becomes 0.
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Return the scale of F numbers each."""
        return cls(*(torch.tensor(values, dtype=torch.float64) for values in (mean, std)))

    def applied(self, x: Tensor) -> Tensor:
        """Return inputs [N, ...] standardised, as new memory."""
        out = x.clone()
        self.apply_(out)
        return out

    def apply_(self, x: Tensor) -> None:
        """Standardise inputs [N, ...] in place."""
        mean, std = (spread(t.to(x.dtype), x.shape[1:]) for t in (self.mean, self.std))
        constant = self.std == 0
        x.sub_(mean).div_(torch.where(std == 0, torch.ones_like(std), std))
        if bool(constant.any()):
            x.masked_fill_(spread(constant, x.shape[1:]), 0)

    def of_last_axis(self, shape: Sequence[int]) -> Scale:
        """Return the scale of the last axis of inputs of a shape, so that `spread` finds it.

        Where the first axis is as long, this is a mean and a deviation of each single number.
        """
        if len(self.mean) == recorded_width(shape, "last"):
            return self
        return Scale(*(t.expand(tuple(shape)).flatten() for t in (self.mean, self.std)))

    def without(self, columns: Tensor) -> Scale:
        """Return the scale that leaves the columns as they are for which [F] `columns` is true."""
        zero, unit = torch.zeros_like(self.mean), torch.ones_like(self.std)
        return Scale(torch.where(columns, zero, self.mean), torch.where(columns, unit, self.std))

    def recorded(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation for the record: (x - mean) / deviation does as `apply_`."""
        std = torch.where(self.std == 0, torch.full_like(self.std, CONSTANT), self.std)
        return tuple(self.mean.tolist()), tuple(std.tolist())


@dataclass(frozen=True)
class Moments:
    """Sums of some inputs that give their scale, and that of all clients' when they are merged.

    Args:
        count: numbers in each column.
        mean: [F] float64 mean of each column.
        squares: [F] float64 sum of the squared deviations from it; 0 where all numbers are equal.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """Return the sums of inputs [N, F, ...] for each F, over all other axes.

        Computed in float64 in two passes, so that a column of large numbers that differ by little
        is not lost to rounding.
        """
        other_axes = [axis for axis in range(x.ndim) if axis != 1]
        count = x.numel() // x.shape[1]
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for part in torch.split(x, _ROWS):
            total += part.sum(other_axes, dtype=torch.float64)
        low = x.amin(other_axes).to(torch.float64)
        is_constant = low == x.amax(other_axes).to(torch.float64)
        mean = torch.where(is_constant, low, total / count)
        squares = torch.zeros_like(mean)
        for part in torch.split(x, _ROWS):
            deviation = part.to(torch.float64) - mean.reshape(-1, *([1] * (x.ndim - 2)))
            squares += deviation.square_().sum(other_axes)
        return cls(count, mean, squares)

    def merged(self, other: Moments) -> Moments:
        """Return the sums of both inputs together, without a difference of large numbers.

        Source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for
            computing sample variances", Eq. (2.1).
        """
        count = self.count + other.count
        step = other.mean - self.mean
        return Moments(
            count,
            self.mean + step * (other.count / count),
            self.squares + other.squares + step.square() * (self.count * other.count / count),
        )

    def without(self, columns: Tensor) -> Moments:
        """Return sums whose scale leaves columns as they are where [F] `columns` is true."""
        count = torch.full_like(self.squares, self.count)
        return Moments(
            self.count,
            torch.where(columns, torch.zeros_like(self.mean), self.mean),
            torch.where(columns, count, self.squares),
        )

    def scale(self, eps: float = 0.0) -> Scale:
        """Return mean and deviation of each column.

        The deviation is that of the population (divided by the count), plus `eps` where it is not
        0.
        """
        std = (self.squares / self.count).sqrt()
        return Scale(self.mean, torch.where(std == 0, std, std + eps))


def spread(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the F numbers of a scale so that they broadcast over inputs [N, ...].

    They are for the first axis of an input where this has F places, for its single numbers where
    there are F, and else for its last axis.

    Args:
        values: [F].
        shape: shape of one input.

    Raises:
        ValueError: there are F of none of these.

    >>> [tuple(spread(torch.zeros(n), (4, 3)).shape) for n in (4, 12, 3)]
    [(4, 1), (4, 3), (3,)]
    """
    count = len(values)
    if count == shape[0]:
        return values.reshape(-1, *[1] * (len(shape) - 1))
    if count == math.prod(shape):
        return values.reshape(tuple(shape))
    if count == shape[-1]:
        return values
    raise ValueError(f"a scale of {count} numbers for inputs of shape {list(shape)}")


def recorded_width(shape: Sequence[int], channels: Channels) -> int:
    """Return F of a scale of channels, as it is recorded: see `Scale.of_last_axis`."""
    if channels == "first":
        return shape[0]
    return shape[-1] if shape[0] != shape[-1] else math.prod(shape)


def measure_scale(x: Tensor, eps: float = 0.0, channels: Channels = "first") -> Scale:
    """Return the mean and deviation of each channel of [N, ...], over all other axes.

    Args:
        x: the inputs.
        eps: added to each deviation that is not 0.
        channels: the axis of an input that has them.
    """
    if channels == "first":
        return Moments.of(x).scale(eps)
    return Moments.of(x.movedim(-1, 1)).scale(eps).of_last_axis(x.shape[1:])


def check_channels(shape: Sequence[int], channels: Channels, is_image: bool, what: str) -> None:
    """Refuse channels on the last axis of inputs that have one axis, or have it elsewhere.

    Args:
        shape: shape of one input.
        channels: the axis that is declared.
        is_image: whether they were read as images, which are [C, H, W].
        what: what to call the setting in messages.

    Raises:
        DataError: so it is.
    """
    if channels == "first" or not (is_image or len(shape) < 2):
        return
    raise DataError(
        f"{what} = 'last' is for series [steps, channels] and other inputs of two axes or more.",
        got="images, whose channels are the first axis" if is_image else "a table or one axis",
        do=f"leave {what} out: each {'channel' if is_image else 'column'} is standardised "
        "by itself",
    )


def normalise(
    train: Tensor,
    test: Tensor,
    how: str,
    binary: Tensor | None = None,
    channels: Channels = "first",
) -> Scale | None:
    """Normalise inputs in place by the training inputs, and return the scale that was used.

    Args:
        train: [N, ...] training inputs, floating point.
        test: [M, ...] test inputs.
        how: see `fedkeel.config.Data`; other ways than ``standardize`` and ``pixels`` do nothing.
        binary: [F] whether a column of a table is 0 or 1 and stays so; None for none.
        channels: the axis of an input that ``standardize`` takes for channels.
    """
    if how == "pixels":  # each number of an input is a column
        scale = measure_scale(train.flatten(1), _PIXEL_EPS)
    elif how == "standardize":
        scale = measure_scale(train, channels=channels)
    else:
        return None
    scale = scale if binary is None else scale.without(binary)
    for half in (train, test):
        scale.apply_(half)
    return scale


def normalise_clients(
    train: Tensor,
    test: Tensor,
    train_clients: Ints,
    test_clients: Ints,
    binary: Tensor | None = None,
    channels: Channels = "first",
) -> dict[int, Scale]:
    """Standardise inputs in place, each client's by its own training inputs.

    Test inputs of a client without training inputs are standardised by those of all clients.

    Args:
        train: [N, ...] training inputs, floating point.
        test: [M, ...] test inputs.
        train_clients: [N] client of each.
        test_clients: [M] client of each.
        binary: as in `normalise`.
        channels: as in `normalise`.

    Returns:
        The scale of each client.
    """
    clients = np.unique(train_clients).tolist()
    others = torch.from_numpy(np.flatnonzero(~np.isin(test_clients, clients)))
    common = measure_scale(train, channels=channels) if len(others) else None
    scales = {}
    for client in clients:
        rows = torch.from_numpy(np.flatnonzero(train_clients == client))
        inputs = train[rows]
        scale = measure_scale(inputs, channels=channels)
        scales[client] = scale if binary is None else scale.without(binary)
        test_rows = torch.from_numpy(np.flatnonzero(test_clients == client))
        for half, index in ((train, rows), (test, test_rows)):
            half[index] = scales[client].applied(half[index])
    if common is not None:
        common = common if binary is None else common.without(binary)
        test[others] = common.applied(test[others])
    return scales
