"""How good reconstructions are: each is compared with the closest original."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedkeel.data.dataset import ScalePair
from fedkeel.data.read.scaling import spread
from fedkeel.records.audit import RECOVERED

NEARER = 6.0
"""A table's row counts as recovered if it is so many dB nearer than other examples: half as far."""


@dataclass(frozen=True)
class Units:
    """Inputs in the units that they had before they were standardised.

    Args:
        low: smallest value of the training inputs.
        high: largest value; PSNR is relative to high - low.
        mean: what was taken off, to be added again; [...] that broadcasts over an input.
        deviation: what it was divided by.
    """

    low: float
    high: float
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, x: Tensor, scale: ScalePair | None) -> Units:
        """Return the units of training inputs [N, ...].

        Args:
            x: the inputs as the network takes them.
            scale: means and deviations that standardised them; None where nothing did.

        The columns of a table go from 0 to 1: otherwise the one with the largest numbers would
        decide alone how near two rows are.
        """
        if x.ndim == 2:
            table = x.double()
            lows, highs = table.amin(dim=0), table.amax(dim=0)
            extents = torch.where(highs > lows, highs - lows, 1.0)
            return cls(0.0, 1.0, -lows / extents, 1.0 / extents)
        shape = x.shape[1:]
        mean, deviation = ([0.0], [1.0]) if scale is None else map(list, scale)
        means, deviations = (
            spread(torch.tensor(v, dtype=torch.float64), shape if len(v) > 1 else (1,))
            for v in (mean, deviation)
        )
        deviations = torch.where(deviations > 1e29, 0.0, deviations)  # what never varied
        sample = x[torch.linspace(0, len(x) - 1, min(len(x), 2000)).long()].double()
        raw = sample * deviations + means
        return cls(float(raw.min()), float(raw.max()), means, deviations)

    def raw(self, x: Tensor) -> Tensor:
        """Return inputs [n, ...] in their first units."""
        return x.double() * self.deviation + self.mean


@dataclass(frozen=True)
class ReconstructionQuality:
    """Reconstructions next to originals.

    Args:
        pairs: (reconstruction, original) of each that was compared.
        psnr: [p] of each pair, in dB.
        ssim: mean structural similarity of the pairs; None for what is not a picture, or without
            the package torchmetrics.
        originals: number of originals.
        bounds: [p] PSNR from which each counts as recovered; () for `RECOVERED` throughout.
    """

    pairs: tuple[tuple[int, int], ...]
    psnr: tuple[float, ...]
    ssim: float | None
    originals: int
    bounds: tuple[float, ...] = ()

    @property
    def mean_psnr(self) -> float | None:
        """Mean over pairs, in dB; None without any."""
        return float(np.mean(self.psnr)) if self.psnr else None

    @property
    def recovered(self) -> float:
        """Share of the originals whose reconstruction reaches its bound."""
        bounds = self.bounds or (RECOVERED,) * len(self.psnr)
        reached = sum(value >= bound for value, bound in zip(self.psnr, bounds, strict=True))
        return reached / max(self.originals, 1)


def psnr(mse: float, extent: float) -> float:
    """Return 10 log10(extent^2 / mse) in dB, at most 150, where the sum is only rounding."""
    if mse <= 0.0:
        return 150.0
    return min(10.0 * math.log10(extent**2 / mse), 150.0)


def compare(
    inputs: Tensor, originals: Tensor, units: Units, others: Tensor | None = None
) -> ReconstructionQuality:
    """Compare reconstructed inputs [m, ...] with originals [n, ...].

    Each reconstruction belongs to another original, so that the sum of the logarithms of their
    errors is least: an attacker does not know the order. Reconstructions are cut to the range of
    inputs before, as any attacker would.

    Args:
        inputs: the reconstructions, as the network takes them.
        originals: the originals, in the same form.
        units: what their values mean.
        others: [o, ...] examples that nobody trained on, for rows of a table, many of which are
            near each other: a reconstruction then counts only if it is `NEARER` dB nearer to its
            original than all of these are. None for pictures.
    """
    if not len(inputs) or not len(originals):
        return ReconstructionQuality((), (), None, len(originals))
    a = units.raw(inputs).clamp(units.low, units.high)
    b = units.raw(originals)
    errors = _squared_errors(a, b)
    rows, columns = linear_sum_assignment(np.log(errors + 1e-15))
    pairs = tuple(zip(rows.tolist(), columns.tolist(), strict=True))
    values = tuple(psnr(float(errors[i, j]), units.high - units.low) for i, j in pairs)
    bounds: tuple[float, ...] = ()
    if others is not None and len(others):
        near = _squared_errors(units.raw(others), b[columns]).min(axis=0)
        extent = units.high - units.low
        bounds = tuple(max(RECOVERED, psnr(float(error), extent) + NEARER) for error in near)
    return ReconstructionQuality(
        pairs, values, similarity(a[rows], b[columns], units), len(originals), bounds
    )


def _squared_errors(a: Tensor, b: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return [m, n] mean squared errors."""
    rows = [((x - b) ** 2).flatten(1).mean(dim=1) for x in a]
    errors: np.ndarray[tuple[int, int], np.dtype[np.float64]] = torch.stack(rows).numpy()
    return errors


def similarity(a: Tensor, b: Tensor, units: Units) -> float | None:
    """Return the mean structural similarity of pictures [p, C, H, W] with windows of 7 x 7.

    None for other inputs, for pictures that are smaller, or without the package torchmetrics.
    """
    if a.ndim != 4 or min(a.shape[2:]) < 7:
        return None
    try:
        from torchmetrics.functional.image import structural_similarity_index_measure
    except ImportError:
        return None
    value = structural_similarity_index_measure(
        a, b, gaussian_kernel=False, kernel_size=7, data_range=units.high - units.low
    )
    return float(value if isinstance(value, Tensor) else value[0])
