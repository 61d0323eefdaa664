"""``fedkeel new``: an experiment file and a model for a user's data."""

from __future__ import annotations

import typer

from fedkeel.cli.common import say, stderr


def new(
    name: str = typer.Argument(..., metavar="NAME", help="NAME.toml is written, here."),
    data: list[str] = typer.Option(
        ..., "--data", metavar="PATH", help="The data; several tables are a client each."
    ),
    label: str = typer.Option("label", "--label", help="Column that is to be predicted."),
    client: str = typer.Option(None, "--client", help="Column that says whose a row is."),
    drop: list[str] = typer.Option(None, "--drop", metavar="COLUMN", help="A column to leave out."),
) -> None:
    """Write an experiment file and a model to begin with, checked against the data.

    The kind of task follows from the label's column. Columns of texts become categories, gaps are
    filled, and what is not an input is left out; all of it stands in the file, to be changed.
    """
    from fedkeel.study.new_experiment import new_experiment

    written = new_experiment(name, data, label, client, drop or ())
    for word, sentence in written.notes:
        print(f"{word:<9} {sentence}")
    say(stderr(), f"wrote     {written.experiment} and {written.model}")
    say(stderr(), f"next      fedkeel run {written.experiment}")
    say(stderr(), f"then      fedkeel compare {written.experiment}, which says who gains by it")
