"""``fedkeel data``: what there is, getting it, looking at it divided among clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import typer
from rich.console import Console

from fedkeel.cli.common import (
    JSON,
    Command,
    CommandGroup,
    ExperimentSource,
    document,
    say,
    stderr,
    takes_experiment,
)

app = typer.Typer(
    cls=CommandGroup, help="Data: list known sets, download one, inspect a partition."
)


@app.command("list", cls=Command)
def listed(as_json: bool = JSON) -> None:
    """List the known data sets, and where they were found."""
    from dataclasses import asdict

    from fedkeel.data.read.sources import known_sets
    from fedkeel.report.text_table import TextTable

    rows = known_sets()
    if as_json:
        document([asdict(row) for row in rows])
        return
    heads = ("name", "train", "test", "shape", "classes", "download", "where")
    cells = [
        (
            row.name,
            f"{row.train:,}",
            f"{row.test:,}",
            "x".join(map(str, row.shape)),
            str(row.classes),
            "" if row.download is None else f"{row.download / 1e6:.0f} MB",
            row.where,
        )
        for row in rows
    ]
    Console().print(TextTable(heads, cells, texts=frozenset({0, 3, 6})).terminal())
    print("your own: a path to .npz, .csv, .parquet, or a folder of images by class")


@app.command("get", cls=Command)
def get(name: str = typer.Argument(..., help="A name that `fedkeel data list` shows.")) -> None:
    """Download a known data set from its official address, checked and resumable."""
    from fedkeel.data.read.download import get as fetch

    console = stderr()
    with _bars(console) if console.is_terminal else nullcontext(_lines(console)) as show:
        folder = fetch(name, progress=show)
    say(console, f"{name}  {folder}")


Show = Callable[[int, int | None, str], None]
"""(bytes done, bytes in all where that is known, file)"""


@contextmanager
def _bars(console: Console) -> Iterator[Show]:
    """Show a bar for each file."""
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def show(done: int, total: int | None, file: str) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield show


def _lines(console: Console, seconds: float = 10.0) -> Show:
    """Show a line when a file begins, and every so many seconds."""
    last: dict[str, float] = {}

    def show(done: int, total: int | None, file: str) -> None:
        now = time.monotonic()
        if now - last.get(file, -math.inf) >= seconds:
            last[file] = now
            of = "" if total is None else f" of {total / 1e6:.1f} MB"
            say(console, f"{file}: {done / 1e6:.1f} MB{of}")

    return show


@app.command("inspect", cls=Command)
@takes_experiment
def inspect(source: ExperimentSource, as_json: bool = JSON) -> None:
    """Show how an experiment divides its data: sizes, and each client's labels."""
    from fedkeel.cli.experiment import read_experiment

    experiment = read_experiment(source)

    from fedkeel.runner.ingredients import gather

    federation = gather(experiment).clients(experiment.seed)
    sizes = federation.sizes.tolist()
    if as_json:
        histogram = federation.histogram().tolist()
        document({**federation.how, "sizes": sizes, "histogram": histogram})
    else:
        from fedkeel.report.partition_table import partition_table

        data = federation.data
        labels = data.label_names or tuple(str(y) for y in range(data.classes))
        names = federation.names or tuple(str(k) for k in range(len(federation)))
        Console().print(partition_table(federation.class_counts(), sizes, names, labels))
        print(federation.how.get("says", ""))
        for message in data.warnings:
            say(stderr(), f"warning: {message}")
