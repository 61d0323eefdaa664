"""``fedkeel tune``: good settings for each method, with equal budgets."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import (
    JSON,
    QUIET,
    ExperimentSource,
    many_imports,
    say,
    show,
    stderr,
    takes_experiment,
)


@takes_experiment
def tune(
    source: ExperimentSource,
    methods: str = typer.Option(
        None,
        "--methods",
        help='Expressions, e.g. "fedavg, scaffold, fedprox"; compare.methods else.',
    ),
    trials: int = typer.Option(None, "--trials", min=1, help="Trials of each method, at most."),
    seeds: int = typer.Option(None, "--seeds", min=1, help="Runs of each trial."),
    jobs: int = typer.Option(
        None, "--jobs", min=1, help="Runs at a time, of one thread each; one a core or GPU."
    ),
    out: Path = typer.Option(
        None, "--out", help="Folder of the search; runs/NAME-tune by default."
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Search for the best settings of each method: a table, and an experiment file for each.

    The file's [tune] table names what is searched; without it, that is the local learning rate.
    Trials are scored on a validation part of the training data, or with tune.split=test on the test
    set. Finished runs are used again: run the same command to continue.
    """
    from dataclasses import asdict

    from fedkeel.cli.experiment import check_methods, read_experiment
    from fedkeel.method.grammar import split_expressions

    budget = {"trials": trials, "seeds": seeds}
    overrides = [f"tune.{name}={value}" for name, value in budget.items() if value is not None]
    experiment = read_experiment(source, *overrides)
    expressions = (
        split_expressions(methods) if methods is not None else list(experiment.compare.methods)
    )
    check_methods(expressions, experiment.weights or "examples")

    with many_imports():
        from fedkeel.cli.next_steps import next_steps
        from fedkeel.cli.progress import shown_progress
        from fedkeel.runner.ingredients import gather
        from fedkeel.study.tune import tune as search
        from fedkeel.study.tuning_result import experiment_files
        from fedkeel.study.tuning_table import tuning_table

    out = Path("runs") / f"{experiment.name}-tune" if out is None else out
    console = stderr()
    ingredients = gather(experiment)
    with shown_progress(quiet) as display:
        result = search(experiment, ingredients, expressions, experiment.tune, out, jobs, display)
    if not result.complete:
        say(
            console,
            f"interrupted after {len(result.trials)} trials; the same command goes on there",
        )
        raise typer.Exit(130)
    table = tuning_table(result.rows, result.validation_examples).terminal()
    show(as_json, [asdict(row) for row in result.rows], table)
    for sentence in result.notes:
        say(console, sentence)
    say(console, f"runs    {out}")
    for row, file in zip(result.rows, experiment_files(result), strict=True):
        if row.value is None:
            say(console, f"failed  {row.method}: no trial could be finished")
        else:
            say(console, f"best    {file}")
    if result.replaced:
        names = ", ".join(result.replaced)
        say(
            console,
            f"this search takes the place of another one, with other settings, trials or data, "
            f"that chose for {names}; its runs are still in {out}",
        )
    for line in next_steps(result, experiment, source):
        say(console, f"next    {line}")
    if any(row.value is None for row in result.rows):
        raise typer.Exit(1)
