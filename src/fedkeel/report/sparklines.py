"""Small SVG pictures that need no script: an axis of accuracies, and lines of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.report.chart_style import evenly_spaced
from fedkeel.report.formatting import format_percent
from fedkeel.report.summary import MethodSummary

WIDTH, HEIGHT = 120.0, 26.0
"""Units of a sparkline's box."""


@dataclass(frozen=True)
class AccuracyAxis:
    """The axis on which the page draws the best accuracies of all methods.

    Args:
        ticks: at least two accuracies, ascending, at equal distances.
    """

    ticks: tuple[float, ...]

    def position(self, accuracy: float) -> float:
        """Return where an accuracy is drawn, in percent of the width."""
        low, high = self.ticks[0], self.ticks[-1]
        return round(2 + 96 * (accuracy - low) / (high - low), 3)

    def label(self, tick: float) -> str:
        """Return the text of a tick, in percent."""
        step = 100 * (self.ticks[1] - self.ticks[0]) + 1e-9
        return format_percent(tick, 0 if step >= 1 else 1 if step >= 0.1 else 2)


def accuracy_axis(methods: Sequence[MethodSummary]) -> AccuracyAxis | None:
    """Return an axis for the best accuracies, or None where no method has been evaluated."""
    accuracies = [value for method in methods for value in method.values("best")]
    return AccuracyAxis(axis_ticks(min(accuracies), max(accuracies))) if accuracies else None


def axis_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return about five round numbers that enclose a range.

    >>> [round(t, 4) for t in axis_ticks(0.873, 0.921)]
    [0.86, 0.88, 0.9, 0.92, 0.94]
    """
    raw_step = max(high - low, 1e-3) / 4
    size = 10 ** math.floor(math.log10(raw_step))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(i * step for i in range(first, max(last, first + 1) + 1))


def sparkline(values: Sequence[float | None]) -> tuple[str, ...]:
    """Return the points of one SVG polyline for each stretch without a gap.

    >>> sparkline([0.0, 1.0, None, 1.0])
    ('0.0,24.0 40.0,2.0', '120.0,2.0')
    """
    known = [value for value in values if value is not None]
    if not known:
        return ()
    low, value_range = min(known), max(known) - min(known)
    last_index = max(len(values) - 1, 1)
    lines: list[list[str]] = [[]]
    for i in evenly_spaced(len(values), int(WIDTH)):
        value = values[i]
        if value is None:
            lines.append([])
            continue
        height = (value - low) / value_range if value_range else 0.5
        x, y = WIDTH * i / last_index, HEIGHT - 2 - (HEIGHT - 4) * height
        lines[-1].append(f"{x:.1f},{y:.1f}")
    return tuple(" ".join(line) for line in lines if line)
