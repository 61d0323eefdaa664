"""``fedkeel tune``: good settings for each method, with equal budgets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from fedkeel.config import Experiment
    from fedkeel.study.tuning_result import TuningResult


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


def next_steps(
    result: TuningResult, experiment: Experiment, source: ExperimentSource
) -> Iterator[str]:
    """Yield what compares the tuned methods on seeds on which nothing was chosen.

    Args:
        result: the finished search.
        experiment: as the search read it.
        source: what the command was given of it.
    """
    from fedkeel.study.tuning_result import experiment_files

    pairs = zip(result.rows, experiment_files(result), strict=True)
    tuned = [(row, file) for row, file in pairs if row.value is not None]
    values = [{k: v for k, v in row.chosen.items() if k != "method"} for row, _ in tuned]
    seed = max(experiment.seed, fresh_seed(experiment))
    given = (
        [f"--preset {source.preset}"] if source.path is None else [shlex.quote(str(source.path))]
    )
    given += [f"-s {shlex.quote(text)}" for text in source.settings if not text.startswith("tune.")]
    if not tuned:
        return
    if all(value == values[0] for value in values):
        chosen = [f"-s {shlex.quote(f'{key}={json.dumps(v)}')}" for key, v in values[0].items()]
        methods = shlex.quote(", ".join(str(row.chosen["method"]) for row, _ in tuned))
        more = " ".join([*given, *chosen, f"-s seed={seed}"])
        yield f"fedkeel compare {more} --methods {methods}"
        return
    keys = [key for key in values[0] if len({json.dumps(value[key]) for value in values}) > 1]
    yield (
        f"one comparison has one {' and '.join(keys)} for all methods, and the best values differ: "
        "compare each method by itself on new seeds, then make one report"
    )
    folders = []
    for _, file in tuned:
        folders.append(shlex.quote(f"{result.folder}-compare/{file.stem}"))
        yield f"fedkeel compare {shlex.quote(str(file))} -s seed={seed} --out {folders[-1]}"
    yield f"fedkeel report {' '.join(folders)}"


def fresh_seed(experiment: Experiment) -> int:
    """Return the first seed after those of the trials."""
    first = experiment.seed if experiment.tune.seed is None else experiment.tune.seed
    return first + experiment.tune.seeds


def fresh_seed_of_tuned(source: ExperimentSource, experiment: Experiment, seeds: int) -> int | None:
    """Return the first seed after those by which a search chose the settings of its file.

    None where the file is of no search, or the seeds are others already.
    """
    from fedkeel.cli.experiment import is_search

    if source.path is None or source.path.parent.name != "best":
        return None
    first, fresh = experiment.tune.seed, fresh_seed(experiment)
    if first is None:  # the trials began at the seed that stands in the file
        from fedkeel.config import load

        first = load(source.path).seed
        fresh = first + experiment.tune.seeds
    is_used = experiment.seed < fresh and first < experiment.seed + seeds
    return fresh if is_used and is_search(source.path.parent.parent) else None
