"""Random changes to images while training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Crops:
    """Where images are cropped, and which are mirrored.

    Args:
        offsets: [2, B] first row and column of each crop, in the padded image, int64.
        mirrored: [B] whether each is mirrored.
        padding: zeros on each side, in pixels.
    """

    offsets: Tensor
    mirrored: Tensor
    padding: int = 4


def crops(generator: np.random.Generator, batch: int, padding: int = 4) -> Crops:
    """Draw the crops of B images: offsets uniform in 0..2 * padding, half of them mirrored.

    Args:
        generator: where they come from; the same stream gives the same crops.
        batch: B.
        padding: zeros on each side, in pixels, >= 0.
    """
    offsets = generator.integers(0, 2 * padding + 1, size=(2, batch))
    mirrored = generator.random(batch) < 0.5
    return Crops(torch.from_numpy(offsets), torch.from_numpy(mirrored), padding)


def crop_flip(x: Tensor, where: Crops) -> Tensor:
    """Pad images with zeros, crop each to its size, and mirror some.

    The border is zero in the numbers that come in. On normalised images that is the mean colour,
    where code that pads before it normalises has black.

    Args:
        x: [B, C, H, W] images, left unchanged.
        where: the crops of the B images, on the same device.

    Returns:
        [B, C, H, W], new memory, on the device of `x`.

    >>> crop_flip(torch.ones(1, 1, 2, 2), crops(np.random.default_rng(0), 1, padding=0)).sum()
    tensor(4.)
    """
    batch, channels, height, width = x.shape
    padding = where.padding
    ahead = torch.arange(width, device=x.device)
    turned = torch.where(where.mirrored[:, None], ahead.flip(0), ahead)
    columns = where.offsets[1][:, None] + turned  # [B, W]
    rows = where.offsets[0][:, None] + torch.arange(height, device=x.device)  # [B, H]
    pixels = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]  # [B, H, W]
    index = pixels.reshape(batch, 1, -1)
    padded = torch.nn.functional.pad(x, (padding, padding, padding, padding))
    picked = padded.flatten(2).gather(2, index.expand(-1, channels, -1))
    return picked.reshape(x.shape)
