"""The partition as a table for a terminal: which client has which classes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedkeel.records.histogram import Histogram

_SHADES = " ░▒▓█"
_MAX_CLIENTS = 40
_MAX_CLASSES = 26
_NAME_WIDTH = 24
_CLASSES_WIDTH = 24  # of all classes together, where they are few


def partition_table(
    counts: Histogram, sizes: Sequence[int], clients: Sequence[str], classes: Sequence[str]
) -> Table:
    """Return each client's examples and the share of each class among them.

    Args:
        counts: number of examples of each client and class.
        sizes: C numbers of examples.
        clients: C names.
        classes: Y names.
    """
    histogram = counts.table(_MAX_CLIENTS)
    rows = [] if histogram is None else histogram.tolist()
    held_by = counts.classes_of_clients().tolist()
    shown = classes[:_MAX_CLASSES]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    table.add_column("client", justify="right", no_wrap=True, max_width=_NAME_WIDTH)
    table.add_column("examples", justify="right", no_wrap=True)
    table.add_column("classes", justify="right", no_wrap=True)
    width = max(2, min(max(map(len, shown), default=2), _CLASSES_WIDTH // max(1, len(shown)) - 1))
    table.add_column(_line(" ".join(name[:width].rjust(width) for name in shown)))
    table.add_column(_line("size"))
    largest = max(sizes)
    for name, size, held, row in zip(clients, sizes, held_by, rows, strict=False):
        shades = " ".join(_shade(count, size).rjust(width) for count in row[: len(shown)])
        bar = "━" * max(1, round(20 * size / largest))
        table.add_row(Text(name), str(size), str(held), _line(shades), _line(bar))
    notes = [f"{_SHADES[1]} up to a quarter of the client's examples ... {_SHADES[4]} over three"]
    if len(sizes) > _MAX_CLIENTS:
        notes.append(f"the first {_MAX_CLIENTS} of {len(sizes)} clients")
    if len(classes) > len(shown):
        notes.append(f"the first {len(shown)} of {len(classes)} classes")
    table.caption = "; ".join(notes)
    return table


def _line(text: str) -> Text:
    """Return text that a narrow terminal cuts, so that names and numbers keep their space."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _shade(count: int, size: int) -> str:
    """Return two characters that are darker the larger the class's share is."""
    return _SHADES[min(4, 1 + int(4 * count / size))] * 2 if count else " ·"
