"""What a method costs: traffic by part, and time by phase."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from fedkeel.report import palette
from fedkeel.report.chart_style import (
    Chart,
    LegendItem,
    add_method_rows,
    empty_figure,
    escaped,
    rounded,
)
from fedkeel.report.formatting import format_bytes, format_number
from fedkeel.report.runs import MethodResults
from fedkeel.report.summary import TRAINING, ByName

_PATTERNS = {"": "", "stripes": "/", "crosses": "x", "dots": "."}
"""Patterns of bars where there are more bars than colours: page.css -> plotly."""

_DIRECTIONS: tuple[ByName, ...] = ("bytes_down", "bytes_up")


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one part or phase: their lengths and texts, one for each bar."""

    name: str
    lengths: list[float]
    texts: list[str]


def traffic_chart(methods: Sequence[MethodResults]) -> Chart | None:
    """Return bytes down and up by part, for each client and round, in multiples of the model."""
    methods = [method for method in methods if method.summary.stat("traffic") is not None]
    if not methods:
        return None
    y = [y for place in range(len(methods)) for y in (-3.0 * place, -3.0 * place - 1.0)]
    pieces = []
    for part in _ordered_names(methods, *_DIRECTIONS):
        lengths, texts = [], []
        for method in methods:
            for direction in _DIRECTIONS:
                size = method.summary.by_name(direction).get(part, 0.0)
                lengths.append(rounded(size / _bytes_of_models(method)))
                models = format_number(lengths[-1])
                texts.append(f"{escaped(part)}: {models} × model, {format_bytes(size)} a run")
        pieces.append(_Pieces(part, lengths, texts))
    figure = _stacked_bars(pieces, y, height=76 + 84 * len(methods))
    add_method_rows(figure, methods, step=3.0)
    figure.update_yaxes(tickvals=y, ticktext=["down", "up"] * len(methods))
    figure.update_xaxes(
        title_text="multiples of the model, for each client and round", rangemode="tozero"
    )
    totals = [
        f"{method.label}: {format_number(stat.mean)} times the model"
        for method in methods
        if (stat := method.summary.stat("traffic")) is not None
    ]
    description = f"Traffic for each client and round. {'; '.join(totals)}."
    return Chart(figure, description, _legend(pieces))


def time_chart(methods: Sequence[MethodResults]) -> Chart | None:
    """Return the time of a round by phase."""
    methods = [method for method in methods if method.summary.by_name("seconds_by_phase")]
    if not methods:
        return None
    seconds = []
    for method in methods:
        rounds = statistics.fmean(max(run.rounds, 1) for run in method.summary.runs)
        totals = method.summary.by_name("seconds_by_phase")
        seconds.append({phase: total / rounds for phase, total in totals.items()})
    is_slow = max(sum(by_phase.values()) for by_phase in seconds) >= 1
    unit, factor = ("s", 1.0) if is_slow else ("ms", 1e3)
    pieces = []
    for phase in _ordered_names(methods, "seconds_by_phase"):
        lengths = [rounded(factor * by_phase.get(phase, 0.0)) for by_phase in seconds]
        texts = [f"{escaped(phase)}: {format_number(n)} {unit} a round" for n in lengths]
        pieces.append(_Pieces(phase, lengths, texts))
    y = [-2.0 * place for place in range(len(methods))]
    figure = _stacked_bars(pieces, y, height=76 + 66 * len(methods))
    add_method_rows(figure, methods, step=2.0)
    figure.update_xaxes(title_text=f"{unit} a round", rangemode="tozero")
    runs = [
        f"{method.label}: {format_number(stat.mean)} s in all"
        for method in methods
        if (stat := method.summary.stat("seconds")) is not None
    ]
    return Chart(figure, f"Seconds by phase. {'; '.join(runs)}.", _legend(pieces))


def _stacked_bars(pieces: Sequence[_Pieces], y: Sequence[float], height: int) -> go.Figure:
    figure = empty_figure(height, barmode="stack", hovermode="closest")
    for index, piece in enumerate(pieces):
        figure.add_bar(
            x=piece.lengths,
            y=y,
            orientation="h",
            width=0.78,
            marker={
                "color": palette.rgba(palette.RAMP[index % len(palette.RAMP)][0]),
                "line": {"width": 0},
                "pattern": {"shape": _PATTERNS[_pattern(index)]},
            },
            customdata=piece.texts,
            hovertemplate="%{customdata}<extra></extra>",
        )
    return figure


def _ordered_names(methods: Sequence[MethodResults], *quantities: ByName) -> list[str]:
    """Return the parts or phases of all methods: the model or training, then the largest first."""
    totals: dict[str, float] = {}
    for method in methods:
        for quantity in quantities:
            for name, value in method.summary.by_name(quantity).items():
                totals[name] = totals.get(name, 0.0) + value
    names = [name for name, value in totals.items() if value > 0]

    def order(name: str) -> tuple[bool, float, str]:
        is_first = name == "model" or name.startswith(TRAINING)
        return not is_first, -totals[name], name

    return sorted(names, key=order)


def _bytes_of_models(method: MethodResults) -> float:
    """Return the bytes of one model for every selected client."""
    sent, traffic = method.summary.stat("sent"), method.summary.stat("traffic")
    return sent.mean / 2 / traffic.mean if sent and traffic and traffic.mean else 1.0


def _pattern(index: int) -> str:
    """Return the pattern that distinguishes bars of one colour."""
    return list(_PATTERNS)[index // len(palette.RAMP) % len(_PATTERNS)]


def _legend(pieces: Sequence[_Pieces]) -> tuple[LegendItem, ...]:
    return tuple(
        LegendItem(piece.name, *palette.RAMP[i % len(palette.RAMP)], pattern=_pattern(i))
        for i, piece in enumerate(pieces)
    )
