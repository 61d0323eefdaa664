"""The pages of a table: published and measured, and one report for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from fedkeel.records.folder import write_text
from fedkeel.report.page import read_css, write_report
from fedkeel.reproduce.formatting import FOOT, about, blocks, mark
from fedkeel.reproduce.outcome import Line
from fedkeel.reproduce.plan import Cell
from fedkeel.reproduce.table import Table

_HERE = Path(__file__).parent


def write(
    table: Table,
    found: Sequence[Line],
    cells: Sequence[Cell],
    folder: Path,
    quick: bool = False,
    tuned: bool = False,
) -> Path:
    """Write a table's page, and beside it a report of the runs of each setting.

    Args:
        table: the table.
        found: its lines.
        cells: its runs.
        folder: where the pages go.
        quick: whether it is the smaller version.
        tuned: whether hyper-parameters were searched.

    Returns:
        The table's page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    reports = _reports(table, cells, folder, quick)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        table=table,
        mark=mark(table, quick),
        about=about(table, quick, tuned),
        css=read_css(),
        foot=FOOT,
        blocks=blocks(table, found),
        reports=reports,
    )
    file = folder / "report.html"
    write_text(file, page)
    return file


def _reports(table: Table, cells: Sequence[Cell], folder: Path, quick: bool) -> dict[str, str]:
    """Write a report for each setting with runs; return its file's name by the column's id."""
    written: dict[tuple[Path, ...], str] = {}
    names: dict[str, str] = {}
    for column in table.columns:
        runs = tuple(c.folder for c in cells if c.column.id == column.id and c.finished)
        runs = tuple(sorted(dict.fromkeys(runs), key=[c.folder for c in cells].index))
        if not runs:
            continue
        if runs not in written:
            file = folder / f"{column.id}.html"
            write_report(runs, file, title=f"{mark(table, quick)}{table.title}: {column.name}")
            written[runs] = file.name
        names[column.id] = written[runs]
    return names
