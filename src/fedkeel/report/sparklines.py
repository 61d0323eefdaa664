"""Small SVG pictures that need no script: best accuracies, and diagnostics over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.records.statistics import Stat
from fedkeel.report.chart_style import evenly_spaced
from fedkeel.report.formatting import format_accuracy, format_percent
from fedkeel.report.runs import MethodResults

WIDTH, HEIGHT = 120.0, 26.0
"""Units of a sparkline's box."""


@dataclass(frozen=True)
class AxisTick:
    """A tick of the accuracy axis: its position in percent of the width, and its label."""

    position: float
    label: str


@dataclass(frozen=True)
class AccuracyStrip:
    """The best accuracies of one method, with positions in percent of the width.

    Args:
        label: the method.
        index: place of the method, which decides its colour.
        seeds: position of each seed.
        mean: position of the mean.
        low: position of the lowest seed.
        high: position of the highest seed.
        text: "91.2 ± 0.8 %".
        description: the same in words, for readers who cannot see the picture.
        is_best: whether the method is the best or tied with it.
    """

    label: str
    index: int
    seeds: tuple[float, ...]
    mean: float
    low: float
    high: float
    text: str
    description: str
    is_best: bool


@dataclass(frozen=True)
class AccuracyStrips:
    """The best accuracies of all methods on one axis."""

    strips: tuple[AccuracyStrip, ...]
    ticks: tuple[AxisTick, ...]


def accuracy_strips(methods: Sequence[MethodResults], is_best: Sequence[bool]) -> AccuracyStrips:
    """Return the best accuracy of each method that has been evaluated.

    Args:
        methods: the methods.
        is_best: for each, whether it is the best or tied with it.
    """
    scored = [
        (method, best, stat)
        for method, best in zip(methods, is_best, strict=True)
        if (stat := method.summary.stat("best")) is not None
    ]
    if not scored:
        return AccuracyStrips((), ())
    ticks = axis_ticks(min(stat.min for *_, stat in scored), max(stat.max for *_, stat in scored))
    low, high = ticks[0], ticks[-1]

    def position(accuracy: float) -> float:
        return round(2 + 96 * (accuracy - low) / (high - low), 3)

    strips = tuple(
        AccuracyStrip(
            label=method.label,
            index=method.index,
            seeds=tuple(position(value) for value in method.summary.values("best")),
            mean=position(stat.mean),
            low=position(stat.min),
            high=position(stat.max),
            text=format_accuracy(stat),
            description=_description(method, stat),
            is_best=best,
        )
        for method, best, stat in scored
    )
    step = 100 * (ticks[1] - ticks[0]) + 1e-9
    decimals = 0 if step >= 1 else 1 if step >= 0.1 else 2
    labels = (AxisTick(position(tick), format_percent(tick, decimals)) for tick in ticks)
    return AccuracyStrips(strips, tuple(labels))


def axis_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that enclose a range.

    >>> [round(t, 4) for t in axis_ticks(0.873, 0.921)]
    [0.86, 0.88, 0.9, 0.92, 0.94]
    """
    raw_step = max(high - low, 1e-3) / wanted
    size = 10 ** math.floor(math.log10(raw_step))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


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


def _description(method: MethodResults, stat: Stat) -> str:
    low, high = format_percent(stat.min, 2), format_percent(stat.max, 2)
    seeds = f"{stat.count} seeds from {low} to {high} %" if stat.count > 1 else "one seed"
    return f"{method.label}: best {format_percent(stat.mean, 2)} %, {seeds}"
