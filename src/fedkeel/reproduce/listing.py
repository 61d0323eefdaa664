"""The list of tables: data needed, time on this machine, how far each is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fedkeel.report.formatting import MISSING, format_duration
from fedkeel.reproduce.catalogue import load, names
from fedkeel.reproduce.estimate import Speeds, estimate, measure, unmeasured
from fedkeel.reproduce.plan import Ask, Cell, State, cells, state
from fedkeel.reproduce.table import Table
from fedkeel.reproduce.tuning import read


def listed(
    ask: Ask, jobs: int, goes_on: Callable[[], bool], told: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row of plain values for each table.

    Args:
        ask: where the runs are, and which version is meant.
        jobs: processes that times are for.
        goes_on: whether there is time to measure another speed.
        told: takes a line on what is going on.
    """
    ask = replace(ask, columns=())
    asked = {
        table.id: (table, [] if ask.quick and table.quick is None else cells(table, ask))
        for table in map(load, names())
    }
    speeds = Speeds(ask.out)
    wanted = unmeasured(list(asked.values()), speeds)
    if wanted:
        told(f"{len(wanted)} speeds of methods on models are not measured yet; Ctrl-C stops that")
    with suppress(KeyboardInterrupt):
        measure(wanted, speeds, goes_on)
    return [_row(table, own, ask, jobs, speeds) for table, own in asked.values()]


def _row(table: Table, own: Sequence[Cell], ask: Ask, jobs: int, speeds: Speeds) -> dict[str, Any]:
    found, took, tuned = state(own), estimate(own, speeds), _tuned(table, ask)
    return {
        "table": table.id,
        "title": table.title,
        "paper": table.paper,
        "quick": table.quick.name if ask.quick and table.quick else None,
        "data": list(table.data),
        "absent": list(found.absent),
        "state": found.words(table),
        "reason": table.missing or table.waits,
        "runs": found.runs,
        "finished": found.finished,
        "tuned_runs": tuned.runs if tuned else 0,
        "tuned_finished": tuned.finished if tuned else 0,
        "seconds": took.total / jobs,
        "seconds_left": took.left / jobs,
        "guessed": took.guessed,
        "unmeasured": took.unknown,
        "jobs": jobs,
    }


def _tuned(table: Table, ask: Ask) -> State | None:
    """Return how far the runs with settings found by a search are; None where none was found."""
    if table.tune is None or not (found := read(ask.folder(table, tuned=True))):
        return None
    return state(cells(table, replace(ask, chosen=found)))


def to_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the list as lines of text."""
    heads = ("table", "data", "runs", "time", "state")
    cells = [heads, *(_words(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    for words, row in zip(cells, [None, *rows], strict=True):
        told = "quick: " if row and row["quick"] else ""
        yield told + "  ".join(w.ljust(n) for w, n in zip(words, widths, strict=True)).rstrip()
        if row:
            yield f"{told}  {row['title']}"
            if row["quick"]:
                yield f"{told}  {row['quick']}"
            if row["reason"]:
                yield f"{told}  {row['reason']}"
    if rows:
        yield ""
        yield (
            f"time: with {rows[0]['jobs']} jobs on this machine, from a short measured round or "
            "from runs that are there; + where methods or settings are not measured yet, and are "
            "counted as the fastest one beside them, or not at all (--measure)"
        )


def _words(row: dict[str, Any]) -> tuple[str, ...]:
    time = MISSING
    if row["seconds"]:
        more = "+" if row["guessed"] or row["unmeasured"] else ""
        time = f"~{format_duration(row['seconds'])}{more}"
        if 0 < row["seconds_left"] < row["seconds"]:
            time += f", ~{format_duration(row['seconds_left'])} left"
    elif row["runs"]:
        time = "not measured"
    runs = str(row["runs"]) if row["runs"] else MISSING
    how_far = row["state"]
    if row["tuned_runs"]:
        how_far += f"; tuned: {row['tuned_finished']} of {row['tuned_runs']}"
    return row["table"], ", ".join(row["data"]), runs, time, how_far
