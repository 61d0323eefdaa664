"""``fedkeel doctor``: how clients differ, what goes wrong, and what to tune."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import (
    JSON,
    QUIET,
    ExperimentSource,
    many_imports,
    page_written,
    say,
    show,
    stderr,
    takes_experiment,
)
from fedkeel.cli.environment import ENVIRONMENT


@takes_experiment
def doctor(
    source: ExperimentSource,
    rounds: int = typer.Option(None, "--rounds", min=1, help="Rounds of a trial; 20 else."),
    methods: str = typer.Option(
        None, "--methods", help="Methods that are tried, separated by commas; all that suit else."
    ),
    jobs: int = typer.Option(1, "--jobs", min=1, help="Runs at a time."),
    out: Path = typer.Option(None, "--out", help="Folder of the runs; runs/NAME-doctor else."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    environment: bool = ENVIRONMENT,
) -> None:
    """Say how clients differ, what goes wrong with FedAvg, and which methods are worth tuning.

    It looks at the data, makes short runs of FedAvg, local and centralised training, and tries
    every method that can run, scored on training examples that are held out. It says beforehand
    how long that takes. It writes a page, and an experiment file that searches the three methods
    with the best trials. Finished runs are used again: run the same command to continue.
    """
    import json

    from fedkeel.cli.experiment import read_experiment
    from fedkeel.method.grammar import split_expressions

    experiment = read_experiment(source)
    chosen = None if methods is None else split_expressions(methods)

    with many_imports():
        from fedkeel.cli.progress import shown_progress
        from fedkeel.features.progress.display import WithoutScores
        from fedkeel.records.files import write_text
        from fedkeel.report.doctor_page import write_doctor_page
        from fedkeel.report.doctor_text import terminal_page
        from fedkeel.runner.ingredients import gather
        from fedkeel.study.doctor.examine import examine

    out = Path("runs") / f"{experiment.name}-doctor" if out is None else out
    ingredients = gather(experiment)
    with shown_progress(quiet) as display:
        follow = WithoutScores(display)
        record = examine(experiment, ingredients, rounds, out, follow, jobs, chosen)
    values = record.to_json()
    write_text(out / "doctor.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
    advised = out / "advised.toml"
    write_text(advised, record.experiment)
    page = page_written(lambda: write_doctor_page(record, out / "doctor.html"))
    show(as_json, values, terminal_page(record))
    say(stderr(), f"page    {page}")
    say(stderr(), f"next    fedkeel tune {advised}")
