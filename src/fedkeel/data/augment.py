"""Random changes to images while training."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def crop_flip(x: Tensor, generator: np.random.Generator, padding: int = 4) -> Tensor:
    """Pad images with zeros, crop each at random to its size, and mirror half of them.

    The border is zero in the numbers that come in. On normalised images that is the mean colour,
    where code that pads before it normalises has black.

    Args:
        x: [B, C, H, W] images, left unchanged.
        generator: where the offsets and the mirroring come from; the same stream gives the same
            images.
        padding: zeros on each side, in pixels, >= 0. Offsets are uniform in 0..2 * padding.

    Returns:
        [B, C, H, W], new memory, on the device of `x`.

    >>> crop_flip(torch.ones(1, 1, 2, 2), np.random.default_rng(0), padding=0).sum()
    tensor(4.)
    """
    batch, channels, height, width = x.shape
    offsets = generator.integers(0, 2 * padding + 1, size=(2, batch, 1))
    mirrored = generator.random((batch, 1)) < 0.5
    rows = offsets[0] + np.arange(height)  # [B, H]
    ahead = np.arange(width)
    columns = offsets[1] + np.where(mirrored, ahead[::-1], ahead)  # [B, W]
    pixels = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]  # [B, H, W]
    index = torch.from_numpy(pixels).to(x.device).reshape(batch, 1, -1)
    padded = torch.nn.functional.pad(x, (padding, padding, padding, padding))
    picked = padded.flatten(2).gather(2, index.expand(-1, channels, -1))
    return picked.reshape(x.shape)
