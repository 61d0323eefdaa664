"""Learning curves: a metric of the test set against rounds, traffic and the time of rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import plotly.graph_objects as go

from fedkeel.base.feature import Figure, figures
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat, finite_or_none
from fedkeel.report import palette
from fedkeel.report.chart_style import Chart, empty_figure, escaped, evenly_spaced, rounded
from fedkeel.report.formatting import format_number, format_target
from fedkeel.report.runs import MethodResults
from fedkeel.report.summary import bytes_sent

CurveAxis = Literal["rounds", "megabytes", "time"]

DEVIATION_SEEDS = 4
"""Seeds from which a band shows ± one deviation; below, it shows the range."""

MANY_METHODS = 6
"""Methods above which lines and bands are drawn fainter."""

FEW_ROUNDS = 8
"""Rounds up to which each has its tick; plotly's own would lie between them."""


@dataclass(frozen=True)
class CurvePoint:
    """A round of a learning curve: its scores over seeds, and the mean traffic until then.

    `seconds` are the mean seconds until then by the time that a feature counts, None without one.
    """

    round: int
    megabytes: float
    stat: Stat
    seconds: float | None = None

    def place(self, axis: CurveAxis, time_factor: float) -> float:
        """Return where the point stands; on the axis of time its seconds times a factor."""
        if axis == "time":
            return rounded((self.seconds or 0.0) * time_factor)
        return self.round if axis == "rounds" else self.megabytes

    @property
    def band(self) -> tuple[float, float] | None:
        """The range for fewer than four seeds, else the mean ± one deviation; None for one seed."""
        mean, std = self.stat.mean, self.stat.std
        if std is None:
            return None
        is_range = self.stat.count < DEVIATION_SEEDS
        return (self.stat.min, self.stat.max) if is_range else (mean - std, mean + std)


@dataclass(frozen=True)
class Curve:
    """A method's learning curve.

    Args:
        method: the method.
        segments: points between which a line is drawn. A new segment begins where the seeds change,
            as the end of a run would look like a jump of the mean, and where a seed's value is not
            finite.
        last_round: the last round that was evaluated.
    """

    method: MethodResults
    segments: tuple[tuple[CurvePoint, ...], ...]
    last_round: int

    @property
    def points(self) -> Iterator[CurvePoint]:
        """The points of all segments."""
        return (point for segment in self.segments for point in segment)

    @property
    def has_time(self) -> bool:
        """Whether the runs count the time of rounds."""
        return all(point.seconds is not None for point in self.points)


def learning_curve(method: MethodResults, metric: MetricInfo) -> Curve:
    """Return a method's test scores over rounds, shares in percent."""
    scores: dict[int, dict[int, float | None]] = {}  # round -> place of the run -> score
    megabytes: dict[int, list[float]] = {}
    times: dict[int, list[float | None]] = {}
    figure = time_figure()
    for place, run in enumerate(method.runs):
        total = 0
        for row in run.rows:
            total += bytes_sent(row)
            if row.test is not None:
                score = finite_or_none(row.test[metric.name])
                scaled = None if score is None else metric.scale * score
                scores.setdefault(row.round, {})[place] = scaled
                megabytes.setdefault(row.round, []).append(total / 1e6)
                seconds = None if figure is None else figure.value(row.features)
                times.setdefault(row.round, []).append(seconds)
    points = []
    for number in sorted(scores):
        stat = Stat.of(scores[number].values())
        has_all = stat is not None and stat.count == len(scores[number])
        traffic = rounded(statistics.fmean(megabytes[number]))
        known = [t for t in times[number] if t is not None]
        mean = statistics.fmean(known) if len(known) == len(times[number]) else None
        points.append(CurvePoint(number, traffic, stat, mean) if stat and has_all else None)
    means = [(metric.sign * p.stat.mean, i) for i, p in enumerate(points) if p is not None]
    peak = max(means)[1] if means else None
    shown = (points[i] for i in evenly_spaced(len(points), include=peak))
    groups = groupby(shown, lambda point: tuple(scores[point.round]) if point else None)
    segments = (tuple(p for p in group if p is not None) for seeds, group in groups if seeds)
    return Curve(method, tuple(segments), max(scores, default=0))


def time_figure() -> Figure | None:
    """Return the number of a round that says when it ended, None where no feature has one."""
    return next((figure for figure in figures() if figure.time), None)


def curve_charts(
    methods: Sequence[MethodResults], metric: MetricInfo, target: float | None = None
) -> dict[CurveAxis, Chart]:
    """Return a metric of the test set, a line for each method with a band over its seeds.

    Args:
        methods: the methods.
        metric: the metric.
        target: score to mark.

    Returns:
        The chart against ``rounds``, against ``megabytes`` sent both ways over all clients, and
        against the ``time`` of rounds for the methods that count it; nothing where no run has been
        evaluated.
    """
    curves = [learning_curve(method, metric) for method in methods]
    curves = [curve for curve in curves if curve.segments]
    axes: tuple[CurveAxis, ...] = ("rounds", "megabytes") if curves else ()
    charts = {axis: _chart(curves, metric, axis, target) for axis in axes}
    timed = [curve for curve in curves if curve.has_time]
    return {**charts, "time": _chart(timed, metric, "time", target)} if timed else charts


def time_unit(curves: Sequence[Curve]) -> tuple[str, float]:
    """Return the unit in which the longest time is read best, and 1 s in it.

    >>> time_unit([])
    ('seconds', 1.0)
    """
    longest = max((p.seconds or 0.0 for curve in curves for p in curve.points), default=0.0)
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(
        ((name, 1.0 / size) for name, size in units if longest >= 2.0 * size), ("seconds", 1.0)
    )


def x_axis(curves: Sequence[Curve], axis: CurveAxis) -> tuple[str, float]:
    """Return the title of an axis, and the factor from seconds to its unit."""
    unit_of_time, factor = time_unit(curves)
    titles = {"rounds": "round", "megabytes": "MB sent, both ways, all clients"}
    return titles.get(axis) or f"{unit_of_time} of {_name_of_time()}", factor


def _name_of_time() -> str:
    figure = time_figure()
    return "time" if figure is None else figure.time


def _chart(
    curves: Sequence[Curve], metric: MetricInfo, axis: CurveAxis, target: float | None
) -> Chart:
    is_single_hover = axis != "rounds" or len(curves) > len(palette.METHODS)
    x_title, factor = x_axis(curves, axis)
    figure = empty_figure(400, hovermode="closest" if is_single_hover else "x unified")
    means = [point.stat.mean for curve in curves for point in curve.points]
    decimals = 2 if metric.is_share else _plain_decimals(means)
    for curve in curves:
        is_crowded = len(curves) > MANY_METHODS
        figure.add_traces(_traces(curve, metric, axis, decimals, factor, is_crowded=is_crowded))
    last_round = max(curve.last_round for curve in curves)
    figure.update_xaxes(title_text=x_title, rangemode="tozero")
    if axis == "rounds" and last_round <= FEW_ROUNDS:
        figure.update_xaxes(dtick=1)
    title = ", ".join(filter(None, (f"test {metric.label}", escaped(metric.unit))))
    is_positive = not metric.is_share and min(means) > 0
    if is_positive and max(means) / min(means) > 100:
        figure.update_yaxes(type="log", title_text=f"{title}, logarithmic")
    else:
        figure.update_yaxes(title_text=title, range=_y_range(curves, metric, last_round))
    if target is not None:
        muted = palette.rgba(palette.MUTED[0])
        figure.add_hline(
            y=metric.scale * target,
            line={"color": muted, "width": 1, "dash": "dot"},
            annotation={
                "text": f"target {format_target(target, metric)}",
                "font": {"size": 12, "color": muted},
            },
            annotation_position="top left",
        )
    name, unit = f"Test {metric.label}", f" {metric.unit}".rstrip()
    ends = [
        f"{curve.method.label} ends at {format_number(curve.segments[-1][-1].stat.mean)}{unit}"
        for curve in curves
    ]
    names = {"rounds": "rounds", "megabytes": "megabytes sent"}
    x_name = names.get(axis) or _name_of_time()
    return Chart(figure, f"{name} against {x_name}, mean over seeds. {'; '.join(ends)}.")


def _plain_decimals(values: Sequence[float]) -> int:
    """Return decimals for values without a unit: 3, or more where all are small."""
    largest = max(map(abs, values), default=0.0)
    return 3 if largest >= 1 or largest == 0 else min(9, 3 - math.floor(math.log10(largest)))


def _traces(
    curve: Curve,
    metric: MetricInfo,
    axis: CurveAxis,
    decimals: int,
    time_factor: float,
    *,
    is_crowded: bool,
) -> list[go.Scatter]:
    """Return the band over seeds, where there is one, and the mean line over it."""
    index = curve.method.index
    unit = escaped(f" {metric.unit}".rstrip())
    has_round = axis != "rounds" or is_crowded
    x: list[float | None] = []
    y: list[float | None] = []
    hover_texts: list[str] = []
    band_x: list[float | None] = []
    band_y: list[float | None] = []
    for segment in curve.segments:
        if x:  # a gap in the line
            x.append(None)
            y.append(None)
            hover_texts.append("")
        positions = [p.place(axis, time_factor) for p in segment]
        x += positions
        y += [rounded(point.stat.mean) for point in segment]
        runs = len(curve.method.runs)
        hover_texts += [_hover_text(p, unit, decimals, runs, has_round) for p in segment]
        bands = [point.band for point in segment if point.band is not None]
        if len(segment) > 1 and bands:
            gap = [None] if band_x else []
            band_x += [*gap, *positions, *positions[::-1]]
            band_y += [*gap, *(rounded(low) for low, _ in bands)]
            band_y += [rounded(high) for _, high in bands[::-1]]
    colour, group = palette.method_colour(index), str(index)
    has_single_points = any(len(segment) == 1 for segment in curve.segments)
    line = go.Scatter(
        x=x,
        y=y,
        mode="lines+markers" if has_single_points else "lines",
        name=escaped(curve.method.label),
        line={
            "color": colour,
            "width": 1.75 if is_crowded else 2.25,
            "dash": palette.dash(index),
        },
        marker={"color": colour, "size": 4},
        customdata=hover_texts,
        hovertemplate=f"%{{y:.{decimals}f}}{unit}%{{customdata}}<extra>%{{fullData.name}}</extra>",
        legendgroup=group,
    )
    if not band_x:
        return [line]
    band = go.Scatter(
        x=band_x,
        y=band_y,
        mode="lines",
        fill="toself",
        fillcolor=palette.method_colour(index, 0.05 if is_crowded else 0.14),
        line={"width": 0},
        hoverinfo="skip",
        legendgroup=group,
    )
    return [band, line]


def _hover_text(point: CurvePoint, unit: str, decimals: int, runs: int, has_round: bool) -> str:
    """Return the text after the value of a point."""
    text = ""
    if point.band is not None:
        low, high = point.band
        text += f" ({low:.{decimals}f} to {high:.{decimals}f}{unit})"
    if has_round:
        text += f", round {point.round}"
    if point.stat.count < runs:
        text += f", {point.stat.count} of {runs} seeds"
    return text


def _y_range(curves: Sequence[Curve], metric: MetricInfo, last_round: int) -> list[float] | None:
    """Return the range of the y axis: all values after the first fifth of the rounds.

    In the first rounds all methods are alike, and their bad scores would compress the differences
    that come later. None, the whole range, for short runs.
    """
    values = [
        value
        for curve in curves
        for point in curve.points
        if point.round > last_round / 5
        for value in (point.stat.mean, *(point.band or ()))
    ]
    if last_round < 20 or not values:
        return None
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 1.0
    low, high = low - margin if low < 0 else max(0.0, low - margin), high + margin
    return [low, min(100.0, high) if metric.is_share else high]
