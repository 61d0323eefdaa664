"""Inputs as pictures for a page."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image
from torch import Tensor

from fedkeel.records.audit import Picture
from fedkeel.study.audit.quality import ReconstructionQuality, Units

MOST = 8
"""Pictures that a result keeps."""


def pictures_of(
    inputs: Tensor, originals: Tensor, compared: ReconstructionQuality, units: Units
) -> tuple[Picture, ...]:
    """Return the pairs of a comparison as pictures, the best first; () of what is not a picture.

    Args:
        inputs: [m, C, H, W] reconstructions.
        originals: [n, C, H, W] originals.
        compared: which belong together.
        units: what their values mean.
    """
    if originals.ndim != 4 or originals.shape[1] not in (1, 3):
        return ()
    best = np.argsort(-np.array(compared.psnr), kind="stable")[:MOST]
    return tuple(
        Picture(
            original=data_uri(units.raw(originals[compared.pairs[k][1]]), units),
            found=data_uri(units.raw(inputs[compared.pairs[k][0]]), units),
            psnr=compared.psnr[k],
        )
        for k in best
    )


def data_uri(raw: Tensor, units: Units) -> str:
    """Return a PNG of one input [C, H, W] in its first units."""
    unit = (raw - units.low) / max(units.high - units.low, 1e-12)
    grey = (255.0 * unit.clamp(0.0, 1.0)).round().numpy().astype(np.uint8)
    image = Image.fromarray(grey[0] if len(grey) == 1 else np.moveaxis(grey, 0, -1))
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
