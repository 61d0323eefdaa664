"""The partition picture for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

SHADES = " ░▒▓█"
CLIENTS = 40
"""Clients shown at most; the report page shows all."""
CLASSES = 26
NAME = 24
"""Characters of a client's name, at most."""


def partition(
    histogram: Sequence[Sequence[int]], names: Sequence[str], labels: Sequence[str]
) -> Table:
    """Return each client's examples and the share of each class among them.

    Args:
        histogram: [C][Y] number of examples of each client and class.
        names: C names of the clients.
        labels: Y names of the classes.
    """
    sizes = [sum(row) for row in histogram]
    classes = min(len(labels), CLASSES)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    table.add_column("client", justify="right", no_wrap=True, max_width=NAME)
    table.add_column("examples", justify="right", no_wrap=True)
    table.add_column("classes", justify="right", no_wrap=True)
    table.add_column(_line(" ".join(f"{label[:2]:>2}" for label in labels[:classes])))
    table.add_column(_line("size"))
    for k in range(min(len(sizes), CLIENTS)):
        row = histogram[k]
        held = sum(n > 0 for n in row)
        cells = " ".join(_shade(n, sizes[k]) for n in row[:classes])
        bar = "━" * max(1, round(20 * sizes[k] / max(sizes)))
        table.add_row(Text(names[k]), str(sizes[k]), str(held), _line(cells), _line(bar))
    notes = [f"{SHADES[1]} up to a quarter of the client's examples ... {SHADES[4]} over three"]
    if len(sizes) > CLIENTS:
        notes.append(f"the first {CLIENTS} of {len(sizes)} clients")
    if len(labels) > classes:
        notes.append(f"the first {classes} of {len(labels)} classes")
    table.caption = "; ".join(notes)
    return table


def _line(text: str) -> Text:
    """Return what is cut, not wrapped, and gives way to names and numbers in a narrow terminal."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _shade(count: int, size: int) -> str:
    """Return two characters that are darker the larger the class's share is."""
    if count == 0:
        return " ·"
    return SHADES[min(4, 1 + int(4 * count / size))] * 2
