"""Learning curves: accuracy and loss against rounds and against traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import plotly.graph_objects as go

from fedkeel.records.rows import RoundRecord
from fedkeel.report import palette
from fedkeel.report.chart_style import Curve, Drawing, bare, curve, short, text
from fedkeel.report.formatting import number
from fedkeel.report.runs import Entry
from fedkeel.report.summary import finite

Metric = Literal["top1", "loss"]
Against = Literal["rounds", "megabytes"]

CROWD = 6
"""Methods above which lines and bands are drawn fainter."""

FEW_ROUNDS = 8
"""Rounds up to which each has its tick; plotly's own would lie between them."""


def curves(
    entries: Sequence[Entry], metric: Metric, target: float | None = None
) -> dict[Against, Drawing]:
    """Return test accuracy or test loss, a line for each method with a band over its seeds.

    Args:
        entries: the methods.
        metric: ``top1`` or ``loss``.
        target: accuracy to mark.

    Returns:
        The figure against ``rounds`` and against ``megabytes`` sent both ways over all clients;
        nothing where no run has been evaluated.
    """
    drawn = [(entry, curve(entry, _value(metric))) for entry in entries]
    drawn = [(entry, line) for entry, line in drawn if line.stretches]
    if not drawn:
        return {}
    return {
        "rounds": _curves(drawn, metric, "rounds", target),
        "megabytes": _curves(drawn, metric, "megabytes", target),
    }


def _curves(
    drawn: Sequence[tuple[Entry, Curve]], metric: Metric, against: Against, target: float | None
) -> Drawing:
    close = against == "megabytes" or len(drawn) > len(palette.METHODS)
    figure = bare(400, hovermode="closest" if close else "x unified")
    for entry, line in drawn:
        for trace in _lines(entry, line, metric, against, crowded=len(drawn) > CROWD):
            figure.add_trace(trace)
    figure.update_xaxes(
        title_text="round" if against == "rounds" else "MB sent, both ways, all clients",
        rangemode="tozero",
    )
    if against == "rounds" and max(line.rounds[-1] for _, line in drawn) <= FEW_ROUNDS:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(title_text="test accuracy, %" if metric == "top1" else "test loss")
    if metric == "loss" and _spans(drawn):
        figure.update_yaxes(type="log", title_text="test loss, logarithmic")
    else:
        figure.update_yaxes(range=_window(drawn, metric))
    if metric == "top1" and target is not None:
        _mark(figure, 100 * target)
    return Drawing(figure, _told(drawn, metric, against))


def _value(metric: Metric) -> Callable[[RoundRecord], float | None]:
    def top1(row: RoundRecord) -> float | None:
        share = finite(row.test.top1) if row.test else None
        return None if share is None else 100 * share

    def loss(row: RoundRecord) -> float | None:
        return finite(row.test.loss) if row.test else None

    return top1 if metric == "top1" else loss


def _lines(
    entry: Entry, line: Curve, metric: Metric, against: Against, *, crowded: bool
) -> list[go.Scatter]:
    """Return the band over seeds, where there is one, and the mean line over it."""
    common: dict[str, Any] = {"legendgroup": str(entry.index)}
    unit, digits = (" %", 2) if metric == "top1" else ("", 3)
    x, y, band_x, band_y = _stretched(line, against)
    hints = _hints(line, unit, digits, len(entry.runs), rounds=against == "megabytes" or crowded)
    traces = []
    if band_x:
        traces.append(
            go.Scatter(
                x=band_x,
                y=band_y,
                mode="lines",
                fill="toself",
                fillcolor=palette.method(entry.index, 0.05 if crowded else 0.14),
                line={"width": 0},
                hoverinfo="skip",
                **common,
            )
        )
    colour = palette.method(entry.index)
    alone = any(len(stretch) == 1 for stretch in line.stretches)
    traces.append(
        go.Scatter(
            x=x,
            y=y,
            mode="lines+markers" if alone else "lines",
            name=text(entry.label),
            line={
                "color": colour,
                "width": 1.75 if crowded else 2.25,
                "dash": palette.dash(entry.index),
            },
            marker={"color": colour, "size": 4},
            customdata=hints,
            hovertemplate=f"%{{y:.{digits}f}}{unit}%{{customdata}}<extra>%{{fullData.name}}</extra>",
            **common,
        )
    )
    return traces


def _stretched(line: Curve, against: Against) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return x and y of the line, then of the band, with a gap between stretches."""
    at: Sequence[float] = line.rounds if against == "rounds" else line.megabytes
    x: list[Any] = []
    y: list[Any] = []
    band_x: list[Any] = []
    band_y: list[Any] = []
    for stretch in line.stretches:
        gap = [None] if x else []
        x += [*gap, *(at[i] for i in stretch)]
        y += [*gap, *(short(line.middle[i] or 0.0) for i in stretch)]
        there = [i for i in stretch if line.low[i] is not None and len(stretch) > 1]
        if there:
            gap = [None] if band_x else []
            back = there[::-1]
            band_x += [*gap, *(at[i] for i in there), *(at[i] for i in back)]
            band_y += [*gap, *(short(line.low[i] or 0.0) for i in there)]
            band_y += [short(line.high[i] or 0.0) for i in back]
    return x, y, band_x, band_y


def _hints(line: Curve, unit: str, digits: int, runs: int, *, rounds: bool) -> list[str]:
    """Return what is said after the value at each point of the line, gaps included."""
    told: list[str] = []
    for stretch in line.stretches:
        told += [""] if told else []
        for i in stretch:
            low, high = line.low[i], line.high[i]
            known = low is not None and high is not None
            edges = f" ({low:.{digits}f} to {high:.{digits}f}{unit})" if known else ""
            part = f", {line.seeds[i]} of {runs} seeds" if line.seeds[i] < runs else ""
            told.append(edges + (f", round {line.rounds[i]}" if rounds else "") + part)
    return told


def _spans(drawn: Sequence[tuple[Entry, Curve]], ratio: float = 100.0) -> bool:
    """Return whether the values reach so far that only a logarithm shows them."""
    values = [m for _, line in drawn for m in line.middle if m is not None]
    return min(values) > 0 and max(values) / min(values) > ratio


def _window(drawn: Sequence[tuple[Entry, Curve]], metric: Metric) -> list[float] | None:
    """Return the range of the y axis: all that happens after the first fifth of the rounds.

    The first rounds are alike for all methods, and would press together what tells them apart.
    None, the whole range, for short runs.
    """
    rounds = max(line.rounds[-1] for _, line in drawn)
    if rounds < 20:
        return None
    values = [
        value
        for _, line in drawn
        for at, *edges in zip(line.rounds, line.low, line.middle, line.high, strict=True)
        if at > rounds / 5
        for value in edges
        if value is not None
    ]
    if not values:
        return None
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 1.0
    return [max(0.0, low - pad), min(100.0, high + pad) if metric == "top1" else high + pad]


def _mark(figure: go.Figure, target: float) -> None:
    colour = palette.rgba(palette.MUTED[0])
    figure.add_hline(y=target, line={"color": colour, "width": 1, "dash": "dot"})
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="left",
        y=target,
        yanchor="bottom",
        text=f"target {target:g} %",
        showarrow=False,
        font={"size": 12, "color": colour},
    )


def _told(drawn: Sequence[tuple[Entry, Curve]], metric: Metric, against: Against) -> str:
    what = "Test accuracy" if metric == "top1" else "Test loss"
    unit = " %" if metric == "top1" else ""
    ends = []
    for entry, line in drawn:
        last = next(m for m in reversed(line.middle) if m is not None)
        ends.append(f"{entry.label} ends at {number(last)}{unit}")
    over = "rounds" if against == "rounds" else "megabytes sent"
    return f"{what} against {over}, mean over seeds. {'; '.join(ends)}."
