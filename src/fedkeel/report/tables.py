"""The table of results by method, for terminal, Markdown, LaTeX, CSV, notebook and page."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from fedkeel.base.feature import baselines, figures
from fedkeel.errors import counted, printable
from fedkeel.records.baselines import LOCAL
from fedkeel.records.paired import paired_difference
from fedkeel.records.statistics import Stat, is_tied
from fedkeel.report.claims import Claims
from fedkeel.report.columns import ColumnName, ReportColumn, ResultRow, all_columns
from fedkeel.report.formatting import capital, extreme_of, format_target
from fedkeel.report.summary import MethodSummary, shared_score
from fedkeel.report.text_table import NAME_WIDTH, TextTable, wrapped

_TARGET_COLUMNS: tuple[ColumnName, ...] = ("rounds_to_target", "bytes_to_target")


@dataclass(frozen=True)
class Footnote:
    """A note under a table: what it explains, and the explanation."""

    term: str
    text: str

    def __str__(self) -> str:
        return f"{self.term}: {self.text}"


def result_rows(methods: Sequence[MethodSummary], claims: Claims | None = None) -> list[ResultRow]:
    """Return one row for each method, in the order given, with its claim where there are any."""
    score = shared_score(methods)
    best_methods = {
        column.name: _best_methods(methods, column)
        for column in all_columns(score)
        if column.better
    }
    competing = [method for method in methods if not method.baseline]
    means = [] if score is None else [(m, stat) for m in competing if (stat := m.stat("best"))]
    leader = None
    if score is not None and means:
        leader = max(means, key=lambda item: score.sign * item[1].mean)[0]
    return [
        ResultRow(
            method,
            _gap(method, leader),
            tuple(name for name, best in best_methods.items() if index in best),
            claims.of(method.method) if claims else None,
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


def _best_methods(methods: Sequence[MethodSummary], column: ReportColumn) -> list[int]:
    """Return the methods to print bold: the best and those tied with it; none where all are equal.

    Methods with unfinished runs compete only where all have some; rounds to target are compared
    only among the methods that reached it on the most seeds. Baselines do not compete.
    """
    competing = [i for i, method in enumerate(methods) if not method.baseline]
    if column.name == "gap" or column.better is None or len(competing) < 2:
        return []
    has_finished = any(not methods[i].unfinished for i in competing)
    eligible = [i for i in competing if not (has_finished and methods[i].unfinished)]
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


def visible_columns(rows: Sequence[ResultRow], *, is_page: bool = False) -> list[ReportColumn]:
    """Return the columns that have something to show."""
    has_target = any(row.summary.target is not None for row in rows)

    def is_visible(column: ReportColumn) -> bool:
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


def result_table(
    rows: Sequence[ResultRow],
    notes: Sequence[str] = (),
    columns: Sequence[ReportColumn] | None = None,
) -> TextTable:
    """Return the table as texts, with its footnotes and `notes` below it.

    Args:
        rows: the rows.
        notes: further notes.
        columns: the columns; None for all that have something to show.
    """
    columns = visible_columns(rows) if columns is None else columns
    heads = (f"{column.heading}\n{column.unit}".rstrip() for column in columns)
    cells = [[row.label, *(column.cell(row) for column in columns)] for row in rows]
    marked = frozenset(
        (index, place)
        for index, row in enumerate(rows)
        for place, column in enumerate(columns, 1)
        if column.name in row.marked
    )
    return TextTable(["method", *heads], cells, marked, [*map(str, footnotes(rows)), *notes])


def terminal_table(rows: Sequence[ResultRow], width: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        rows: the rows.
        width: columns of the terminal, None to ask it. Where they do not suffice, traffic in MB is
            left out first, then the time, traffic in models and the last score.
    """
    columns = _fitting_columns(rows, width or shutil.get_terminal_size((80, 24)).columns)
    return result_table(rows, columns=columns).terminal()


def _fitting_columns(rows: Sequence[ResultRow], width: int) -> list[ReportColumn]:
    """Return the columns that leave enough space for the names of the methods."""
    columns = visible_columns(rows)
    lines = [line for row in rows for line in wrapped(printable(row.label)).split("\n")]
    name_width = min(max(map(len, lines), default=0), NAME_WIDTH)
    for optional in ("sent", "seconds_per_client", "traffic", "last"):
        widths = [
            max(len(column.heading), len(column.unit), *(len(column.cell(row)) for row in rows))
            for column in columns
        ]
        if sum(widths) + 2 * len(widths) + 2 + name_width <= width:
            break
        columns = [column for column in columns if column.name != optional]
    return columns


def csv_table(rows: Sequence[ResultRow]) -> str:
    """Return every figure of the table as CSV, unrounded, a line for each method.

    The columns are those of `ResultRow.to_json`; what may be claimed has names from ``claim_`` on.
    """
    records = []
    for row in rows:
        values = row.to_json()
        claim = values.pop("claim") or {}
        values["marked"] = " ".join(values["marked"])
        claimed = {f"claim_{name}".replace("claim_claim", "claim"): v for name, v in claim.items()}
        records.append({**values, **claimed})
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def footnotes(rows: Sequence[ResultRow]) -> list[Footnote]:
    """Return what a reader of the table has to know."""
    methods = [row.summary for row in rows]
    score = shared_score(methods)
    if score is None:
        text = "the methods are judged by different ones, so they are not ranked."
        if len({method.judges for method in methods}) > 1:
            text += " evaluation.model = 'personal' judges all by the clients' models."
        notes = [Footnote("Score", text)]
        label, extreme = "score", "best"
    else:
        notes, label, extreme = [], score.label, extreme_of(score)
    if any(method.judges == "personal" for method in methods):
        text = "of the clients' models on their own examples, all clients together."
        notes.append(Footnote("Personal" if score is None else capital(label), text))
    notes.append(
        Footnote(
            "Best",
            f"the {extreme} test {label} of any round. The test data choose that round, so it is "
            "somewhat optimistic; 'last', after the last round, is not.",
        )
    )
    if any(row.marked for row in rows):
        others = " but for the baselines" if any(method.baseline for method in methods) else ""
        text = f"the best mean of the column{others}, and every mean within one pooled standard "
        text += "error of it."
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
    for figure in figures():
        if figure.footnote and any(method.stat(figure.key_of_run) for method in methods):
            notes.append(Footnote(capital(figure.heading), figure.footnote))
    if any(method.unfinished for method in methods):
        notes.append(Footnote("†", "not every run is finished."))
    if any(method.hides_personal for method in methods):
        text = "the scores of its global model, on the test set. Its clients have models of their "
        text += "own, which the scores of clients judge; to judge by them in this table too, set "
        text += "evaluation.model = 'personal'."
        notes.append(Footnote("‡", text))
    shown = {method.baseline: method for method in methods if method.baseline}
    for name, method in shown.items():
        text = baselines()[name]
        if name == LOCAL and method.judges == "global":
            text += "; the score is the mean over the clients' models, each on the whole test set, "
            text += "so on the examples of other clients too"
        notes.append(Footnote(name, f"{text}."))
    for method in methods:
        if method.failed:
            text = f"training failed in {counted(method.failed, 'run')}."
            notes.append(Footnote(method.method, text))
    return notes
