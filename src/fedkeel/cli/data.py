"""``fedkeel data``: what there is, getting it, looking at it divided among clients."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import EXPERIMENT, JSON, PRESET, SET, document, experiment, say, stderr

app = typer.Typer(help="Data: list known sets, download one, inspect a partition.")


@app.command("list")
def listed(as_json: bool = JSON) -> None:
    """List the known data sets, and where they were found."""
    from dataclasses import asdict

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedkeel.data.read.sources import known

    rows = known()
    if as_json:
        document([asdict(row) for row in rows])
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("name", "train", "test", "shape", "classes", "where", "download"):
        table.add_column(head, overflow="fold")
    for row in rows:
        size = "" if row.download is None else f"{row.download / 1e6:.0f} MB"
        shape = "x".join(str(n) for n in row.shape)
        table.add_row(
            row.name, f"{row.train:,}", f"{row.test:,}", shape, str(row.classes), row.where, size
        )
    Console().print(table)
    print("your own: a path to .npz, .csv, .parquet, or a folder of images by class")


@app.command("get")
def get(name: str = typer.Argument(..., help="A name that `fedkeel data list` shows.")) -> None:
    """Download a known data set from its official address, checked and resumable."""
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    from fedkeel.data.read.download import get as fetch

    console = stderr()
    with Progress(
        *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=console
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(done: int, total: int | None, file: str) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        folder = fetch(name, progress=show)
    say(console, f"{name}  {folder}")


@app.command("inspect")
def inspect(
    path: Path = EXPERIMENT,
    preset: str = PRESET,
    settings: list[str] = SET,
    as_json: bool = JSON,
) -> None:
    """Show how an experiment divides its data: sizes, and each client's labels."""
    from rich.console import Console

    from fedkeel.experiment.prepare import gather

    chosen = experiment(path, preset, settings)
    federation = gather(chosen).clients(chosen.seed)
    histogram = federation.histogram()
    how = {**federation.how, "sizes": federation.sizes.tolist(), "histogram": histogram.tolist()}
    if as_json:
        document(how)
    else:
        from fedkeel.report.terminal import partition

        data = federation.data
        labels = data.label_names or tuple(str(y) for y in range(data.classes))
        names = federation.names or tuple(str(k) for k in range(len(federation)))
        Console().print(partition(histogram.tolist(), list(names), list(labels)))
        print(federation.how.get("says", ""))
