"""Small SVG pictures that need no script: an axis of scores, and lines of diagnostics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.records.score import MetricInfo
from fedkeel.report.chart_style import evenly_spaced
from fedkeel.report.formatting import format_signed
from fedkeel.report.summary import MethodSummary, shared_score

WIDTH, HEIGHT = 120.0, 26.0
"""Units of a sparkline's box."""


@dataclass(frozen=True)
class ScoreAxis:
    """The axis on which the page draws the best scores of all methods.

    Args:
        ticks: at least two scores, ascending, at equal distances.
        score: what they are.
    """

    ticks: tuple[float, ...]
    score: MetricInfo

    def position(self, value: float) -> float:
        """Return where a score is drawn, in percent of the width."""
        low, high = self.ticks[0], self.ticks[-1]
        return round(2 + 96 * (value - low) / (high - low), 3)

    def label(self, tick: float) -> str:
        """Return the text of a tick, a share in percent."""
        step = self.score.scale * (self.ticks[1] - self.ticks[0])
        if not self.score.is_share and not 1e-6 < step < 1e6:
            return f"{tick:.3g}"
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return format_signed(self.score.scale * tick, decimals)


def score_axis(methods: Sequence[MethodSummary]) -> ScoreAxis | None:
    """Return an axis for the best scores.

    None where no method has been evaluated, or their scores are several.
    """
    score = shared_score(methods)
    values = [value for method in methods for value in method.values("best")]
    if score is None or not values:
        return None
    low, high = min(values), max(values)
    least = 1e-3 if score.is_share else 1e-3 * max(abs(low), abs(high)) or 1e-3
    return ScoreAxis(axis_ticks(low, high, least), score)


def axis_ticks(low: float, high: float, least: float = 1e-3) -> tuple[float, ...]:
    """Return about five round numbers that enclose a range, which counts as `least` at least.

    >>> [round(t, 4) for t in axis_ticks(0.873, 0.921)]
    [0.86, 0.88, 0.9, 0.92, 0.94]
    """
    raw_step = max(high - low, least) / 4
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
