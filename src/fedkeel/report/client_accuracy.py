"""How accuracy is distributed over the clients: a box for each method, and a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fedkeel.records.statistics import Stat, finite_or_none
from fedkeel.report import palette
from fedkeel.report.chart_style import Chart, add_method_rows, empty_figure, escaped, rounded
from fedkeel.report.formatting import format_number
from fedkeel.report.runs import MethodResults, RunResults

MAX_SINGLE_POINTS = 60
"""Clients up to which each is drawn as a point of its own."""


@dataclass(frozen=True)
class ClientScores:
    """The accuracy of each client that a run evaluated, as a share, after a round."""

    round: int
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class ClientAccuracy:
    """How accuracy is distributed over the clients of a method.

    Args:
        method: the method.
        scores: scores of the clients, for each run that evaluated them.
    """

    method: MethodResults
    scores: tuple[ClientScores, ...]

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of every client of every seed, as a share, ascending."""
        return sorted(value for scores in self.scores for value in scores.accuracies)

    @property
    def stat(self) -> Stat | None:
        """Mean and deviation over them."""
        return Stat.of(self.accuracies)

    @property
    def worst_tenth(self) -> float:
        """Mean accuracy of the worst tenth of the clients."""
        return statistics.fmean(self.accuracies[: self._tenth])

    @property
    def best_tenth(self) -> float:
        """Mean accuracy of the best tenth of the clients."""
        return statistics.fmean(self.accuracies[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.accuracies) // 10)

    @property
    def client_counts(self) -> str:
        """How many clients of a run were evaluated: one number, or the range over runs."""
        counts = [len(scores.accuracies) for scores in self.scores]
        return "–".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))

    @property
    def rounds(self) -> str:
        """The rounds after which the clients were evaluated."""
        return ", ".join(map(str, sorted({scores.round for scores in self.scores})))


def client_scores(run: RunResults) -> ClientScores | None:
    """Return the scores of the last round in which clients were evaluated."""
    for row in reversed(run.rows):
        columns = row.per_client
        values = (columns or {}).get(run.record.score.name)
        if columns and values:
            sizes = columns.get("examples") or [1.0] * len(values)
            pairs = zip(sizes, values, strict=False)
            known = [
                a for size, value in pairs if size and (a := finite_or_none(value)) is not None
            ]
            if known:
                return ClientScores(row.round, tuple(known))
    return None


def client_accuracies(methods: Sequence[MethodResults]) -> list[ClientAccuracy]:
    """Return the accuracies of each method whose clients were evaluated."""
    result = []
    for method in methods:
        scores = tuple(s for run in method.runs if (s := client_scores(run)) is not None)
        if scores:
            result.append(ClientAccuracy(method, scores))
    return result


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


def client_accuracy_chart(clients: Sequence[ClientAccuracy]) -> Chart | None:
    """Return a box over clients for each method, or None where no run has evaluated them."""
    if not clients:
        return None
    figure = empty_figure(70 + 62 * len(clients), hovermode="closest")
    texts = []
    for place, client_accuracy in enumerate(clients):
        method = client_accuracy.method
        values = [100 * accuracy for accuracy in client_accuracy.accuracies]
        figure.add_traces(_box(method, values, -2.0 * place))
        low, middle, high = map(format_number, (values[0], statistics.median(values), values[-1]))
        texts.append(f"{method.label}: median {middle} %, from {low} to {high} %")
    figure.update_xaxes(title_text="accuracy on a client's own examples, %")
    add_method_rows(figure, [c.method for c in clients], step=2.0)
    return Chart(figure, f"Accuracy of single clients. {'; '.join(texts)}.")


def _box(method: MethodResults, values: Sequence[float], y: float) -> list[Any]:
    """Return a box with points: all clients if they are few, else those outside the whiskers.

    The values are in percent and ascending.
    """
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
    shown = shown[:: max(1, len(shown) // (2 * MAX_SINGLE_POINTS))]
    points = go.Scatter(
        x=[rounded(value) for value in shown],
        y=[y] * len(shown),
        mode="markers",
        marker={"size": 5, "color": palette.method_colour(method.index, 0.55)},
        hovertemplate="%{x:.1f} %<extra></extra>",
    )
    return [box, points]
