"""The columns of the table of results, and the rows that they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedkeel.base.feature import Figure, figures
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat
from fedkeel.report.claims import Claim
from fedkeel.report.formatting import (
    capital,
    extreme_of,
    format_number,
    format_score,
    format_stat,
    score_unit,
)
from fedkeel.report.summary import MethodSummary, Quantity

ColumnName = str
"""A figure of `ResultRow` that has a column: a `Quantity`, ``gap``, or the key of a feature's."""


@dataclass(frozen=True)
class ResultRow:
    """One row of the table.

    Args:
        summary: the figures of a method over seeds.
        gap: difference of its best score to that of the method with the best mean, seed by seed
            where both share seeds; None for that method itself, and where scores differ.
        marked: columns in which the method is best or tied with the best.
        claim: what may be claimed of it against the reference; None for the reference itself, and
            where nothing may be.
    """

    summary: MethodSummary
    gap: Stat | None
    marked: tuple[ColumnName, ...]
    claim: Claim | None = None

    @property
    def label(self) -> str:
        """The method, marked where not every run is finished, and where its model is not all."""
        marks = " †" if self.summary.unfinished else ""
        return self.summary.method + marks + (" ‡" if self.summary.hides_personal else "")

    def stat(self, column: ColumnName) -> Stat | None:
        """Return the figure of a column."""
        return self.gap if column == "gap" else self.summary.stat(column)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: a figure's mean under its name, its deviation under NAME_std.

        A score that is a share is in [0, 1]; its fluctuations are in percentage points.
        """
        summary = self.summary
        stats = {
            **{name: summary.stat(name) for name in get_args(Quantity)},
            **{figure.key_of_run: summary.stat(figure.key_of_run) for figure in figures()},
            "fluctuation_mean": summary.fluctuation("mean"),
            "fluctuation_std": summary.fluctuation("std"),
            "fluctuation_min": summary.fluctuation("min"),
            "gap": self.gap,
        }
        values = {
            "method": summary.method,
            "score": summary.score.name,
            "seeds": len(summary.runs),
            "scored": len(summary.values("best")),
            "unfinished": summary.unfinished,
            "failed": summary.failed,
            "rounds": max((run.rounds for run in summary.runs), default=0),
            "target": summary.target,
            "reached": len(summary.values("rounds_to_target")),
        }
        for name, stat in stats.items():
            values[name] = stat.mean if stat else None
            values[f"{name}_std"] = stat.std if stat else None
        claim = self.claim.to_json() if self.claim else None
        return {**values, "marked": list(self.marked), "claim": claim}


@dataclass(frozen=True)
class CellFormat:
    """How the cells of a column are written.

    Args:
        scale: factor from the figure to the unit of the column.
        decimals: decimals; None for three significant digits.
        has_deviation: whether the deviation over seeds is shown.
        is_score: whether the figure is a score, which is written as its own kind is.
        has_score_name: whether the name of the score and its unit stand in the cell.
    """

    scale: float = 1.0
    decimals: int | None = None
    has_deviation: bool = False
    is_score: bool = False
    has_score_name: bool = False


@dataclass(frozen=True)
class ReportColumn:
    """A column of the table.

    Args:
        name: the figure that it shows.
        heading: heading.
        unit: unit, shown with the heading.
        better: which values are better, or None where neither are.
        format: how its cells are written.
        description: what it holds, in a sentence.
        is_for_page_only: whether only the page shows it.
    """

    name: ColumnName
    heading: str
    unit: str
    better: Literal["high", "low"] | None
    format: CellFormat
    description: str
    is_for_page_only: bool = False

    def cell(self, row: ResultRow) -> str:
        """Return the text of a row's cell."""
        stat, scale = row.stat(self.name), self.format.scale
        if self.format.is_score:
            score, has_name = row.summary.score, self.format.has_score_name and stat is not None
            if self.name == "gap" and not score.is_share:
                return format_stat(stat)
            text = format_score(stat, score, has_unit=has_name)
            return f"{row.summary.judged_by} {text}" if has_name else text
        if not self.format.has_deviation:
            return format_number(stat.mean * scale if stat else None)
        text = format_stat(stat, scale=scale, decimals=self.format.decimals)
        reached, seeds = stat.count if stat else 0, len(row.summary.runs)
        if self.name == "rounds_to_target" and reached < seeds:
            text += f" ({reached}/{seeds})"
        return text


_ROUNDS = CellFormat(decimals=0, has_deviation=True)
_MEGABYTES = CellFormat(1e-6)
_MILLISECONDS = CellFormat(1e3, has_deviation=True)


def all_columns(score: MetricInfo | None) -> tuple[ReportColumn, ...]:
    """Return the columns, in order.

    Args:
        score: the score of all methods; None where they are judged by several, which are not
            compared.
    """
    better: Literal["high", "low"] | None = None
    fewest: Literal["low"] | None = None
    label, unit, points, extreme = "score", "", "", "best"
    if score is not None:
        better, fewest = ("high" if score.higher_is_better else "low"), "low"
        label, unit, extreme = score.label, score_unit(score), extreme_of(score)
        points = "points" if score.is_share else unit
    cells = CellFormat(is_score=True, has_score_name=score is None)
    return (
        ReportColumn(
            "best", "best", unit, better, cells, f"{capital(extreme)} test {label} of any round."
        ),
        ReportColumn(
            "gap",
            "gap to best",
            points,
            None,
            cells,
            f"Difference of best {label} to the method with the {extreme} mean, seed by seed.",
            is_for_page_only=True,
        ),
        ReportColumn(
            "last", "last", unit, better, cells, f"{capital(label)} after the last round."
        ),
        ReportColumn(
            "last_mean",
            "last ten",
            unit,
            better,
            cells,
            f"Mean {label} of the last ten evaluations.",
            is_for_page_only=True,
        ),
        ReportColumn(
            "rounds_to_target",
            "to target",
            "rounds",
            fewest,
            _ROUNDS,
            f"Completed rounds until the {label} reaches the target.",
        ),
        ReportColumn(
            "bytes_to_target",
            "to target",
            "MB",
            fewest,
            _MEGABYTES,
            f"Sent both ways, over all clients, until the {label} reaches the target.",
            is_for_page_only=True,
        ),
        *(_of_feature(figure, label, fewest) for figure in figures() if figure.of_run == "target"),
        *_COSTS,
        *(_of_feature(figure, label) for figure in figures() if figure.of_run != "target"),
    )


def _of_feature(figure: Figure, label: str, fewest: Literal["low"] | None = None) -> ReportColumn:
    description, better = figure.description, figure.better
    if figure.of_run == "target":
        description = f"{capital(figure.time or figure.key)} until the {label} reaches the target."
        better = fewest
    cells = CellFormat(1 / figure.per_unit)
    return ReportColumn(figure.key_of_run, figure.heading, figure.unit, better, cells, description)


_COSTS = (
    ReportColumn(
        "sent",
        "traffic",
        "MB",
        "low",
        _MEGABYTES,
        "Sent both ways, over all clients and rounds; 1 MB is a million bytes.",
    ),
    ReportColumn(
        "traffic",
        "traffic",
        "× model",
        "low",
        CellFormat(),
        "Mean of down and up for each selected client and round, in multiples of the model's "
        "parameters. FedAvg is 1; less where clients drop out, more where buffers are averaged.",
    ),
    ReportColumn(
        "seconds_per_client",
        "training",
        "ms/client",
        None,
        _MILLISECONDS,
        "Training time for each client, in the median round, on this machine. It grows with "
        "whatever else the machine does, so no method is marked.",
    ),
    ReportColumn(
        "seconds",
        "whole run",
        "s",
        None,
        CellFormat(),
        "Seconds over all phases and rounds of a run, on this machine.",
        is_for_page_only=True,
    ),
)
