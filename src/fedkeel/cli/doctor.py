"""``fedkeel doctor``: how clients differ, what goes wrong, and what to tune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from fedkeel.base.named_files import writing
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
from fedkeel.errors import ConfigError

KINDS = "labels,moments"
"""Statistics that sites are asked for where nothing else is said: what findings rest on."""


@takes_experiment
def doctor(
    source: ExperimentSource,
    rounds: int = typer.Option(None, "--rounds", min=1, help="Rounds of a trial; 20 else."),
    methods: str = typer.Option(
        None, "--methods", help="Methods that are tried, separated by commas; all that suit else."
    ),
    jobs: int = typer.Option(None, "--jobs", min=1, help="Runs at a time; 1 else."),
    statistics: Path = typer.Option(
        None, "--statistics", help="Judge the sites of this file of fedkeel flower stats."
    ),
    federation: str = typer.Option(
        None, "--federation", help="Ask a federation that is up for them, by its name for flwr run."
    ),
    kinds: str = typer.Option(
        None, "--kinds", help="Statistics to ask a federation for; labels,moments else."
    ),
    out: Path = typer.Option(None, "--out", help="Folder of the runs; runs/NAME-doctor else."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    environment: bool = ENVIRONMENT,
) -> None:
    """Say how clients differ, what goes wrong with FedAvg, and which methods are worth tuning.

    It looks at the data, makes short runs of FedAvg, local and centralised training, and tries
    every method that can run, scored on training examples that are held out. It says beforehand
    how long that takes. It writes a page, and an experiment file that searches the three methods
    with the best trials. Finished runs are used again: run the same command to continue. Of a
    federation whose data stay on the nodes, it judges the statistics that sites consent to.
    """
    import json

    from fedkeel.cli.experiment import read_experiment
    from fedkeel.method.grammar import split_expressions

    experiment = read_experiment(source)
    chosen = None if methods is None else split_expressions(methods)
    if kinds is not None and federation is None:
        raise ConfigError(
            "--kinds goes with --federation.",
            got=f"--kinds {kinds}",
            why="it says which statistics the sites of a federation are asked for",
        )
    if statistics is not None or federation is not None:
        _refuse_trials({"--rounds": rounds, "--methods": methods, "--jobs": jobs})
        _judge_sites(experiment, statistics, federation, kinds or KINDS, out, as_json)
        return
    if experiment.data.source == "nodes":
        raise ConfigError(
            "The doctor needs the examples, and these are on nodes.",
            do="--federation NAME, or --statistics FILE, judges the statistics that sites consent "
            "to",
        )

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
        record = examine(experiment, ingredients, rounds, out, follow, jobs or 1, chosen)
    values = record.to_json()
    write_text(out / "doctor.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
    advised = out / "advised.toml"
    write_text(advised, record.experiment)
    page = page_written(lambda: write_doctor_page(record, out / "doctor.html"))
    show(as_json, values, terminal_page(record))
    say(stderr(), f"page    {page}")
    say(stderr(), f"next    fedkeel tune {advised}")


def _refuse_trials(options: Mapping[str, object]) -> None:
    """Refuse options of trials where sites are judged by their statistics.

    Raises:
        ConfigError: one is given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0]} goes neither with --statistics nor with --federation.",
            why="it is of trials, and without the examples of the sites nothing is trained",
            do="leave it out",
        )


def _judge_sites(
    experiment: Any,  # noqa: ANN401 - the settings are not imported before a command runs
    statistics: Path | None,
    federation: str | None,
    kinds: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say what the statistics of sites tell by themselves."""
    import json

    with many_imports():
        from fedkeel.records.files import write_text
        from fedkeel.records.node_statistics import NodeStatistics
        from fedkeel.report.doctor_page import write_doctor_page
        from fedkeel.report.doctor_text import terminal_page
        from fedkeel.study.doctor.nodes import judge_statistics

    out = Path("runs") / f"{experiment.name}-doctor" if out is None else out
    if statistics is not None and federation is None:
        found = NodeStatistics.read(statistics)
    elif federation is not None and statistics is None:
        from fedkeel.flower.local.statistics import of_federation
        from fedkeel.flower.server.statistics import read_kinds

        found = of_federation(
            experiment,
            out,
            federation,
            ",".join(read_kinds(kinds, bool(experiment.data.categories))),
        )
    else:
        raise ConfigError("Give --statistics or --federation, and not both.")
    record = judge_statistics(experiment, found)
    values = record.to_json()
    with writing(f"{out} cannot be written to."):
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / "doctor.json", json.dumps(values, indent=1, allow_nan=False) + "\n")
    page = page_written(lambda: write_doctor_page(record, out / "doctor.html"))
    show(as_json, values, terminal_page(record))
    say(stderr(), f"page    {page}")
