"""The table of results by method, for terminal, Markdown, JSON and page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rich import box
from rich.table import Table
from rich.text import Text

from fedkeel.errors import counted, printable
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat, is_tied, paired_difference
from fedkeel.report.formatting import (
    capital,
    extreme_of,
    format_number,
    format_score,
    format_stat,
    format_target,
    score_unit,
)
from fedkeel.report.summary import MethodSummary, Quantity, shared_score

_NAME_WIDTH = 27

ColumnName = Quantity | Literal["gap"]
"""A figure of `ResultRow` that has a column."""


@dataclass(frozen=True)
class ResultRow:
    """One row of the table.

    Args:
        summary: the figures of a method over seeds.
        gap: difference of its best score to that of the method with the best mean, seed by seed
            where both share seeds; None for that method itself, and where scores differ.
        marked: columns in which the method is best or tied with the best.
    """

    summary: MethodSummary
    gap: Stat | None
    marked: tuple[ColumnName, ...]

    @property
    def label(self) -> str:
        """The method, marked where not every run is finished."""
        return self.summary.method + (" †" if self.summary.unfinished else "")

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
        return {**values, "marked": list(self.marked)}


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
class Column:
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
            if self.name == "gap" and not score.unit:
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


def all_columns(score: MetricInfo | None) -> tuple[Column, ...]:
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
        points = "points" if score.unit else unit
    cells = CellFormat(is_score=True, has_score_name=score is None)
    return (
        Column(
            "best", "best", unit, better, cells, f"{capital(extreme)} test {label} of any round."
        ),
        Column(
            "gap",
            "gap to best",
            points,
            None,
            cells,
            f"Difference of best {label} to the method with the {extreme} mean, seed by seed.",
            is_for_page_only=True,
        ),
        Column("last", "last", unit, better, cells, f"{capital(label)} after the last round."),
        Column(
            "last_mean",
            "last ten",
            unit,
            better,
            cells,
            f"Mean {label} of the last ten evaluations.",
            is_for_page_only=True,
        ),
        Column(
            "rounds_to_target",
            "to target",
            "rounds",
            fewest,
            _ROUNDS,
            f"Completed rounds until the {label} reaches the target.",
        ),
        Column(
            "bytes_to_target",
            "to target",
            "MB",
            fewest,
            _MEGABYTES,
            f"Sent both ways, over all clients, until the {label} reaches the target.",
            is_for_page_only=True,
        ),
        *_COSTS,
    )


_COSTS = (
    Column(
        "sent",
        "traffic",
        "MB",
        "low",
        _MEGABYTES,
        "Sent both ways, over all clients and rounds; 1 MB is a million bytes.",
    ),
    Column(
        "traffic",
        "traffic",
        "× model",
        "low",
        CellFormat(),
        "Mean of down and up for each selected client and round, in multiples of the model's "
        "parameters. FedAvg is 1; less where clients drop out, more where buffers are averaged.",
    ),
    Column(
        "seconds_per_client",
        "training",
        "ms/client",
        None,
        _MILLISECONDS,
        "Training time for each client and round, on this machine. It grows with whatever else the "
        "machine does, so no method is marked.",
    ),
    Column(
        "seconds",
        "whole run",
        "s",
        None,
        CellFormat(),
        "Seconds over all phases and rounds of a run, on this machine.",
        is_for_page_only=True,
    ),
)

_TARGET_COLUMNS: tuple[ColumnName, ...] = ("rounds_to_target", "bytes_to_target")


@dataclass(frozen=True)
class Footnote:
    """A note under a table: what it explains, and the explanation."""

    term: str
    text: str

    def __str__(self) -> str:
        return f"{self.term}: {self.text}"


def result_rows(methods: Sequence[MethodSummary]) -> list[ResultRow]:
    """Return one row for each method, in the order given."""
    score = shared_score(methods)
    best_methods = {
        column.name: _best_methods(methods, column)
        for column in all_columns(score)
        if column.better
    }
    means = [] if score is None else [(m, stat) for m in methods if (stat := m.stat("best"))]
    leader = None
    if score is not None and means:
        leader = max(means, key=lambda item: score.sign * item[1].mean)[0]
    return [
        ResultRow(
            method,
            _gap(method, leader),
            tuple(name for name, best in best_methods.items() if index in best),
        )
        for index, method in enumerate(methods)
    ]


def _gap(method: MethodSummary, leader: MethodSummary | None) -> Stat | None:
    """Return the difference to the method with the best mean, None for that method itself."""
    if leader is None or method is leader:
        return None
    best, of_leader = method.stat("best"), leader.stat("best")
    if best is None or of_leader is None:
        return None
    paired = paired_difference(method.by_seed("best"), leader.by_seed("best"))
    return paired.stat if paired else Stat.of([best.mean - of_leader.mean])


def _best_methods(methods: Sequence[MethodSummary], column: Column) -> list[int]:
    """Return the methods to print bold: the best and those tied with it; none where all are equal.

    Methods with unfinished runs compete only where all have some; rounds to target are compared
    only among the methods that reached it on the most seeds.
    """
    if column.name == "gap" or column.better is None or len(methods) < 2:
        return []
    has_finished = any(not method.unfinished for method in methods)
    eligible = [i for i, m in enumerate(methods) if not (has_finished and m.unfinished)]
    stats = {i: stat for i in eligible if (stat := methods[i].stat(column.name))}
    if column.name in _TARGET_COLUMNS:
        shares = {i: stat.count / len(methods[i].runs) for i, stat in stats.items()}
        stats = {i: stat for i, stat in stats.items() if shares[i] == max(shares.values())}
    if not stats:
        return []
    choose = max if column.better == "high" else min
    best = choose(stats.values(), key=lambda stat: stat.mean)
    is_equal = [abs(stat.mean - best.mean) <= 1e-9 * abs(best.mean) for stat in stats.values()]
    if len(stats) == len(eligible) and all(is_equal):
        return []
    return [i for i, stat in stats.items() if is_tied(best, stat)]


def visible_columns(rows: Sequence[ResultRow], *, is_page: bool = False) -> list[Column]:
    """Return the columns that have something to show."""
    has_target = any(row.summary.target is not None for row in rows)

    def is_visible(column: Column) -> bool:
        if column.is_for_page_only and not is_page:
            return False
        if column.name in _TARGET_COLUMNS and not has_target:
            return False
        if column.name == "gap" and len(rows) < 2:
            return False
        has_values = any(row.stat(column.name) is not None for row in rows)
        return has_values or column.name == "rounds_to_target"

    score = shared_score([row.summary for row in rows])
    return [column for column in all_columns(score) if is_visible(column)]


def terminal_table(rows: Sequence[ResultRow], width: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        rows: the rows.
        width: columns of the terminal, None to ask it. Where they do not suffice, traffic in MB is
            left out first, then the last score, then the time.
    """
    columns = _fitting_columns(rows, width or shutil.get_terminal_size((80, 24)).columns)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        caption=Text("\n".join(printable(str(note)) for note in footnotes(rows))),
        caption_justify="left",
    )
    table.add_column("method", overflow="fold")
    for column in columns:
        heading = f"{column.heading}\n{column.unit}" if column.unit else column.heading
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(_wrapped(printable(row.label)))]
        for column in columns:
            style = "bold" if column.name in row.marked else ""
            cells.append(Text(column.cell(row), style=style))
        table.add_row(*cells)
    return table


def _fitting_columns(rows: Sequence[ResultRow], width: int) -> list[Column]:
    """Return the columns that leave enough space for the names of the methods."""
    columns = visible_columns(rows)
    lines = [line for row in rows for line in _wrapped(printable(row.label)).split("\n")]
    name_width = min(max(map(len, lines), default=0), _NAME_WIDTH)
    for optional in ("sent", "last", "seconds_per_client"):
        widths = [
            max(len(column.heading), len(column.unit), *(len(column.cell(row)) for row in rows))
            for column in columns
        ]
        if sum(widths) + 2 * len(widths) + 2 + name_width <= width:
            break
        columns = [column for column in columns if column.name != optional]
    return columns


def markdown_table(rows: Sequence[ResultRow]) -> str:
    """Return the table as Markdown, with the footnotes under it."""
    columns = visible_columns(rows)
    headings = ["method", *(f"{column.heading} {column.unit}".strip() for column in columns)]
    lines = [headings, ["---", *("---:" for _ in columns)]]
    for row in rows:
        label = printable(row.label).replace("|", "\\|").replace("`", "'")
        cells = [(column.cell(row), column.name in row.marked) for column in columns]
        lines.append([f"`{label}`", *(f"**{text}**" if bold else text for text, bold in cells)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "".join(f"\n{printable(str(note))}\n" for note in footnotes(rows))


def footnotes(rows: Sequence[ResultRow]) -> list[Footnote]:
    """Return what a reader of the table has to know."""
    methods = [row.summary for row in rows]
    score = shared_score(methods)
    if score is None:
        text = "the methods are judged by different ones, so they are not ranked."
        notes = [Footnote("Score", text)]
        label, extreme = "score", "best"
    else:
        notes, label, extreme = [], score.label, extreme_of(score)
    notes.append(
        Footnote(
            "Best",
            f"the {extreme} test {label} of any round. Too optimistic when {label} goes up and "
            "down; prefer 'last'.",
        )
    )
    if any(row.marked for row in rows):
        text = "the best mean of the column, and every mean within one pooled standard error of it."
        notes.append(Footnote("Bold", text))
    if any(len(method.runs) > 1 for method in methods):
        scored = {method.method: len(method.values("best")) for method in methods}
        counts = [f"{label} {count}" for label, count in scored.items()]
        if len(set(scored.values())) == 1:
            counts = [f"{counted(next(iter(scored.values())), 'seed')} each"]
        notes.append(Footnote("±", f"sample standard deviation over seeds ({', '.join(counts)})."))
    target = next((method.target for method in methods if method.target is not None), None)
    if target is not None:
        goal = "target" if score is None else f"{format_target(target, score)} test {label}"
        notes.append(
            Footnote(
                f"Rounds to {goal}",
                "mean over the seeds that reached it (and how many did, if not all).",
            )
        )
    if any(method.unfinished for method in methods):
        notes.append(Footnote("†", "not every run is finished."))
    for method in methods:
        if method.failed:
            text = f"training failed in {counted(method.failed, 'run')}."
            notes.append(Footnote(method.method, text))
    return notes


def _wrapped(label: str, width: int = _NAME_WIDTH) -> str:
    """Return a label whose lines end after a "+" or a space, rather than anywhere."""
    lines = [""]
    for piece in re.split(r"(?<=[+ ])", label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
