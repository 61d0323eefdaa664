"""The table of a comparison: plain rows, and the same rows for terminal, markdown and page."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedkeel.errors import counted
from fedkeel.report.formatting import NOTHING, number, spread
from fedkeel.report.summary import Group, Stat, paired, tied

_NAME = 27

Row = dict[str, Any]
"""One method: plain values by name, accuracy as a share in [0, 1], bytes and seconds."""


@dataclass(frozen=True)
class Column:
    """A column: how a row is shown in it, and which value is best.

    Args:
        key: figure of the row that decides which is best.
        head: header.
        unit: unit, shown with the header.
        text: the cell.
        better: ``high`` or ``low``, or None where no value is better than another.
        wide: whether the column is for the page only.
        about: what it holds, in words.
    """

    key: str
    head: str
    unit: str
    text: Callable[[Row], str]
    better: str | None
    wide: bool
    about: str


_FIGURES = (
    "best",
    "last",
    "last_mean",
    "rounds_to_target",
    "bytes_to_target",
    "down",
    "up",
    "sent",
    "traffic",
    "seconds_per_client",
    "seconds_per_round",
    "seconds",
)


def table(groups: Sequence[Group]) -> list[Row]:
    """Return one row for each method, in the order given.

    A row holds plain values, ready for JSON: ``method``, ``seeds``, ``scored`` (those that made a
    round), ``unfinished``, ``failed``, ``rounds``, ``target``, ``reached``; every figure of the
    summary with its deviation as ``best`` and ``best_std``; the fluctuation in percentage points;
    the ``gap`` to the highest mean, seed by seed where seeds are shared; and ``marked``, the
    columns in which the method is best or tied.
    """
    rows = [_row(group) for group in groups]
    _gaps(groups, rows)
    for column in COLUMNS:
        if column.better is not None:
            for index in _marked(groups, column):
                rows[index]["marked"].append(column.key)
    return rows


def columns(rows: Sequence[Row], *, wide: bool = False) -> list[Column]:
    """Return the columns that have something to show."""
    offered = [column for column in COLUMNS if wide or not column.wide]
    shown = [c for c in offered if any(row[c.key] is not None for row in rows)]
    if all(row["target"] is None for row in rows):
        shown = [column for column in shown if column.key not in _OF_TARGET]
    elif not any(column.key == "rounds_to_target" for column in shown):
        place = next((i for i, c in enumerate(shown) if c.key == "sent"), len(shown))
        shown[place:place] = [c for c in offered if c.key == "rounds_to_target"]
    if len(rows) < 2:
        shown = [column for column in shown if column.key != "gap"]
    return shown


def to_text(rows: Sequence[Row], width: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        rows: rows of `table`.
        width: columns of the terminal, None to ask it. Where they do not suffice, traffic in MB is
            left out first, then the last accuracy, then the time.
    """
    if width is None:
        width = shutil.get_terminal_size((80, 24)).columns
    picked = _fitting(rows, width)
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        caption="\n".join(footnotes(rows)),
        caption_justify="left",
    )
    shown.add_column("method", overflow="fold")
    for column in picked:
        head = f"{column.head}\n{column.unit}" if column.unit else column.head
        shown.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(_wrapped(_method(row)))]
        for column in picked:
            style = "bold" if column.key in row["marked"] else ""
            cells.append(Text(column.text(row), style=style))
        shown.add_row(*cells)
    return shown


def _fitting(rows: Sequence[Row], width: int) -> list[Column]:
    """Return the columns that leave the names of the methods room enough."""
    picked = columns(rows)
    names = max(
        (len(line) for row in rows for line in _wrapped(_method(row)).split("\n")), default=0
    )
    for dropped in ("sent", "last", "seconds_per_client"):
        wide = [max([len(c.head), len(c.unit), *(len(c.text(r)) for r in rows)]) for c in picked]
        if sum(wide) + 2 * len(wide) + 2 + min(names, _NAME) <= width:
            break
        picked = [column for column in picked if column.key != dropped]
    return picked


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table as markdown, with the footnotes under it."""
    shown = columns(rows)
    heads = ["method", *(f"{c.head} {c.unit}".strip() for c in shown)]
    lines = [_markdown_line(heads), _markdown_line(["---", *("---:" for _ in shown)])]
    for row in rows:
        name = _method(row).replace("|", "\\|").replace("`", "'")
        cells = [f"`{name}`"]
        for column in shown:
            text = column.text(row)
            cells.append(f"**{text}**" if column.key in row["marked"] else text)
        lines.append(_markdown_line(cells))
    notes = "".join(f"\n{note}\n" for note in footnotes(rows))
    return "\n".join(lines) + "\n" + notes


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Return what a reader of the table has to know."""
    notes = ["Best: of any round, picked on the test set, which flatters a method that swings."]
    if any(row["marked"] for row in rows):
        notes.append(
            "Bold: the best mean of the column, and every mean within one pooled standard error "
            "of it."
        )
    if any(row["seeds"] > 1 for row in rows):
        notes.append(f"±: sample standard deviation over seeds ({_seeds(rows)}).")
    target = next((row["target"] for row in rows if row["target"] is not None), None)
    if target is not None:
        notes.append(
            f"Rounds to {100 * target:g} % test accuracy: mean over the seeds that reached it "
            "(how many did, where not all)."
        )
    if any(row["unfinished"] for row in rows):
        notes.append("†: not every run is finished.")
    for row in rows:
        if row["failed"]:
            runs = counted(row["failed"], "run")
            notes.append(f"{row['method']}: {runs} failed, for training could not go on.")
    return notes


def _row(group: Group) -> Row:
    target = next((s.target for s in group.summaries if s.target is not None), None)
    row: Row = {
        "method": group.method,
        "seeds": len(group.summaries),
        "scored": len(group.values("best")),
        "unfinished": group.unfinished,
        "failed": group.failed,
        "rounds": max((s.rounds for s in group.summaries), default=0),
        "target": target,
        "reached": group.reached,
    }
    for figure in _FIGURES:
        row |= _pair(figure, group.stat(figure))
    for figure in ("mean", "std", "min"):
        row |= _pair(f"fluctuation_{figure}", group.fluctuation(figure))
    return row | {"gap": None, "gap_std": None, "marked": []}


def _pair(name: str, stat: Stat | None) -> Row:
    return {name: stat.mean if stat else None, f"{name}_std": stat.std if stat else None}


def _gaps(groups: Sequence[Group], rows: Sequence[Row]) -> None:
    """Fill in the difference to the method with the highest mean."""
    scored = [(stat.mean, -i) for i, g in enumerate(groups) if (stat := g.stat("best"))]
    if not scored:
        return
    leader = groups[-max(scored)[1]]
    for group, row in zip(groups, rows, strict=True):
        pair, top, own = paired(group, leader), leader.stat("best"), group.stat("best")
        if group is leader or own is None or top is None:
            continue
        row["gap"] = pair.difference.mean if pair else own.mean - top.mean
        row["gap_std"] = pair.difference.std if pair else None


def _marked(groups: Sequence[Group], column: Column) -> list[int]:
    """Return the groups to print bold: the best and those tied with it; none where all are equal.

    Methods with unfinished runs compete only where all have some; rounds to target are compared
    only among the methods that reached it on the most seeds.
    """
    sign = 1.0 if column.better == "high" else -1.0
    finished = [not group.unfinished for group in groups]
    fair = [i for i, done in enumerate(finished) if done or not any(finished)]
    stats = [(i, s) for i in fair if (s := groups[i].stat(column.key))]
    if column.key in _OF_TARGET:
        share = {i: s.count / len(groups[i].summaries) for i, s in stats}
        stats = [(i, s) for i, s in stats if share[i] == max(share.values())]
    if not stats or len(groups) < 2:
        return []
    best = max((s for _, s in stats), key=lambda s: sign * s.mean)
    level = [i for i, s in stats if tied(best, s)]
    equal = len(stats) == len(fair) and all(
        abs(s.mean - best.mean) <= 1e-9 * abs(best.mean) for _, s in stats
    )
    return [] if equal else level


def _seeds(rows: Sequence[Row]) -> str:
    """Return how many seeds have a score; those of which no round was made have none."""
    known = [row["scored"] for row in rows]
    if len(set(known)) == 1:
        return f"{counted(known[0], 'seed')} each"
    return ", ".join(f"{row['method']} {n}" for row, n in zip(rows, known, strict=True))


def _method(row: Row) -> str:
    return str(row["method"]) + (" †" if row["unfinished"] else "")


def _wrapped(label: str, width: int = _NAME) -> str:
    """Return a label whose lines end after a "+" rather than anywhere."""
    lines = [""]
    for piece in re.split(r"(?<=[+ ])", label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _stat(row: Row, key: str) -> Stat | None:
    if row[key] is None:
        return None
    return Stat(row[key], row[f"{key}_std"], row["seeds"], row[key], row[key])


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: spread(_stat(row, key), scale=100, digits=2)


def _mean(key: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: NOTHING if row[key] is None else number(scale * row[key])


def _spread(key: str, scale: float) -> Callable[[Row], str]:
    return lambda row: spread(_stat(row, key), scale=scale)


def _rounds(row: Row) -> str:
    told = spread(_stat(row, "rounds_to_target"), digits=0)
    return told if row["reached"] == row["seeds"] else f"{told} ({row['reached']}/{row['seeds']})"


def _gap(row: Row) -> str:
    return NOTHING if row["gap"] is None else spread(_stat(row, "gap"), scale=100, digits=2)


_OF_TARGET = ("rounds_to_target", "bytes_to_target")

COLUMNS: tuple[Column, ...] = (
    Column(
        "best", "best", "%", _percent("best"), "high", False, "Highest test accuracy of any round."
    ),
    Column(
        "gap",
        "gap to best",
        "points",
        _gap,
        None,
        True,
        "Difference of best accuracy to the method with the highest mean, seed by seed.",
    ),
    Column("last", "last", "%", _percent("last"), "high", False, "Accuracy after the last round."),
    Column(
        "last_mean",
        "last ten",
        "%",
        _percent("last_mean"),
        "high",
        True,
        "Mean accuracy of the last ten evaluations.",
    ),
    Column(
        "rounds_to_target",
        "to target",
        "rounds",
        _rounds,
        "low",
        False,
        "Completed rounds until the accuracy reaches the target.",
    ),
    Column(
        "bytes_to_target",
        "to target",
        "MB",
        _mean("bytes_to_target", 1e-6),
        "low",
        True,
        "Sent both ways, all clients, until the target is reached.",
    ),
    Column(
        "sent",
        "traffic",
        "MB",
        _mean("sent", 1e-6),
        "low",
        False,
        "Sent both ways in all, over all clients and rounds; 1 MB is a million bytes.",
    ),
    Column(
        "traffic",
        "traffic",
        "× model",
        _mean("traffic"),
        "low",
        False,
        "Mean of down and up for each selected client and round, in multiples of the model's "
        "parameters. FedAvg is 1; less where clients drop out, more where buffers are averaged.",
    ),
    Column(
        "seconds_per_client",
        "training",
        "ms/client",
        _spread("seconds_per_client", 1e3),
        "low",
        False,
        "Training time for each client and round, on this machine.",
    ),
    Column(
        "seconds",
        "whole run",
        "s",
        _mean("seconds"),
        "low",
        True,
        "Seconds over all phases and rounds of a run.",
    ),
)
"""The columns, in order."""
