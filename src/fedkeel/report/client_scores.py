"""How the score is distributed over the clients: a box for each method, and a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from fedkeel.records.baselines import LOCAL
from fedkeel.records.fairness import Gain, ScoreColumns, Spread, client_values, gain, spread
from fedkeel.records.score import MetricInfo
from fedkeel.report import palette
from fedkeel.report.chart_style import Chart, add_method_rows, empty_figure, escaped, rounded
from fedkeel.report.formatting import capital, format_number
from fedkeel.report.runs import MethodResults, RunResults

MAX_SINGLE_POINTS = 60
"""Clients up to which each is drawn as a point of its own."""

MIN_SPREAD_CLIENTS = 20
"""Clients from which on boxes and a worst tenth say more than each client does."""


ModelKind = Literal["global", "personal"]
"""Whose scores they are: the global model's, or those of each client's own model."""


@dataclass(frozen=True)
class RunClientScores:
    """The score of each client that a run evaluated, after a round.

    Args:
        round: rounds completed.
        seed: of the run.
        by_client: score of each client that has one, by its index.
        examples: of one test set that tells a share as well as the mean of these scores; None where
            that is not known.
        new_clients: clients that no round selected.
    """

    round: int
    seed: int
    by_client: Mapping[int, float]
    examples: int | None = None
    new_clients: frozenset[int] = frozenset()

    @property
    def values(self) -> tuple[float, ...]:
        """Only the scores."""
        return tuple(self.by_client.values())


@dataclass(frozen=True)
class ClientScores:
    """How the score is distributed over the clients of a method.

    Args:
        method: the method.
        model: which of its models was evaluated.
        score: what is distributed.
        runs: scores of the clients, for each run that evaluated them.
    """

    method: MethodResults
    model: ModelKind
    score: MetricInfo
    runs: tuple[RunClientScores, ...]

    @property
    def label(self) -> str:
        """The method, and that it is its personal models."""
        is_personal = self.model == "personal" and self.method.record.method != LOCAL
        return f"{self.method.label} (personal)" if is_personal else self.method.label

    @property
    def labelled(self) -> MethodResults:
        """The method under this label, for a chart."""
        return replace(self.method, label=self.label)

    @property
    def values(self) -> list[float]:
        """The score of every client of every seed, ascending."""
        return sorted(value for run in self.runs for value in run.values)

    @property
    def spread(self) -> Spread:
        """How these are distributed."""
        distribution = spread(self.values, self.score)
        if distribution is None:  # a run without scores is not among the runs
            raise ValueError("no client has a score")
        return distribution

    @property
    def of_new_clients(self) -> float | None:
        """The mean score of the clients that no round selected; None where there are none."""
        values = [
            run.by_client[k] for run in self.runs for k in run.by_client.keys() & run.new_clients
        ]
        return statistics.fmean(values) if values else None

    def gain_over(self, reference: ClientScores) -> Gain | None:
        """Return what clients gain against other models, seed by seed and client by client."""
        others = {run.seed: run.by_client for run in reference.runs}
        gains = [gain(run.by_client, others.get(run.seed, {}), self.score) for run in self.runs]
        values = sorted(value for of_seed in gains if of_seed for value in of_seed.values)
        return Gain(tuple(values)) if values else None

    @property
    def has_spread(self) -> bool:
        """Whether a run has enough clients to tell how they are distributed."""
        return max(len(run.values) for run in self.runs) >= MIN_SPREAD_CLIENTS

    @property
    def client_counts(self) -> str:
        """How many clients of a run were evaluated: one number, or the range over runs."""
        counts = [len(run.values) for run in self.runs]
        return "–".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))

    @property
    def rounds(self) -> str:
        """The rounds after which the clients were evaluated."""
        return ", ".join(map(str, sorted({run.round for run in self.runs})))


def run_client_scores(
    run: RunResults, score: MetricInfo, model: ModelKind = "global"
) -> RunClientScores | None:
    """Return the scores of the last round in which clients were evaluated.

    The models of clients that train alone, in the baseline `local`, are personal ones.
    """
    if run.record.method == LOCAL and model == "global":
        return None
    for row in reversed(run.rows):
        is_own = model == "personal" and run.record.method != LOCAL
        columns = row.personal if is_own else row.per_client
        known = client_values(columns, score)
        if known:
            new = frozenset(run.record.new_clients)
            return RunClientScores(row.round, run.record.seed, known, _of_mean(columns, known), new)
    return None


def _of_mean(columns: ScoreColumns | None, clients: Collection[int]) -> int | None:
    """Return the examples of one test set that tells a share as well as the mean over clients."""
    sizes = (columns or {}).get("examples")
    if not sizes:
        return None
    return int(len(clients) ** 2 / math.fsum(1 / (sizes[client] or 1) for client in clients))


def client_scores(methods: Sequence[MethodResults]) -> list[ClientScores]:
    """Return the first method's score over clients, for each model of each method that has it."""
    score = methods[0].record.score
    result = []
    models: tuple[ModelKind, ...] = ("global", "personal")
    for method in methods:
        for model in models:
            scores = (run_client_scores(run, score, model) for run in method.runs)
            runs = tuple(run for run in scores if run is not None)
            if runs:
                result.append(ClientScores(method, model, score, runs))
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
            "them aside, in Python holdout=0.25 of fedkeel.from_clients."
        )
    return "Some runs measure clients on examples they hold out, others on those they train on."


def client_score_chart(clients: Sequence[ClientScores]) -> Chart | None:
    """Return a box over clients for each method, or None where no run has evaluated them."""
    if not clients:
        return None
    figure = empty_figure(70 + 62 * len(clients), hovermode="closest")
    texts = []
    score = clients[0].score
    unit = f" {score.unit}".rstrip()
    for place, of_method in enumerate(clients):
        method = of_method.labelled
        values = [score.scale * value for value in of_method.values]
        figure.add_traces(_box(method, values, -2.0 * place, score))
        low, middle, high = map(format_number, (values[0], statistics.median(values), values[-1]))
        texts.append(f"{method.label}: median {middle}{unit}, from {low} to {high}{unit}")
    title = f"{score.label} on a client's own examples"
    figure.update_xaxes(title_text=", ".join(filter(None, (title, escaped(score.unit)))))
    add_method_rows(figure, [c.labelled for c in clients], step=2.0)
    return Chart(figure, f"{capital(score.label)} of single clients. {'; '.join(texts)}.")


def _box(method: MethodResults, values: Sequence[float], y: float, score: MetricInfo) -> list[Any]:
    """Return a box with points: all clients if they are few, else those outside the whiskers.

    The values are ascending, shares in percent.
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
    unit = escaped(f" {score.unit}".rstrip())
    points = go.Scatter(
        x=[rounded(value) for value in shown],
        y=[y] * len(shown),
        mode="markers",
        marker={"size": 5, "color": palette.method_colour(method.index, 0.55)},
        hovertemplate=f"%{{x:{'.1f' if score.is_share else '.4g'}}}{unit}<extra></extra>",
    )
    return [box, points]
