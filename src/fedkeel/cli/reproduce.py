"""``fedkeel reproduce``: the papers' tables, published and measured."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from fedkeel.cli.common import JSON, QUIET, document, page_written, say, stderr
from fedkeel.errors import ConfigError

NAME = typer.Argument(None, metavar="TABLE", help="A table's id, or a TOML file of your own.")
OUT = typer.Option(Path("runs/reproduce"), "--out", help="Folder of all runs and pages.")
LIST_SECONDS = 20.0
"""Seconds that a list may spend on measuring; the next list continues."""

TIME_IS_UP = 75
"""Exit code where the time was up before the runs: the same command may be given again."""


def reproduce(
    name: str = NAME,
    quick: bool = typer.Option(False, "--quick", help="Run a smaller version, marked as such."),
    columns: str = typer.Option(None, "--columns", help="Ids of columns, separated by commas."),
    rows: list[str] = typer.Option([], "--row", help="Name of a row; may be given again."),
    seeds: int = typer.Option(None, "--seeds", min=1, help="Number of seeds."),
    seconds: float = typer.Option(None, "--seconds", min=1, help="Stop after so many seconds."),
    device: str = typer.Option(None, "--device", help="Where all runs train: cpu or cuda."),
    jobs: int = typer.Option(None, "--jobs", min=1, help="Runs at a time; one a core or GPU."),
    out: Path = OUT,
    tune: bool = typer.Option(False, "--tune", help="Search each method's parameters first."),
    show: bool = typer.Option(False, "--show", help="Run nothing: show what has been run."),
    docs: Path = typer.Option(None, "--write", metavar="DIR", help="Write a Markdown page too."),
    measure: bool = typer.Option(False, "--measure", help="List: measure all missing times."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """List the papers' tables, or run one: published and measured side by side.

    Every cell is a separate run, stored by its settings: the same command continues after an
    interrupt, and tables share the runs that they have in common.

    Where --seconds are up, the runs finish their round and save, and the exit code is 75: the same
    command goes on. Rounds that are under way need some seconds more than that.
    """
    from fedkeel.engine.choose.device import has_gpu
    from fedkeel.engine.process.affinity import core_count
    from fedkeel.engine.process.interrupts import time_limit

    jobs = jobs or (1 if has_gpu(device) else core_count())
    if name is None:
        if rows or device or seconds:
            raise ConfigError(
                "--row, --device and --seconds are of one table.",
                do="name the table: fedkeel reproduce TABLE; without it, all tables are listed",
            )
        _list(out, quick, jobs, None if measure else LIST_SECONDS, as_json, quiet)
        return
    ids = tuple(word.strip() for word in (columns or "").split(",") if word.strip())
    version = {
        "quick": quick,
        "columns": ids,
        "rows": tuple(rows),
        "seeds": seeds,
        "device": device,
        "tuned": tune,
    }
    with time_limit(seconds) as is_up:
        _reproduce(name, out, version, None if show else jobs, is_up, docs, as_json, quiet)


def _list(
    out: Path, quick: bool, jobs: int, seconds: float | None, as_json: bool, quiet: bool
) -> None:
    """Print all tables with data, time and state; `seconds` limits the measuring of times."""
    from fedkeel.reproduce.listing import list_lines, list_tables
    from fedkeel.reproduce.plan import TableRequest

    console = stderr()

    def show(text: str) -> None:
        if not quiet:
            say(console, text)

    tables = list_tables(TableRequest(out, quick), jobs, seconds, show)
    if as_json:
        document([asdict(table) for table in tables])
    else:
        print("\n".join(list_lines(tables)))


def _reproduce(
    name: str,
    out: Path,
    version: dict[str, Any],
    jobs: int | None,
    is_up: threading.Event,
    docs: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a table, or only show it where `jobs` is None, and write its pages.

    `is_up` is set once no time is left.
    """
    from fedkeel.features.progress.display import progress_display
    from fedkeel.reproduce import catalogue, tuning
    from fedkeel.reproduce.estimate import what_is_left
    from fedkeel.reproduce.outcome import table_lines
    from fedkeel.reproduce.pages import TablePage, line_prefix
    from fedkeel.reproduce.plan import TableRequest, table_runs
    from fedkeel.reproduce.run_cells import CellOutcomes, run_cells

    table, request, console = catalogue.load(name), TableRequest(out, **version), stderr()
    prefix = line_prefix(table, request)
    outcomes = CellOutcomes()
    try:
        if request.tuned and jobs is None:
            settings = tuning.read_tuned_settings(request.folder(table))
            request = replace(request, tuned_settings=settings)
        elif request.tuned and jobs is not None:
            with progress_display(console, quiet) as watching:
                search = tuning.search(table, request, jobs, watching)
            if not search.complete:
                raise KeyboardInterrupt
            request = replace(request, tuned_settings=search.settings)
        runs = table_runs(table, request)
        if jobs is not None:
            outcomes = run_cells(runs, jobs, progress_display(console, quiet, prefix))
    except KeyboardInterrupt:
        if is_up.is_set():
            say(console, f"{prefix}the time is up; the same command goes on with the search")
            raise typer.Exit(TIME_IS_UP) from None
        say(console, f"{prefix}stopped; the same command goes on from what was saved")
        raise typer.Exit(130) from None
    lines = table_lines(table, runs, outcomes.failures)
    page = TablePage(table, lines, request)
    if as_json:
        document([line.to_json(table, request.quick) for line in lines])
    else:
        print("\n".join(page.to_text()))
    say(console, f"{prefix}report  {page_written(lambda: page.write_html(runs))}")
    if docs is not None:
        say(console, f"{prefix}page    {page.write_markdown(docs)}")
    for run, why in outcomes.failures.items():
        say(console, f"{prefix}failed  {run}: {why}")
    if is_up.is_set() and not outcomes.complete:
        left = what_is_left(runs, jobs or 1)
        say(console, f"{prefix}the time is up; {left}; the same command goes on")
        raise typer.Exit(TIME_IS_UP)
    if not outcomes.complete:
        say(console, f"{prefix}interrupted; the same command goes on where it stopped")
        raise typer.Exit(130)
    if outcomes.failures:
        raise typer.Exit(1)
