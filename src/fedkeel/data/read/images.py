"""Bringing images to one shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.errors import DataError

_LUMA = (0.299, 0.587, 0.114)  # red, green, blue; ITU-R BT.601

_ROWS = 1024  # examples handled at a time, so that no copy of a whole set is made


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
