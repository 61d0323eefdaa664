"""Charts of what features have measured: by round, and by layer, class or position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import plotly.graph_objects as go

from fedkeel.base.feature import Figure, declarations, figures
from fedkeel.records.rows import RoundRecord
from fedkeel.records.statistics import Stat, finite_or_none
from fedkeel.report import palette
from fedkeel.report.chart_style import (
    Chart,
    category_names,
    empty_figure,
    escaped,
    evenly_spaced,
    rounded,
)
from fedkeel.report.formatting import format_number
from fedkeel.report.learning_curves import FEW_ROUNDS
from fedkeel.report.runs import MethodResults


@dataclass(frozen=True)
class DiagnosticChart:
    """A chart of one quantity.

    Args:
        name: name of the figure on the page.
        title: what it shows.
        note: which round it is of, where it is of one.
    """

    name: str
    title: str
    note: str


def diagnostic_charts(methods: Sequence[MethodResults]) -> dict[DiagnosticChart, Chart]:
    """Return the charts, a line for each method, in the order in which features declare them.

    By round it is the mean over seeds, with their range. By layer, class or position it is the
    mean over seeds in the last round that was diagnosed.
    """
    charts = {}
    titles = [item for kind in declarations().values() for item in kind.charts.items()]
    for name, title in titles:
        _, _, axis = (*name.split("."), "round")[:3]
        of_row = partial(_diagnostic, name)
        drawn = _by_round(methods, of_row, title) if axis == "round" else _by(methods, name, title)
        if drawn is not None:
            chart, note = drawn
            charts[DiagnosticChart(name.replace(".", "_"), title, note)] = chart
    return charts


def feature_charts(methods: Sequence[MethodResults]) -> dict[DiagnosticChart, Chart]:
    """Return the charts of the numbers that features have added to the rounds."""
    charts = {}
    for figure in figures():
        of_row = partial(_feature_number, figure)
        drawn = _by_round(methods, of_row, figure.chart) if figure.chart else None
        if drawn is not None:
            item = DiagnosticChart(f"feature_{figure.key}", figure.chart, figure.unit)
            charts[item] = drawn[0]
    return charts


def _diagnostic(name: str, row: RoundRecord) -> float | None:
    return finite_or_none(row.diagnostics.get(name))


def _feature_number(figure: Figure, row: RoundRecord) -> float | None:
    return finite_or_none(figure.value(row.features))


def _by_round(
    methods: Sequence[MethodResults], of_row: Callable[[RoundRecord], float | None], title: str
) -> tuple[Chart, str] | None:
    figure, ends, last = empty_figure(260, hovermode="x unified"), [], 0
    for method in methods:
        values: dict[int, list[float]] = {}
        for row in (row for run in method.runs for row in run.rows):
            if (value := of_row(row)) is not None:
                values.setdefault(row.round, []).append(value)
        rounds = sorted(values)
        rounds = [rounds[i] for i in evenly_spaced(len(rounds))]
        if rounds:
            stats = [stat for r in rounds if (stat := Stat.of(values[r])) is not None]
            _add_lines(figure, method, rounds, stats)
            ends.append(f"{method.label} ends at {format_number(stats[-1].mean)}")
            last = max(last, rounds[-1])
    if not ends:
        return None
    figure.update_xaxes(title_text="round", rangemode="tozero")
    if last <= FEW_ROUNDS:
        figure.update_xaxes(dtick=1)
    return Chart(figure, f"{title}, by round, mean over seeds. {'; '.join(ends)}."), ""


def _by(methods: Sequence[MethodResults], name: str, title: str) -> tuple[Chart, str] | None:
    figure, drawn, of_rounds = empty_figure(280, hovermode="x unified"), [], set()
    axis = name.rpartition(".")[2]
    for method in methods:
        last = [
            next((row for row in reversed(run.rows) if name in row.breakdowns), None)
            for run in method.runs
        ]
        rows = [row for row in last if row is not None]
        labels = list(dict.fromkeys(label for row in rows for label in row.breakdowns[name]))
        stats = [Stat.of(row.breakdowns[name].get(label) for row in rows) for label in labels]
        known = [(label, stat) for label, stat in zip(labels, stats, strict=True) if stat]
        if known:
            names = [label for label, _ in known]
            x = list(map(float, names)) if axis == "position" else category_names(names, len(names))
            _add_lines(figure, method, x, [stat for _, stat in known])
            drawn.append(method.label)
            of_rounds |= {row.round for row in rows}
    if not drawn:
        return None
    figure.update_xaxes(title_text=axis, type="linear" if axis == "position" else "category")
    where = f"after round {max(of_rounds)}" if len(of_rounds) == 1 else "after the last round"
    return Chart(figure, f"{title}, {where}, for {', '.join(drawn)}."), where


def _add_lines(
    figure: go.Figure, method: MethodResults, x: Sequence[float | str], stats: Sequence[Stat]
) -> None:
    """Draw a method's means, and the range over its seeds behind them."""
    colour, group = palette.method_colour(method.index), str(method.index)
    if any(stat.count > 1 for stat in stats) and len(x) > 1:
        low, high = ([rounded(getattr(s, k)) for s in stats] for k in ("min", "max"))
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*low, *reversed(high)],
            mode="lines",
            fill="toself",
            fillcolor=palette.method_colour(method.index, 0.14),
            line={"width": 0},
            hoverinfo="skip",
            legendgroup=group,
        )
    figure.add_scatter(
        x=list(x),
        y=[rounded(stat.mean) for stat in stats],
        mode="lines+markers",
        name=escaped(method.label),
        line={"color": colour, "width": 2, "dash": palette.dash(method.index)},
        marker={"color": colour, "size": 5},
        hovertemplate="%{y:.4g}<extra>%{fullData.name}</extra>",
        legendgroup=group,
    )
