"""Who gains by personal models: a table of models by client, and a picture of gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedkeel.records.baselines import LOCAL
from fedkeel.records.fairness import Gain, Spread
from fedkeel.report import palette
from fedkeel.report.chart_style import (
    Chart,
    LegendItem,
    empty_figure,
    escaped,
    evenly_spaced,
    rounded,
)
from fedkeel.report.client_scores import ClientScores, client_scores
from fedkeel.report.formatting import MISSING, format_number, format_percent, format_score
from fedkeel.report.runs import MethodResults
from fedkeel.report.text_table import TextTable

NOTES = {
    "clients of": "Clients: each counts the same, all seeds together, on its own examples after "
    "the last round.",
    "worst tenth": "Worst tenth: their mean.",
    "fairness": "Fairness: Jain's index, 1 where all clients are equal.",
    "gain over": "Gain: share of the clients whose score is better than with the global model of "
    "the same run, or than with the model that the client trains alone (local).",
    "new": "New: the mean of the clients that no round has selected.",
}
"""What a reader of the table has to know, by the beginning of a column's heading."""


@dataclass(frozen=True)
class ClientRow:
    """A model of a method over the clients.

    Args:
        scores: the scores.
        spread: how they are distributed.
        over_global: gain over the global model of the same runs; None for that model itself, and
            where there is none.
        over_local: gain over each client's model alone; None where the comparison has none.
    """

    scores: ClientScores
    spread: Spread
    over_global: Gain | None
    over_local: Gain | None

    @property
    def cells(self) -> list[str]:
        """The texts of its row, after the method."""
        score, of = self.scores.score, self.spread
        gains = [_share(self.over_global), _share(self.over_local)]
        worst_tenth = of.worst_tenth if self.scores.has_spread else None
        numbers = [format_score(v, score, 1) for v in (of.mean, of.std, worst_tenth)]
        new = format_score(self.scores.of_new_clients, score, 1)
        return [self.scores.model, *numbers, format_number(of.jain), *gains, new]

    def to_json(self) -> dict[str, Any]:
        """Return plain values; shares are in [0, 1]."""
        of = self.spread
        values: dict[str, Any] = {
            "model": self.scores.model,
            "clients": of.clients,
            "mean": of.mean,
            "std": of.std,
            "variance": of.variance,
            "worst_tenth": of.worst_tenth,
            "best_tenth": of.best_tenth,
            "jain": of.jain,
            "new_clients": self.scores.of_new_clients,
        }
        for name, gain in (("over_global", self.over_global), ("over_local", self.over_local)):
            values[f"gain_{name}"] = gain and gain.mean
            values[f"share_that_gains_{name}"] = gain and gain.share
            values[f"share_that_loses_{name}"] = gain and gain.share_that_lose
        return values


def client_rows(clients: Sequence[ClientScores]) -> list[ClientRow]:
    """Return a row for each model of each method, with its gains."""
    alone = next((item for item in clients if item.method.record.method == LOCAL), None)
    by_global_model = {item.method.index: item for item in clients if item.model == "global"}
    rows = []
    for item in clients:
        base = by_global_model.get(item.method.index) if item.model == "personal" else None
        over_local = None if alone is None or item is alone else item.gain_over(alone)
        over_global = None if base is None else item.gain_over(base)
        rows.append(ClientRow(item, item.spread, over_global, over_local))
    return rows


def personal_rows(methods: Sequence[MethodResults]) -> list[ClientRow]:
    """Return the rows of a comparison; none where no method has personal models."""
    if not any(row.personal for method in methods for run in method.runs for row in run.rows):
        return []
    return client_rows(client_scores(methods))


def _headings(rows: Sequence[ClientRow]) -> list[str]:
    """Return the headings of `ClientRow.cells`."""
    score = rows[0].scores.score
    unit, points = (f"\n{unit}".rstrip() for unit in (score.unit, score.unit_of_difference))
    return [
        "model",
        f"mean{unit}",
        f"deviation{points}",
        "worst\ntenth" + unit.replace("\n", " "),
        "fairness",
        "gain over\nglobal, %",
        "gain over\nlocal, %",
        "new" + unit,
    ]


def client_table(rows: Sequence[ClientRow]) -> TextTable:
    """Return the table as texts, without the gains that no row has."""
    texts, names = [row.cells for row in rows], _headings(rows)
    shown = [i for i in range(len(names)) if any(cells[i] != MISSING for cells in texts)]
    headings = ["clients of", *(names[i] for i in shown)]
    heads = [heading.replace("\n", " ") for heading in headings]
    notes = [note for begin, note in NOTES.items() if any(h.startswith(begin) for h in heads)]
    return TextTable(
        headings,
        [
            [row.scores.method.label, *(cells[i] for i in shown)]
            for row, cells in zip(rows, texts, strict=True)
        ],
        notes=[" ".join(notes)],
        texts=frozenset({0, 1}),
    )


def gain_chart(clients: Sequence[ClientScores]) -> Chart | None:
    """Return the gain of each client, ascending, for each method with a reference.

    The reference is the model that each client trains alone where the comparison has it, for all
    methods alike; else, for personal models, the global model of the same run. None where there is
    neither.
    """
    rows = client_rows(clients)
    is_over_local = any(row.over_local for row in rows)
    lines = [(row, row.over_local if is_over_local else row.over_global) for row in rows]
    known = [(row.scores, gain) for row, gain in lines if gain is not None]
    if not known:
        return None
    score = known[0][0].score
    figure = empty_figure(380, hovermode="closest")
    texts = []
    for scores, gain in known:
        method, count = scores.labelled, len(gain.values)
        places = evenly_spaced(count)
        is_global = scores.model == "global"
        figure.add_scatter(
            x=[rounded(100 * (place + 0.5) / count) for place in places],
            y=[rounded(score.scale * gain.values[place]) for place in places],
            mode="lines+markers",
            name=escaped(method.label),
            line={
                "color": palette.method_colour(method.index, 0.4 if is_global else 0.8),
                "width": 1.2,
                "dash": palette.dash(method.index),
            },
            marker={
                "size": 6,
                "symbol": "circle-open" if is_global else "circle",
                "color": palette.method_colour(method.index),
            },
            hovertemplate=f"{escaped(method.label)}: %{{y:+.3g}}<extra></extra>",
        )
        gains, loses = format_percent(gain.share), format_percent(gain.share_that_lose)
        texts.append(f"{method.label}: {gains} % of the clients gain, {loses} % lose")
    figure.add_hline(y=0, line={"color": palette.rgba(palette.INK[0]), "width": 1})
    base = "the client's own model alone" if is_over_local else "the global model"
    unit = escaped(score.unit_of_difference)
    figure.update_xaxes(title_text="clients, from the smallest gain, %")
    figure.update_yaxes(title_text=", ".join(filter(None, (f"gain over {base}", unit))))
    legend = tuple(
        LegendItem(scores.label, *palette.METHODS[scores.method.index % len(palette.METHODS)])
        for scores, _ in known
    )
    return Chart(figure, f"Gain of each client over {base}. {'; '.join(texts)}.", legend)


def _share(gain: Gain | None) -> str:
    return format_percent(None if gain is None else gain.share)
