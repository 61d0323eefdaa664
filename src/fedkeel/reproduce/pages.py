"""The pages of a table, from the same blocks: terminal text, HTML and Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeel.base.named_files import writing
from fedkeel.errors import RunError, counted
from fedkeel.records.files import write_text
from fedkeel.records.folder import ANOTHER
from fedkeel.records.run_record import RunRecord
from fedkeel.report.formatting import format_duration
from fedkeel.report.html import render_page, write_page
from fedkeel.report.page import write_report
from fedkeel.report.text_table import TextTable
from fedkeel.reproduce.blocks import TableBlock, table_blocks
from fedkeel.reproduce.outcome import TableLine
from fedkeel.reproduce.plan import TableRequest, TableRun
from fedkeel.reproduce.table import PaperTable
from fedkeel.reproduce.tuning import search_text

READING = "## Reading"
"""Heading of the part that is written by hand, which stays when the page is written again."""

FOOT = (
    "Measured: mean ± sample deviation over seeds. Gain: over the baseline, paired by seed, with "
    "the 95 % t-interval. Same sign, of the published and the measured gain; open: the interval "
    "holds 0 or cannot count every seed, or there is one seed. Best and last: top-1 in percent, "
    "over rounds and after the last one."
)


def line_prefix(table: PaperTable, request: TableRequest) -> str:
    """Return the text before every line of a smaller version."""
    return "quick: " if request.is_quick(table) else ""


@dataclass(frozen=True)
class TablePage:
    """A table with its lines, which can be written in several forms."""

    table: PaperTable
    lines: Sequence[TableLine]
    request: TableRequest

    @property
    def prefix(self) -> str:
        """The text before every line of a smaller version."""
        return line_prefix(self.table, self.request)

    @property
    def notices(self) -> list[str]:
        """Sentences on the differences between this version and the paper's setting."""
        notices = []
        if self.request.quick and self.table.quick:
            notices.append(f"This is not the paper's setting: {self.table.quick.name}.")
        if self.request.tuned and self.table.tune:
            notices.append(search_text(self.table.tune))
        return notices

    @property
    def blocks(self) -> list[TableBlock]:
        """One block for each column that has lines."""
        return table_blocks(self.table, self.lines)

    @property
    def not_run(self) -> list[str]:
        """The columns and rows that cannot be run, with the reason."""
        reasons = [(column.name, column.missing) for column in self.table.columns]
        reasons += [(row.name, row.missing) for row in self.table.rows]
        return [f"{name}: {why}" for name, why in reasons if why]

    def to_text(self) -> list[str]:
        """Return lines of plain text."""
        table = self.table
        out = [table.title, *self.notices, *([table.missing] if table.missing else [])]
        for block in self.blocks:
            out += ["", block.title, *block.notes]
            out += TextTable(block.heads, block.cells).lines()
        out += ["", FOOT, *(f"not run: {reason}" for reason in self.not_run)]
        return [f"{self.prefix}{line}".rstrip() for line in out]

    def write_html(self, runs: Sequence[TableRun]) -> Path:
        """Write the HTML page, and beside it a report of the runs of each setting.

        Raises:
            RunError: the folder cannot be written to.
        """
        folder = self.request.folder(self.table)
        with writing(f"{folder} cannot be written to.", ANOTHER):
            folder.mkdir(parents=True, exist_ok=True)
            return self._write_html(runs, folder)

    def _write_html(self, runs: Sequence[TableRun], folder: Path) -> Path:
        html = render_page(
            "table.html.j2",
            folder=Path(__file__).parent,
            table=self.table,
            page=self,
            foot=FOOT,
            reports=self._write_reports(runs, folder),
        )
        return write_page(html, folder / "report.html")

    def _write_reports(self, runs: Sequence[TableRun], folder: Path) -> dict[str, str]:
        """Write a report for each setting with runs; return its file name by column id."""
        name_by_runs: dict[tuple[Path, ...], str] = {}
        names: dict[str, str] = {}
        for column in self.table.columns:
            of_column = [run for run in runs if run.column.id == column.id and run.is_finished]
            folders = tuple(dict.fromkeys(run.folder for run in of_column))
            if not folders:
                continue
            if folders not in name_by_runs:
                file = folder / f"{column.id}.html"
                title = f"{self.prefix}{self.table.title}: {column.name}"
                write_report(folders, file, title=title)
                name_by_runs[folders] = file.name
            names[column.id] = name_by_runs[folders]
        return names

    def write_markdown(self, folder: Path) -> Path:
        """Write the Markdown page; a reading that was added by hand stays.

        Raises:
            RunError: nothing has been run, or the folder cannot be written to.
        """
        if not any(line.records for line in self.lines):
            what = f"There is no run of {self.table.id} to write about."
            raise RunError(what, do="run it first")
        suffix = "-tuned" * self.request.tuned + "-quick" * self.request.quick
        file = folder / f"{self.table.id}{suffix}.md"
        with writing(f"{file} cannot be written."):
            folder.mkdir(parents=True, exist_ok=True)
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            _, heading, reading = before.partition(f"\n{READING}\n")
            write_text(file, self.to_markdown() + f"{heading}{reading}")
        return file

    def to_markdown(self) -> str:
        """Return the Markdown page."""
        source = "Published" if any(line.published for line in self.lines) else "Source"
        paragraphs = [
            f"# {self.prefix}{self.table.title}",
            *self.notices,
            self.table.conclusion,
            f"{source}: {self.table.source}",
            f"Measured by `{self._command()}`; the page is written by the same command.",
            FOOT,
            *(_markdown_block(block, self.prefix) for block in self.blocks),
            "## How it was run",
            _markdown_list(self._facts()),
        ]
        if self.table.deviations:
            paragraphs += [
                "## Assumptions and deviations",
                _markdown_list(self.table.deviations),
            ]
        if self.not_run:
            paragraphs += ["## Not run", _markdown_list(self.not_run)]
        return "\n\n".join(paragraphs) + "\n"

    def _command(self) -> str:
        """Return the command that makes this page."""
        table, request = self.table, self.request
        words = ["fedkeel", "reproduce", table.id]
        words += ["--tune"] * request.tuned + ["--quick"] * request.quick
        shown = dict.fromkeys(line.column.id for line in self.lines)
        columns = [column.id for column in table.columns if not column.missing]
        if request.quick and table.quick and table.quick.columns:
            columns = [name for name in columns if name in table.quick.columns]
        if len(shown) < len(columns):
            words += ["--columns", ",".join(shown)]
        for row in request.rows:
            words += ["--row", shlex.quote(row)]
        seeds = max((line.wanted for line in self.lines), default=table.seeds)
        if not request.quick and seeds != table.seeds:
            words += ["--seeds", str(seeds)]
        return " ".join(words)

    def _facts(self) -> list[str]:
        """Return dates, hardware, software, engine and data as text."""
        records = [record for line in self.lines for record in line.records]
        seeds = self.table.published_seeds
        days = sorted({record.environment.date[:10] for record in records})
        return [
            f"Date: {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""),
            f"Machine: {_distinct(map(_machine, records))}",
            f"Software: {_distinct(map(_software, records))}",
            f"Engine of the clients: {_distinct(map(_engine, records))}",
            f"Data: {_distinct(map(_data, records))}",
            *self._time(),
            f"Seeds behind the published numbers: {seeds if seeds else 'unstated'}",
        ]

    def _time(self) -> list[str]:
        """Return what the runs took as text; nothing of runs without rounds."""
        seconds = {name: spent for line in self.lines for name, spent in line.seconds.items()}
        total = sum(seconds.values())
        if not total:
            return []
        each = f", {format_duration(total / len(seconds))} each" if len(seconds) > 1 else ""
        runs = counted(len(seconds), "run")
        return [f"Time: {format_duration(total)} for the rounds of {runs}{each}"]


def _machine(record: RunRecord) -> str:
    environment = record.environment
    return f"{environment.processor}, {environment.cores} cores, {environment.system}"


def _software(record: RunRecord) -> str:
    environment = record.environment
    return f"fedkeel {environment.fedkeel}, torch {environment.torch}, Python {environment.python}"


def _engine(record: RunRecord) -> str:
    return f"{record.engine.kind}, {record.engine.dtype}, {record.engine.device}"


def _data(record: RunRecord) -> str:
    data = record.data
    return f"{', '.join(data.sources)}: {data.train:,} training and {data.test:,} test examples"


def _distinct(texts: Iterable[str]) -> str:
    """Return the distinct texts in their order."""
    return "; ".join(dict.fromkeys(texts))


def _markdown_list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _markdown_block(block: TableBlock, prefix: str) -> str:
    rows = [(f"{prefix}{name}", *rest) for name, *rest in block.cells]
    table = TextTable(block.heads, rows, has_code=False).markdown().rstrip("\n")
    methods = _distinct(f"{line.row.name} is `{line.expression}`" for line in block.lines)
    notes = [f"{methods}."]
    local = _distinct(record.local for line in block.lines for record in line.records)
    if local:
        seeds = _distinct(
            ", ".join(str(record.seed) for record in line.records)
            for line in block.lines
            if line.records
        )
        notes.append(f"Local training: {local}. Seeds: {seeds}.")
    return "\n\n".join([f"## {prefix}{block.title}", table, " ".join([*notes, *block.notes])])
