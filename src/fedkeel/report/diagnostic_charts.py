"""Charts of what `[diagnose]` has measured: by round, and by layer, class or position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import plotly.graph_objects as go

from fedkeel.base.feature import Figure, figures
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

ChartAxis = Literal["round", "layer", "class", "position"]

QUANTITIES: dict[str, str] = {
    "forgetting.increase": "Loss increase on the last round's clients",
    "forgetting.by_class": "Accuracy lost since the best round, mean over classes",
    "forgetting.lost_accuracy.class": "Accuracy lost since the best round, by class",
    "global_forgetting.increase": "Loss increase on all clients' examples",
    "drift.norm": "Norm of an update",
    "drift.norm.layer": "Norm of an update, by layer",
    "drift.to_mean": "Distance of a local model to the mean of all",
    "drift.diversity": "Gradient diversity of the updates",
    "drift.diversity.layer": "Gradient diversity, by layer",
    "conflict.share": "Share of conflicting pairs of updates",
    "conflict.share.layer": "Share of conflicting pairs, by layer",
    "conflict.cosine": "Mean cosine of two updates",
    "conflict.cosine.layer": "Mean cosine of two updates, by layer",
    "participation.relative": "Distance to the update of all clients, relative",
    "participation.relative.layer": "Distance to the update of all clients, by layer",
    "fisher.correlation_pseudo": "Correlation of Fisher information, pseudo and earlier data",
    "fisher.correlation_own": "Correlation of Fisher information, own and earlier data",
    "cka.unbiased": "CKA of local and global model, mean over layers",
    "cka.unbiased.layer": "CKA of local and global model, by layer",
    "cka.class_drift.class": "Representation drift, by class",
    "landscape.global_barrier": "Loss barrier between a local and the global model",
    "landscape.client_barrier": "Loss barrier between two local models",
    "landscape.global_loss.position": "Loss from the global (0) to a local model (1)",
    "landscape.client_loss.position": "Loss from a local model (0) to another (1)",
    "landscape.global_score.position": "Score from the global (0) to a local model (1)",
    "landscape.client_score.position": "Score from a local model (0) to another (1)",
    "sharpness.eigenvalue": "Largest eigenvalue of the Hessian",
}
"""Quantity that is drawn -> title of its chart, in the order of the page."""


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
    """Return the charts, a line for each method, in the order of `QUANTITIES`.

    By round it is the mean over seeds, with their range. By layer, class or position it is the
    mean over seeds in the last round that was diagnosed.
    """
    charts = {}
    for name, title in QUANTITIES.items():
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
