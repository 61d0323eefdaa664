"""A table's results as a Markdown page, with all that is needed to judge and repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedkeel.errors import RunError
from fedkeel.records.folder import write_text
from fedkeel.records.run_record import RunRecord
from fedkeel.reproduce.formatting import FOOT, Block, about, blocks, mark
from fedkeel.reproduce.outcome import Line
from fedkeel.reproduce.table import Table

READING = "## Reading"
"""What stands from this heading on is written by hand, and kept when the page is written again."""


def write(
    table: Table, found: Sequence[Line], folder: Path, quick: bool, tuned: bool = False
) -> Path:
    """Write a table's Markdown page; a reading that was added by hand stays.

    Raises:
        RunError: nothing has been run, or the folder cannot be written to.
    """
    if not any(line.records for line in found):
        raise RunError(f"There is no run of {table.id} to write about.", do="run it first")
    file = folder / f"{table.id}{'-tuned' * tuned}{'-quick' * quick}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        _, heading, reading = before.partition(f"\n{READING}\n")
        write_text(
            file,
            render(table, found, quick, tuned) + (f"\n{READING}\n{reading}" if heading else ""),
        )
    except OSError as error:
        raise RunError(f"{file} cannot be written.", got=error) from None
    return file


def render(table: Table, found: Sequence[Line], quick: bool, tuned: bool = False) -> str:
    """Return the page."""
    told = mark(table, quick)
    records = [record for line in found for record in line.records]
    source = "Published" if any(line.published for line in found) else "Source"
    parts = [
        f"# {told}{table.title}",
        *_paragraphs(*about(table, quick, tuned), table.shows, f"{source}: {table.source}"),
        *_paragraphs(_how(table, found, quick, tuned)),
        f"{FOOT}\n",
    ]
    for block in blocks(table, found):
        parts.append(_block(block, told))
    parts.append("## How it was run\n")
    parts += [f"- {fact}" for fact in _facts(table, records)]
    parts.append("")
    if table.deviations:
        parts += ["## Assumptions and deviations\n", *(f"- {one}" for one in table.deviations), ""]
    missing = [f"{column.name}: {column.missing}" for column in table.columns if column.missing]
    missing += [f"{row.name}: {row.missing}" for row in table.rows if row.missing]
    if missing:
        parts += ["## Not run\n", *(f"- {one}" for one in missing), ""]
    return "\n".join(parts)


def _paragraphs(*texts: str) -> list[str]:
    return [f"{text}\n" for text in texts]


def _how(table: Table, found: Sequence[Line], quick: bool, tuned: bool) -> str:
    words = ["fedkeel", "reproduce", table.id]
    words += ["--tune"] * tuned + ["--quick"] * quick
    shown = dict.fromkeys(line.column.id for line in found)
    every = [column.id for column in table.columns if not column.missing]
    if quick and table.quick and table.quick.columns:
        every = [name for name in every if name in table.quick.columns]
    if len(shown) < len(every):
        words += ["--columns", ",".join(shown)]
    wanted = max((line.wanted for line in found), default=table.seeds)
    if not quick and wanted != table.seeds:
        words += ["--seeds", str(wanted)]
    return f"Measured by `{' '.join(words)}`; the page is written by the same command."


def _block(block: Block, told: str) -> str:
    count = len(block.heads)
    heads = ["| " + " | ".join(block.heads) + " |", "| --- |" + " ---: |" * (count - 1)]
    rows = [f"| {told}" + " | ".join(cells) + " |" for cells in block.cells]
    methods = dict.fromkeys((line.row.name, line.expression) for line in block.lines)
    shown = "; ".join(f"{name} is `{expression}`" for name, expression in methods)
    local = _same(record.local for line in block.lines for record in line.records)
    seeds = _same(
        ", ".join(str(record.seed) for record in line.records)
        for line in block.lines
        if line.records
    )
    about = [f"{shown}."]
    if local:
        about.append(f"Local training: {'; '.join(local)}. Seeds: {'; '.join(seeds)}.")
    about += block.notes
    return "\n".join([f"## {told}{block.title}\n", *heads, *rows, "", " ".join(about), ""])


def _same(values: Iterable[str]) -> list[str]:
    """Return the different values in the order they come."""
    return list(dict.fromkeys(values))


def _facts(table: Table, records: Sequence[RunRecord]) -> list[str]:
    """Return hardware, software, dates and data in words."""
    found = [record.environment for record in records]
    days = sorted({one.date[:10] for one in found})
    machines = _same(f"{one.processor}, {one.cores} cores, {one.system}" for one in found)
    software = _same(
        f"fedkeel {one.fedkeel}, torch {one.torch}, Python {one.python}" for one in found
    )
    engines = _same(
        f"{record.engine.kind}, {record.engine.dtype}, {record.engine.device}" for record in records
    )
    data = _same(
        f"{', '.join(record.data.sources)}: {record.data.train:,} training and "
        f"{record.data.test:,} test examples"
        for record in records
    )
    seeds = table.published_seeds
    return [
        f"Date: {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""),
        f"Machine: {'; '.join(machines)}",
        f"Software: {'; '.join(software)}",
        f"Engine of the clients: {'; '.join(engines)}",
        f"Data: {'; '.join(data)}",
        f"Seeds behind the published numbers: {seeds if seeds else 'unstated'}",
    ]
