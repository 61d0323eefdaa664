"""Running a table: each cell a run of its own, cached and resumable, several at a time.

What a run is kept in depends on its settings alone, so a table that was stopped goes on, and tables
share what they have in common. A run that is finished keeps its rows and not its model: a table has
hundreds of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import Status
from fedkeel.reproduce.plan import Cell
from fedkeel.runner.prepare import gather, prepare
from fedkeel.runner.progress import Silent, Watcher
from fedkeel.runner.start import start
from fedkeel.study.compare import create_folder
from fedkeel.study.pool import RunRequest, can_fork, run_all, single_process


@dataclass
class Played:
    """What came of running cells.

    Args:
        finished: runs that were finished now.
        reused: runs that had been finished before.
        failures: by name of the run folder, why it could not go on.
        complete: whether no interrupt came between.
    """

    finished: int = 0
    reused: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    complete: bool = True


def play(cells: Sequence[Cell], jobs: int, watcher: Watcher | None = None) -> Played:
    """Make the runs that are not finished, several at a time, each by one thread.

    The first interrupt lets each finish its round and save; the second ends them at once.

    Args:
        cells: the runs; those that share a folder are made once, and those without data left out.
        jobs: runs at a time.
        watcher: follows them.

    Raises:
        RunError: the folder cannot be written to.
    """
    watcher = watcher or Silent()
    once = {cell.folder: cell for cell in reversed(cells) if not cell.absent}
    todo = [cell for cell in reversed(once.values()) if not cell.finished]
    played = Played(reused=len(once) - len(todo))
    if not todo:
        return played
    create_folder(todo[0].folder.parent)
    with watcher:
        watcher.plan(len(todo), sum(cell.experiment.rounds for cell in todo))
        made = run_all(map(_Orders(), todo), jobs, watcher)
    for run in made:
        if run is not None and run.error is not None:
            played.failures[run.folder.name] = run.error.what
        elif run is not None:
            played.finished += 1
    played.complete = len(made) == len(todo) and None not in made
    return played


class _Orders:
    """Makes orders of cells, and keeps the data of the last one for the next."""

    def __init__(self) -> None:
        self._key = ""
        self._ingredients: Ingredients | None = None

    def __call__(self, cell: Cell) -> RunRequest:
        engine = single_process(cell.experiment.engine)
        experiment = cell.experiment.model_copy(update={"engine": engine})
        ingredients = self._gather(experiment) if can_fork() else None
        return RunRequest(
            cell.label, cell.folder, partial(_make, experiment, ingredients, cell.folder)
        )

    def _gather(self, experiment: config.Experiment) -> Ingredients:
        parts = (experiment.data, experiment.partition, experiment.model)
        key = repr((experiment.seed, *(part.model_dump_json() for part in parts)))
        if key != self._key or self._ingredients is None:
            self._ingredients = None  # before the next one is loaded
            self._ingredients, self._key = gather(experiment), key
        return self._ingredients


def _make(
    experiment: config.Experiment,
    ingredients: Ingredients | None,
    folder: Path,
    watcher: Watcher,
    name: str,
) -> Status:
    """Make a run, or go on with it; a process that was not forked loads the data by itself."""
    prepared = prepare(experiment, ingredients or gather(experiment))
    status = start(prepared, folder, resume=True, watcher=watcher, name=name).record.status
    if status == "finished":
        RunFolder(folder).drop_model()
    return status
