"""What a method costs and whom it serves: clients, traffic, seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedkeel.report import palette
from fedkeel.report.chart_style import Drawing, Key, bare, short, tag, text
from fedkeel.report.formatting import megabytes, number, percent
from fedkeel.report.runs import Entry, Run
from fedkeel.report.summary import TRAINING, finite

POINTED = 60
"""Clients up to which each is drawn as a point of its own."""

_SHAPES = {"": "", "stripes": "/", "crosses": "x", "dots": "."}
"""Patterns of bars where there are more of them than colours, and what plotly calls them."""


def client_scores(run: Run) -> tuple[int, list[float]] | None:
    """Return the last round in which clients were evaluated, and the accuracy of each of them."""
    for row in reversed(run.rows):
        table = row.per_client
        if table and table.get("top1"):
            sizes = table.get("examples") or [1.0] * len(table["top1"])
            pairs = zip(sizes, table["top1"], strict=False)
            known = [a for n, top1 in pairs if n and (a := finite(top1)) is not None]
            if known:
                return row.round, known
    return None


def clients(entries: Sequence[Entry]) -> Drawing | None:
    """Return how accuracy is spread over clients, or None where no run has evaluated them."""
    found = [(entry, _pooled(entry)) for entry in entries]
    found = [(entry, values) for entry, values in found if values]
    if not found:
        return None
    figure = bare(70 + 62 * len(found), hovermode="closest")
    for place, (entry, values) in enumerate(found):
        for trace in _box(entry, values, -2.0 * place):
            figure.add_trace(trace)
        _label(figure, entry, -2.0 * place + 0.85)
    figure.update_xaxes(title_text="accuracy on a client's own examples, %")
    _rows(figure, len(found), 2.0, 1.3)
    told = "; ".join(
        f"{entry.label}: median {number(statistics.median(values))} %, from {number(min(values))} "
        f"to {number(max(values))} %"
        for entry, values in found
    )
    return Drawing(figure, f"Accuracy of single clients. {told}.")


def traffic(entries: Sequence[Entry]) -> Drawing | None:
    """Return bytes down and up by part, for each client and round, in multiples of the model."""
    known = [entry for entry in entries if entry.group.stat("traffic") is not None]
    if not known:
        return None
    parts = _in_order(known, "bytes_down", "bytes_up")
    figure = bare(76 + 84 * len(known), barmode="stack", hovermode="closest")
    for order, part in enumerate(parts):
        widths, hints = [], []
        for entry in known:
            for way in ("bytes_down", "bytes_up"):
                size = entry.group.by_name(way).get(part, 0.0)
                widths.append(short(size / _once(entry)))
                hints.append(f"{text(part)}: {number(widths[-1])} × model, {megabytes(size)} a run")
        places = [y for place in range(len(known)) for y in (-3.0 * place, -3.0 * place - 1.0)]
        figure.add_trace(_bars(widths, places, hints, order))
    for place, entry in enumerate(known):
        _label(figure, entry, -3.0 * place + 0.85)
    _rows(figure, len(known), 3.0, 1.3)
    figure.update_yaxes(
        tickvals=[y for place in range(len(known)) for y in (-3.0 * place, -3.0 * place - 1.0)],
        ticktext=["down", "up"] * len(known),
    )
    figure.update_xaxes(
        title_text="multiples of the model, for each client and round", rangemode="tozero"
    )
    told = "; ".join(
        f"{e.label}: {number(stat.mean)} times the model"
        for e in known
        if (stat := e.group.stat("traffic")) is not None
    )
    return Drawing(figure, f"Traffic for each client and round. {told}.", _key(parts))


def seconds(entries: Sequence[Entry]) -> Drawing | None:
    """Return seconds by phase for each round."""
    known = [entry for entry in entries if entry.group.by_name("seconds_by_phase")]
    if not known:
        return None
    phases = _in_order(known, "seconds_by_phase")
    figure = bare(76 + 66 * len(known), barmode="stack", hovermode="closest")
    scale = [statistics.fmean(max(s.rounds, 1) for s in e.group.summaries) for e in known]
    top = max(
        sum(e.group.by_name("seconds_by_phase").values()) / n
        for e, n in zip(known, scale, strict=True)
    )
    unit, factor = ("s", 1.0) if top >= 1 else ("ms", 1e3)
    for order, phase in enumerate(phases):
        widths = [
            short(factor * e.group.by_name("seconds_by_phase").get(phase, 0.0) / n)
            for e, n in zip(known, scale, strict=True)
        ]
        hints = [f"{text(phase)}: {number(width)} {unit} a round" for width in widths]
        places = [-2.0 * place for place in range(len(known))]
        figure.add_trace(_bars(widths, places, hints, order))
    for place, entry in enumerate(known):
        _label(figure, entry, -2.0 * place + 0.85)
    _rows(figure, len(known), 2.0, 1.3)
    figure.update_xaxes(title_text=f"{unit} a round", rangemode="tozero")
    told = "; ".join(
        f"{e.label}: {number(stat.mean)} s in all"
        for e in known
        if (stat := e.group.stat("seconds")) is not None
    )
    return Drawing(figure, f"Seconds by phase. {told}.", _key(phases))


def scores_table(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return figures of fairness in words: mean, worst and best tenth, deviation over clients."""
    found = []
    for entry in entries:
        values = sorted(_pooled(entry))
        if not values:
            continue
        tenth = max(1, len(values) // 10)
        scored = [s for run in entry.runs if (s := client_scores(run)) is not None]
        each = sorted({len(s[1]) for s in scored})
        rounds = sorted({s[0] for s in scored})
        found.append(
            {
                "method": entry.label,
                "index": entry.index,
                "clients": "–".join(f"{n:,}" for n in dict.fromkeys((each[0], each[-1]))),
                "seeds": str(len(scored)),
                "mean": percent(statistics.fmean(values) / 100, 2),
                "worst": percent(statistics.fmean(values[:tenth]) / 100, 2),
                "best": percent(statistics.fmean(values[-tenth:]) / 100, 2),
                "std": percent(statistics.stdev(values) / 100, 2) if len(values) > 1 else "–",
                "round": ", ".join(map(str, rounds)),
            }
        )
    return found


def measured_on(entries: Sequence[Entry]) -> str:
    """Return, in a sentence, on which of its examples each client is measured."""
    divisions = [run.record.partition for entry in entries for run in entry.runs]
    apart = {bool(one.held_out) for one in divisions if one.kind != "nodes"}
    if not apart:
        return "Each client is measured by its node."
    if apart == {True}:
        return "Each client is measured on the examples that it holds out."
    if apart == {False}:
        return (
            "Each client is measured on the examples that it is trained on, which flatters a model "
            "that knows them by heart: partition.holdout keeps some of them aside."
        )
    return "Some runs measure clients on examples they hold out, others on those they train on."


def _pooled(entry: Entry) -> list[float]:
    """Return the accuracy of every client of every seed, in percent."""
    found = (client_scores(run) for run in entry.runs)
    return [100 * value for scores in found if scores is not None for value in scores[1]]


def _box(entry: Entry, values: Sequence[float], place: float) -> list[Any]:
    low, first, middle, third, high = (
        short(float(v)) for v in np.percentile(values, (5, 25, 50, 75, 95))
    )
    box = go.Box(
        y=[place],
        q1=[first],
        median=[middle],
        q3=[third],
        lowerfence=[low],
        upperfence=[high],
        orientation="h",
        width=0.7,
        name=text(entry.label),
        line={"color": palette.method(entry.index), "width": 1.75},
        fillcolor=palette.method(entry.index, 0.16),
        hoverinfo="x",
    )
    shown = values if len(values) <= POINTED else [v for v in values if v < low or v > high]
    kept = sorted(shown)[:: max(1, len(shown) // (2 * POINTED))]
    points = go.Scatter(
        x=[short(v) for v in kept],
        y=[place] * len(kept),
        mode="markers",
        marker={"size": 5, "color": palette.method(entry.index, 0.55)},
        hovertemplate="%{x:.1f} %<extra></extra>",
    )
    return [box, points]


def _bars(
    widths: Sequence[float], places: Sequence[float], hints: Sequence[str], order: int
) -> go.Bar:
    return go.Bar(
        x=list(widths),
        y=list(places),
        orientation="h",
        width=0.78,
        marker={
            "color": palette.rgba(palette.RAMP[order % len(palette.RAMP)][0]),
            "line": {"width": 0},
            "pattern": {"shape": _SHAPES[_pattern(order)]},
        },
        customdata=list(hints),
        hovertemplate="%{customdata}<extra></extra>",
    )


def _label(figure: go.Figure, entry: Entry, y: float) -> None:
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="left",
        y=y,
        text=tag(entry),
        hovertext=text(entry.label),
        showarrow=False,
        font={"size": 13},
    )


def _rows(figure: go.Figure, number_of: int, step: float, above: float) -> None:
    """Lay the y axis out for one row of bars for each method, the first on top."""
    figure.update_layout(margin_l=8)
    figure.update_yaxes(
        range=[-step * (number_of - 1) - (step - 1.4), above],
        tickvals=[],
        showgrid=False,
        fixedrange=True,
    )
    figure.update_xaxes(showgrid=True)


def _in_order(entries: Sequence[Entry], *figures: str) -> list[str]:
    """Return the names of all entries' parts or phases: the model or training, then the largest."""
    total: dict[str, float] = {}
    for entry in entries:
        for figure in figures:
            for name, value in entry.group.by_name(figure).items():
                total[name] = total.get(name, 0.0) + value
    names = [name for name, value in total.items() if value > 0]
    return sorted(names, key=lambda name: (not _leads(name), -total[name], name))


def _leads(name: str) -> bool:
    return name == "model" or name.startswith(TRAINING)


def _once(entry: Entry) -> float:
    """Return the bytes that one model for every selected client would be."""
    group = entry.group
    sent, ratio = group.stat("sent"), group.stat("traffic")
    return sent.mean / 2 / ratio.mean if sent and ratio and ratio.mean else 1.0


def _pattern(order: int) -> str:
    """Return what tells bars of the same colour apart."""
    return list(_SHAPES)[order // len(palette.RAMP) % len(_SHAPES)]


def _key(labels: Sequence[str]) -> tuple[Key, ...]:
    tones = palette.RAMP
    return tuple(
        Key(label, *tones[i % len(tones)], pattern=_pattern(i)) for i, label in enumerate(labels)
    )
