"""Makes the runs of a table, several at a time; each is cached and can be continued.

A run's folder depends only on its settings, so a stopped table continues, and tables share runs.
A finished run keeps its rows and not its model, because a table has hundreds of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.audit import write_audit
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import Status
from fedkeel.reproduce.plan import TableRun
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study.audit.examine import examine
from fedkeel.study.compare import create_folder
from fedkeel.study.pool import RunRequest, can_fork, run_all, single_process


@dataclass(frozen=True)
class CellOutcomes:
    """How the runs of a table ended.

    Args:
        finished: number of runs that were finished now.
        reused: number of runs that were finished before.
        failures: why a run could not go on, by the name of its folder.
        complete: false after an interrupt.
    """

    finished: int = 0
    reused: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    complete: bool = True


def run_cells(
    runs: Sequence[TableRun], jobs: int, display: ProgressDisplay | None = None
) -> CellOutcomes:
    """Make the runs that are not finished, several at a time, each with one thread.

    The first interrupt lets each run finish its round and save; the second ends them at once.

    Args:
        runs: the runs; those with the same folder are made once, those without data left out.
        jobs: runs at a time.
        display: follows the runs.

    Raises:
        RunError: the folder cannot be written to.
    """
    display = display or ProgressDisplay()
    unique: dict[Path, TableRun] = {}
    for run in runs:
        if not run.absent:
            unique.setdefault(run.folder, run)
    unfinished = [run for run in unique.values() if not run.is_finished]
    reused = len(unique) - len(unfinished)
    if not unfinished:
        return CellOutcomes(reused=reused)
    create_folder(unfinished[0].folder.parent)
    with display:
        display.plan(len(unfinished), sum(run.experiment.rounds for run in unfinished))
        outcomes = run_all(map(_Requests(), unfinished), jobs, display)
    ended = [outcome for outcome in outcomes if outcome is not None]
    failures = {end.folder.name: end.error.what for end in ended if end.error is not None}
    finished = sum(end.error is None for end in ended)
    return CellOutcomes(finished, reused, failures, complete=len(ended) == len(unfinished))


class _Requests:
    """Makes a request of each run, and keeps the data of the last one for the next."""

    def __init__(self) -> None:
        self._key = ""
        self._ingredients: Ingredients | None = None

    def __call__(self, run: TableRun) -> RunRequest:
        engine = single_process(run.experiment.engine)
        experiment = run.experiment.model_copy(update={"engine": engine})
        ingredients = self._gather(experiment) if can_fork() else None
        make = partial(_run, experiment, ingredients, run)
        return RunRequest(run.label, run.folder, make)

    def _gather(self, experiment: config.Experiment) -> Ingredients:
        tables = (experiment.data, experiment.partition, experiment.model)
        key = repr((experiment.seed, *(table.model_dump_json() for table in tables)))
        if key != self._key or self._ingredients is None:
            self._ingredients = None  # frees the memory before new data are loaded
            self._ingredients, self._key = gather(experiment), key
        return self._ingredients


def _run(
    experiment: config.Experiment,
    ingredients: Ingredients | None,
    run: TableRun,
    display: ProgressDisplay,
    name: str,
) -> Status:
    """Make or continue a run; a process that was not forked loads the data itself."""
    ingredients, folder = ingredients or gather(experiment), run.folder
    if run.audit is not None:  # before the run, which is not begun again once it is finished
        try:
            record = examine(experiment, ingredients, run.audit, run.audit_folder)
        except KeyboardInterrupt:
            return "interrupted"
        write_audit(record, run.audit_folder)
    prepared = prepare(experiment, ingredients)
    status = start(prepared, folder, resume=True, callbacks=[display.follow(name)]).record.status
    if status == "finished":
        RunFolder(folder).drop_model()
    return status
