"""Small pictures without a script: the strip of results and the line of a diagnostic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.report.chart_style import thin
from fedkeel.report.formatting import percent, spread
from fedkeel.report.runs import Entry
from fedkeel.report.summary import Stat

WIDTH, HEIGHT = 120.0, 26.0
"""Units of a sparkline's box."""


@dataclass(frozen=True)
class Tick:
    """A mark on the strip's axis: where, in percent of the width, and what it says."""

    at: float
    label: str


@dataclass(frozen=True)
class Strip:
    """One method on the strip, every place in percent of the width.

    Args:
        label: the method.
        index: place of the method, which decides its colour.
        seeds: one place for each seed.
        middle: place of the mean.
        low: place of the lowest seed.
        high: place of the highest seed.
        text: "91.2 ± 0.8 %".
        told: the same in words, for those who do not see the picture.
        best: whether the method is the best or tied with it.
    """

    label: str
    index: int
    seeds: tuple[float, ...]
    middle: float
    low: float
    high: float
    text: str
    told: str
    best: bool


def strips(entries: Sequence[Entry], best: Sequence[bool]) -> tuple[list[Strip], list[Tick]]:
    """Return the best accuracy of each method on one axis, seeds as points.

    Args:
        entries: the methods; those never evaluated are left out.
        best: for each, whether it is the best or tied with it.
    """
    known = [
        (entry, mark, stat)
        for entry, mark in zip(entries, best, strict=True)
        if (stat := entry.group.stat("best")) is not None
    ]
    if not known:
        return [], []
    marks = ticks(min(s.min for *_, s in known), max(s.max for *_, s in known))
    low, high = marks[0], marks[-1]

    def place(value: float) -> float:
        return round(2 + 96 * (value - low) / (high - low), 3)

    found = [
        Strip(
            entry.label,
            entry.index,
            tuple(place(v) for v in entry.group.values("best")),
            place(stat.mean),
            place(stat.min),
            place(stat.max),
            f"{spread(stat, scale=100, digits=1)} %",
            _told(entry, stat),
            mark,
        )
        for entry, mark, stat in known
    ]
    step = 100 * (marks[1] - marks[0]) + 1e-9
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2
    return found, [Tick(place(v), percent(v, digits)) for v in marks]


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return round numbers that enclose a range.

    >>> [round(t, 4) for t in ticks(0.873, 0.921)]
    [0.86, 0.88, 0.9, 0.92, 0.94]
    """
    width = max(high - low, 1e-3)
    raw = width / wanted
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [i * step for i in range(first, last + 1)]


def sparkline(values: Sequence[float | None]) -> list[str]:
    """Return the points of one polyline for each stretch without a gap.

    >>> sparkline([0.0, 1.0, None, 1.0])
    ['0.0,24.0 40.0,2.0', '120.0,2.0']
    """
    known = [v for v in values if v is not None]
    if not known:
        return []
    low, width = min(known), max(known) - min(known)
    across = max(len(values) - 1, 1)
    lines: list[list[str]] = [[]]
    for i in thin(len(values), int(WIDTH)):
        value = values[i]
        if value is None:
            lines.append([])
            continue
        height = (value - low) / width if width else 0.5
        x, y = WIDTH * i / across, HEIGHT - 2 - (HEIGHT - 4) * height
        lines[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(line) for line in lines if line]


def _told(entry: Entry, stat: Stat) -> str:
    low, high = percent(stat.min, 2), percent(stat.max, 2)
    seeds = f"{stat.count} seeds from {low} to {high} %" if stat.count > 1 else "one seed"
    return f"{entry.label}: best {percent(stat.mean, 2)} %, {seeds}"
