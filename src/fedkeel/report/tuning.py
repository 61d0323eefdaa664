"""The table of a search for good settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedkeel.report.formatting import NOTHING, percent

_MEASURES = {
    "best": "the best accuracy over rounds",
    "last": "the accuracy after the last round",
    "last_mean": "the mean accuracy of the last ten evaluations",
}

Row = Mapping[str, Any]
"""One method: method, chosen, value, spread, seeds, trials, offered, failed, edge, on, metric."""


def to_text(rows: Sequence[Row], held: int | None = None) -> Table:
    """Return the table for a terminal.

    Args:
        rows: one for each method.
        held: examples that were chosen by; None for the test set.
    """
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="\n".join(footnotes(rows, held)),
        caption_justify="left",
    )
    shown.add_column("method", overflow="fold")
    shown.add_column(f"{_words(rows)}\n%", justify="right", no_wrap=True)
    shown.add_column("measured\non", no_wrap=True)
    shown.add_column("chosen", overflow="fold")
    shown.add_column("trials", justify="right", no_wrap=True)
    shown.add_column("failed", justify="right", no_wrap=True)
    shown.add_column("at the edge", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in cells(row)))
    return shown


def cells(row: Row) -> list[str]:
    """Return a row in words, column by column."""
    value = percent(row["value"])
    if row["spread"] is not None:
        value += f" ± {percent(row['spread'])}"
    settings = [f"{k}={_short(v)}" for k, v in row["chosen"].items() if k != "method"]
    changed = row["chosen"].get("method", row["method"])
    if changed != row["method"]:
        settings.append(changed)
    whole = row["offered"] in (None, row["trials"])
    return [
        row["method"],
        value,
        "test set" if row["on"] == "test" else "validation",
        ", ".join(settings) or NOTHING,
        str(row["trials"]) if whole else f"{row['trials']} of {row['offered']}",
        str(row["failed"]) if row["failed"] else "",
        ", ".join(f"{name} {end}" for name, end in row["edge"].items()),
    ]


def footnotes(rows: Sequence[Row], held: int | None) -> list[str]:
    """Return what has to be known to read the table."""
    notes = []
    if any(row["on"] == "test" for row in rows):
        notes.append("Chosen on the test set, as many papers do: these accuracies are too high.")
    elif held is not None:
        notes.append(f"Validation: {held:,} examples held out from the clients' training data.")
    measure = " and ".join(dict.fromkeys(_MEASURES[row["metric"]] for row in rows))
    seeds = max((row["seeds"] for row in rows), default=1)
    over = f"; mean ± sample standard deviation of {seeds} seeds" if seeds > 1 else ""
    notes.append(f"What counts: {measure}{over}.")
    counts = {row["trials"] for row in rows}
    if len(counts) > 1:
        notes.append(
            "Trials differ: settings had the same choices, and some methods have more of their own."
        )
    if any(row["failed"] for row in rows):
        notes.append("Failed: training could not go on, most often because it diverged.")
    if any(row["edge"] for row in rows):
        notes.append("At the edge: better values may lie beyond what was tried; widen that range.")
    return notes


def _words(rows: Sequence[Row]) -> str:
    return "/".join(dict.fromkeys(row["metric"].replace("_", " ") for row in rows))


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
