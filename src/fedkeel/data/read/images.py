"""Bringing images to one shape, and inputs to mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedkeel.errors import DataError

_LUMA = (0.299, 0.587, 0.114)  # red, green, blue; ITU-R BT.601

CONSTANT = 1e30
"""Deviation on record of what was the same in all training examples: (x - mean) / it is nothing."""

_ROWS = 1024  # examples handled at a time, so that no copy of a whole set is made

_PIXEL_EPS = 0.001 / 255
"""Added to the deviation of a pixel, as in FedProx's recipe, whose images have values to 255."""


@dataclass(frozen=True)
class Scale:
    """Mean and deviation of each channel of images, or of each column of a table. F of them.

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

    def apply_(self, x: Tensor) -> None:
        """Standardise [N, F, ...] in place."""
        view = (-1, *([1] * (x.ndim - 2)))
        mean, std = (t.to(x.dtype).reshape(view) for t in (self.mean, self.std))
        constant = self.std == 0
        x.sub_(mean).div_(torch.where(std == 0, torch.ones_like(std), std))
        if bool(constant.any()):
            x[:, constant] = 0

    def recorded(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation for the record: (x - mean) / deviation does as `apply_`."""
        std = torch.where(self.std == 0, torch.full_like(self.std, CONSTANT), self.std)
        return tuple(self.mean.tolist()), tuple(std.tolist())


def measure_scale(x: Tensor, eps: float = 0.0) -> Scale:
    """Return the mean and deviation of [N, F, ...] for each F, over all other axes.

    Computed in float64 in two passes, so that a column of large numbers that differ by little is
    not lost to rounding. The deviation is that of the population (divided by the count), plus
    `eps` where it is not 0.
    """
    other_axes = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() // x.shape[1]
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for part in torch.split(x, _ROWS):
        total += part.sum(other_axes, dtype=torch.float64)
    mean = total / count
    squares = torch.zeros_like(mean)
    for part in torch.split(x, _ROWS):
        deviation = part.to(torch.float64) - mean.reshape(-1, *([1] * (x.ndim - 2)))
        squares += deviation.square_().sum(other_axes)
    low, high = x.amin(other_axes), x.amax(other_axes)
    std = torch.where(low == high, torch.zeros_like(mean), (squares / count).sqrt_() + eps)
    return Scale(mean, std)


def normalise(train: Tensor, test: Tensor, how: str) -> Scale | None:
    """Normalise inputs in place by the training inputs, and return the scale that was used.

    Args:
        train: [N, ...] training inputs, floating point.
        test: [M, ...] test inputs.
        how: see `fedkeel.config.Data`; other ways than ``standardize`` and ``pixels`` do nothing.
    """
    if how == "pixels":  # each number of an input is a column
        halves = (train.flatten(1), test.flatten(1))
        scale = measure_scale(halves[0], _PIXEL_EPS)
    elif how == "standardize":
        halves = (train, test)
        scale = measure_scale(train)
    else:
        return None
    for half in halves:
        scale.apply_(half)
    return scale


def write_images(out: Tensor, x: Tensor, name: str) -> None:
    """Write images of any size into `out`, as numbers in [0, 1] and in the shape of `out`.

    Sizes are changed by bilinear interpolation with antialiasing, one channel becomes three by
    repeating it, three become one by the luma of ITU-R BT.601.

    Args:
        out: [N, C, H, W] floating point, overwritten.
        x: [N, c, h, w]; uint8 with 255 for white, or floating point that is taken as it is.
        name: what to call the images in messages.

    Raises:
        DataError: the channels are neither equal nor one and three.
    """
    channels, size = out.shape[1], tuple(out.shape[2:])
    present = x.shape[1]
    if present != channels and {present, channels} != {1, 3}:
        raise DataError(
            f"{name}: the images cannot be brought to {channels} channels.",
            got=f"{present} channels",
            expected="the same number of channels, or 1 and 3",
            do="set data.shape to what the images are",
        )
    for to, part in zip(torch.split(out, _ROWS), torch.split(x, _ROWS), strict=True):
        if part.dtype == torch.uint8 and present == channels and tuple(part.shape[2:]) == size:
            to.copy_(part).div_(255)
            continue
        image = part.to(out.dtype)
        if part.dtype == torch.uint8:
            image = image.div_(255)
        if present == 3 and channels == 1:
            luma = torch.tensor(_LUMA, dtype=image.dtype).reshape(1, 3, 1, 1)
            image = (image * luma).sum(1, keepdim=True)
        if tuple(image.shape[2:]) != size:
            image = torch.nn.functional.interpolate(
                image, size=size, mode="bilinear", antialias=True
            )
        to.copy_(image)  # one channel is repeated by broadcasting


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as people write it.

    >>> shape_text((3, 32, 32))
    '3x32x32'
    """
    return "x".join(str(side) for side in shape) or "a single number"
