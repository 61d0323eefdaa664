"""What diagnostics leave of a round: numbers, and numbers by layer, class, client or position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fedkeel.features.diagnose.updates import layers_of
from fedkeel.method.context import Floats


@dataclass(frozen=True)
class RoundDiagnostics:
    """Diagnostics of a round.

    Args:
        numbers: by name, ``kind.quantity``.
        breakdowns: by name and axis, ``kind.quantity.axis``: a number for each label on the axis,
            which is ``layer``, ``class``, ``client`` or ``position``.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    breakdowns: dict[str, dict[str, float]] = field(default_factory=dict)

    def __or__(self, other: RoundDiagnostics) -> RoundDiagnostics:
        """Return both together."""
        return RoundDiagnostics(self.numbers | other.numbers, self.breakdowns | other.breakdowns)

    def named(self, kind: str) -> RoundDiagnostics:
        """Return the same with the kind before each name."""
        return RoundDiagnostics(
            {f"{kind}.{name}": value for name, value in self.numbers.items()},
            {f"{kind}.{name}": value for name, value in self.breakdowns.items()},
        )


def mean(values: Tensor | Floats) -> float:
    """Return the mean of the numbers that are not NaN; NaN where there are none."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if len(known) else math.nan


def by_layer(
    updates: Mapping[str, Tensor], function: Callable[[Mapping[str, Tensor]], float]
) -> dict[str, float]:
    """Return a number for each layer, of the tensors of the layer."""
    return {layer: function(part) for layer, part in layers_of(updates).items()}
