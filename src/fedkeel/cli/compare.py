"""``fedkeel compare``: several methods, several seeds. The main job."""

from __future__ import annotations

from pathlib import Path

import typer

from fedkeel.cli.common import (
    JSON,
    QUIET,
    ExperimentSource,
    default_folder,
    many_imports,
    page_written,
    say,
    show,
    stderr,
    takes_experiment,
)
from fedkeel.errors import counted


@takes_experiment
def compare(
    source: ExperimentSource,
    methods: str = typer.Option(
        None,
        "--methods",
        help='Expressions, e.g. "fedavg, fedprox(mu=0.1)+gcfed, local, centralised".',
    ),
    seeds: int = typer.Option(None, "--seeds", min=1, help="Number of seeds."),
    jobs: int = typer.Option(
        None,
        "--jobs",
        min=1,
        help="Runs at a time, of one thread each; one a core or GPU. Seeds of a method that train "
        "side by side count as one.",
    ),
    out: Path = typer.Option(
        None,
        "--out",
        help="Folder of the comparison; runs/NAME-compare where nothing is given.",
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
) -> None:
    """Compare methods over seeds: a table, and a report page.

    Finished runs are used again, unfinished ones are continued: run the same command to continue
    after an interrupt, or with more methods or seeds to extend the comparison.
    """
    from fedkeel.cli.experiment import check_methods, read_experiment
    from fedkeel.method.grammar import split_expressions

    experiment = read_experiment(source)
    expressions = (
        split_expressions(methods) if methods is not None else list(experiment.compare.methods)
    )
    check_methods(expressions, experiment.weights or "examples")

    with many_imports():
        from fedkeel.cli.next_steps import fresh_seed_of_tuned
        from fedkeel.cli.progress import shown_progress
        from fedkeel.records.comparison import runs_of
        from fedkeel.report.page import write_report
        from fedkeel.report.tables import terminal_table
        from fedkeel.runner.ingredients import gather
        from fedkeel.study.compare import compare as compare_methods

    out = default_folder(experiment.name, "compare") if out is None else out
    console = stderr()
    ingredients = gather(experiment)
    seeds = seeds or experiment.compare.seeds
    if (fresh := fresh_seed_of_tuned(source, experiment, seeds)) is not None:
        say(
            console,
            "warning: these settings were chosen by runs with the same seeds, so they look better "
            f"than they are: take other seeds, -s seed={fresh}",
        )
    with shown_progress(quiet) as display:
        comparison = compare_methods(
            experiment, ingredients, expressions, seeds, out, display, jobs=jobs
        )
    page = page_written(
        lambda: write_report(runs_of(out), out / "report.html", title=experiment.name)
    )
    clients = [table.terminal(is_wrapped=True) for table in comparison.client_tables]
    show(as_json, comparison.rows, terminal_table(comparison.table), *clients)
    for sentence in comparison.notes:
        say(console, sentence)
    warnings = [text for result in comparison.results for text in result.record.warnings]
    for warning in dict.fromkeys(warnings) if quiet else ():
        say(console, f"warning: {warning}")
    say(console, f"runs    {out}")
    say(console, f"report  {page}")
    if comparison.others:
        others = f"{counted(comparison.others, 'run')} of earlier calls with other settings"
        say(console, f"{out} also holds {others}: `fedkeel report` takes their folders")
    for failure in comparison.failures:
        say(console, f"failed  {failure}")
    if not comparison.complete:
        say(console, "interrupted; the same command goes on where it stopped")
        raise typer.Exit(130)
    if comparison.failures:
        raise typer.Exit(1)
