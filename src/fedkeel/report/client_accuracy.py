"""How accuracy is distributed over the clients: a box for each method, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedkeel.records.statistics import finite_or_none, sample_deviation
from fedkeel.report import palette
from fedkeel.report.chart_style import Chart, add_method_rows, empty_figure, escaped, rounded
from fedkeel.report.formatting import format_number, format_percent
from fedkeel.report.runs import MethodResults, RunResults

MAX_SINGLE_POINTS = 60
"""Clients up to which each is drawn as a point of its own."""


@dataclass(frozen=True)
class ClientScores:
    """The accuracy of each client that was evaluated, as a share, after a round."""

    round: int
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class ClientAccuracyRow:
    """How accuracy is distributed over the clients of a method, as text.

    Args:
        label: the method.
        index: place of the method, which decides its colour.
        mean: mean over clients of all seeds, in percent.
        worst_tenth: mean over the worst tenth of them.
        best_tenth: mean over the best tenth.
        deviation: sample standard deviation over them, in points.
        clients: how many clients of a run were evaluated.
        seeds: how many runs evaluated clients.
        rounds: after which rounds.
    """

    label: str
    index: int
    mean: str
    worst_tenth: str
    best_tenth: str
    deviation: str
    clients: str
    seeds: str
    rounds: str


def client_scores(run: RunResults) -> ClientScores | None:
    """Return the scores of the last round in which clients were evaluated."""
    for row in reversed(run.rows):
        columns = row.per_client
        if columns and columns.get("top1"):
            sizes = columns.get("examples") or [1.0] * len(columns["top1"])
            pairs = zip(sizes, columns["top1"], strict=False)
            known = [a for size, top1 in pairs if size and (a := finite_or_none(top1)) is not None]
            if known:
                return ClientScores(row.round, tuple(known))
    return None


def measured_on(methods: Sequence[MethodResults]) -> str:
    """Return a sentence on the examples that each client is measured on."""
    partitions = [run.record.partition for method in methods for run in method.runs]
    has_holdout = {bool(p.held_out) for p in partitions if p.kind != "nodes"}
    if not has_holdout:
        return "Each client is measured by its node."
    if has_holdout == {True}:
        return "Each client is measured on the examples that it holds out."
    if has_holdout == {False}:
        return (
            "Each client is measured on the examples that it is trained on, which is too "
            "optimistic for a model that has memorised them. Set partition.holdout to keep some of "
            "them aside."
        )
    return "Some runs measure clients on examples they hold out, others on those they train on."


def client_accuracy_chart(methods: Sequence[MethodResults]) -> Chart | None:
    """Return the distribution over clients, or None where no run has evaluated them."""
    percentages = {method.label: _percentages(method) for method in methods}
    methods = [method for method in methods if percentages[method.label]]
    if not methods:
        return None
    figure = empty_figure(70 + 62 * len(methods), hovermode="closest")
    texts = []
    for place, method in enumerate(methods):
        values = percentages[method.label]
        figure.add_traces(_box(method, values, -2.0 * place))
        low, middle, high = (
            format_number(value) for value in (min(values), statistics.median(values), max(values))
        )
        texts.append(f"{method.label}: median {middle} %, from {low} to {high} %")
    figure.update_xaxes(title_text="accuracy on a client's own examples, %")
    add_method_rows(figure, methods, step=2.0)
    return Chart(figure, f"Accuracy of single clients. {'; '.join(texts)}.")


def client_accuracy_rows(methods: Sequence[MethodResults]) -> list[ClientAccuracyRow]:
    """Return a row for each method whose clients were evaluated."""
    rows = []
    for method in methods:
        scores = [s for run in method.runs if (s := client_scores(run)) is not None]
        values = sorted(value for score in scores for value in score.accuracies)
        if not values:
            continue
        tenth = max(1, len(values) // 10)
        counts = [len(score.accuracies) for score in scores]
        rows.append(
            ClientAccuracyRow(
                label=method.label,
                index=method.index,
                mean=format_percent(statistics.fmean(values), 2),
                worst_tenth=format_percent(statistics.fmean(values[:tenth]), 2),
                best_tenth=format_percent(statistics.fmean(values[-tenth:]), 2),
                deviation=format_percent(sample_deviation(values), 2),
                clients="–".join(f"{n:,}" for n in dict.fromkeys((min(counts), max(counts)))),
                seeds=str(len(scores)),
                rounds=", ".join(map(str, sorted({score.round for score in scores}))),
            )
        )
    return rows


def _percentages(method: MethodResults) -> list[float]:
    """Return the accuracy of every client of every seed, in percent."""
    scores = (client_scores(run) for run in method.runs)
    return [100 * value for score in scores if score is not None for value in score.accuracies]


def _box(method: MethodResults, values: Sequence[float], y: float) -> list[Any]:
    """Return a box with points: all clients where they are few, else those outside the whiskers."""
    low, first, middle, third, high = (
        rounded(float(value)) for value in np.percentile(values, (5, 25, 50, 75, 95))
    )
    box = go.Box(
        y=[y],
        q1=[first],
        median=[middle],
        q3=[third],
        lowerfence=[low],
        upperfence=[high],
        orientation="h",
        width=0.7,
        name=escaped(method.label),
        line={"color": palette.method_colour(method.index), "width": 1.75},
        fillcolor=palette.method_colour(method.index, 0.16),
        hoverinfo="x",
    )
    is_small = len(values) <= MAX_SINGLE_POINTS
    shown = values if is_small else [v for v in values if v < low or v > high]
    shown = sorted(shown)[:: max(1, len(shown) // (2 * MAX_SINGLE_POINTS))]
    points = go.Scatter(
        x=[rounded(value) for value in shown],
        y=[y] * len(shown),
        mode="markers",
        marker={"size": 5, "color": palette.method_colour(method.index, 0.55)},
        hovertemplate="%{x:.1f} %<extra></extra>",
    )
    return [box, points]
