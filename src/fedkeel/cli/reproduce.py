"""``fedkeel reproduce``: the papers' tables, published and measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from fedkeel.cli.common import JSON, QUIET, document, say, stderr

NAME = typer.Argument(None, metavar="TABLE", help="A table's id, or a TOML file of one's own.")
OUT = typer.Option(Path("runs/reproduce"), "--out", help="Folder of all runs and pages.")
LISTING = 20.0
"""Seconds that a list may spend on measuring; the next list goes on with it."""


def reproduce(
    name: str = NAME,
    quick: bool = typer.Option(False, "--quick", help="Run a smaller version, marked as such."),
    columns: str = typer.Option(None, "--columns", help="Ids of columns, separated by commas."),
    seeds: int = typer.Option(None, "--seeds", min=1, help="Number of seeds."),
    jobs: int = typer.Option(None, "--jobs", min=1, help="Runs at a time; one per core."),
    out: Path = OUT,
    tune: bool = typer.Option(False, "--tune", help="Search each method's parameters first."),
    show: bool = typer.Option(False, "--show", help="Run nothing: show what has been run."),
    docs: Path = typer.Option(None, "--write", metavar="DIR", help="Write a Markdown page too."),
    measure: bool = typer.Option(False, "--measure", help="List: measure all times that lack."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """List the papers' tables, or run one: published and measured side by side.

    Every cell is a run of its own, kept by its settings: the same command goes on after an
    interrupt, and tables share the runs they have in common.
    """
    from fedkeel.engine.process.affinity import cores
    from fedkeel.reproduce.plan import Ask

    wanted = tuple(word.strip() for word in (columns or "").split(",") if word.strip())
    ask = Ask(out, quick, wanted, seeds)
    jobs = jobs or cores()
    if name is None:
        _listed(ask, jobs, None if measure else LISTING, as_json, quiet)
    else:
        _one(name, ask, None if show else jobs, tune, docs, as_json, quiet)


def _listed(ask: Any, jobs: int, budget: float | None, as_json: bool, quiet: bool) -> None:  # noqa: ANN401 - imported late
    """Print all tables with data, time and state."""
    from fedkeel.reproduce.listing import listed, to_lines

    console, ends = stderr(), time.monotonic() + (budget or 0.0)

    def goes_on() -> bool:
        return budget is None or time.monotonic() < ends

    def told(text: str) -> None:
        if not quiet:
            say(console, text)

    rows = listed(ask, jobs, goes_on, told)
    if as_json:
        document(rows)
        return
    for line in to_lines(rows):
        print(line)


def _one(
    name: str,
    ask: Any,  # noqa: ANN401 - imported late
    jobs: int | None,
    tune: bool,
    docs: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a table, or show it, and write its pages."""
    from fedkeel.reproduce import catalogue, markdown, page
    from fedkeel.reproduce.formatting import mark, report
    from fedkeel.reproduce.outcome import lines
    from fedkeel.reproduce.plan import cells
    from fedkeel.reproduce.run_cells import Played, play
    from fedkeel.runner.progress import watcher

    table, console = catalogue.load(name), stderr()
    told = mark(table, ask.quick)
    folder = ask.folder(table, tune)
    played = Played()
    try:
        ask = _tuned(table, ask, folder, jobs, quiet) if tune else ask
        asked = cells(table, ask)
        if jobs is not None:
            played = play(asked, jobs, watcher(console, quiet, told))
    except KeyboardInterrupt:
        say(console, f"{told}stopped; the same command goes on from what was saved")
        raise typer.Exit(130) from None
    found = lines(table, asked, played.failures)
    if as_json:
        document([line.as_row(table, ask.quick) for line in found])
    else:
        print("\n".join(report(table, found, ask.quick, tune)))
    say(console, f"{told}report  {page.write(table, found, asked, folder, ask.quick, tune)}")
    if docs is not None:
        say(console, f"{told}page    {markdown.write(table, found, docs, ask.quick, tune)}")
    for run, why in played.failures.items():
        say(console, f"{told}failed  {run}: {why}")
    if not played.complete:
        say(console, f"{told}interrupted; the same command goes on where it stopped")
        raise typer.Exit(130)
    if played.failures:
        raise typer.Exit(1)


def _tuned(table: Any, ask: Any, folder: Path, jobs: int | None, quiet: bool) -> Any:  # noqa: ANN401 - imported late
    """Return what is asked with the settings that a search has chosen."""
    from dataclasses import replace

    from fedkeel.reproduce import tuning
    from fedkeel.runner.progress import watcher

    if jobs is None:
        return replace(ask, chosen=tuning.read(folder))
    with watcher(stderr(), quiet) as watching:
        chosen, complete = tuning.search(table, ask, folder, jobs, watching)
    if not complete:
        raise KeyboardInterrupt
    return replace(ask, chosen=chosen)
