"""Makes the runs of a table, several at a time; each is cached and can be continued.

Runs that differ only in the seed, the rate or numbers of the method train side by side where that
pays: then one after the other, and the others seed by seed.

A run's folder depends only on its settings, so a stopped table continues, and tables share runs.
A finished run keeps its rows and not its model, because a table has hundreds of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.engine.choose.engine_rule import EngineRule, kept_engine
from fedkeel.engine.choose.parallel_runs import DifferingNumbers, shared_runs, with_parallel_runs
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import FedkeelError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.audit import write_audit
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import EngineChoice, Status
from fedkeel.reproduce.plan import TableRun
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.study.audit.examine import examine
from fedkeel.study.compare import create_folder, without_numbers
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
        requests = _Requests(list(unique.values()), jobs).of(unfinished)
        outcomes = run_all(requests, jobs, display)
    ended = [outcome for outcome in outcomes if outcome is not None]
    failures = {end.folder.name: end.error.what for end in ended if end.error is not None}
    finished = sum(end.error is None for end in ended)
    return CellOutcomes(finished, reused, failures, complete=len(ended) == len(unfinished))


class _Requests:
    """Makes a request of each run, and keeps the data of the last one for the next.

    Args:
        runs: the runs of the table, also those that are finished.
        jobs: runs, or groups of runs that train side by side, at a time.
    """

    def __init__(self, runs: Sequence[TableRun], jobs: int) -> None:
        self._jobs = jobs
        self._key = ""
        self._ingredients: Ingredients | None = None
        self._groups: dict[str, _Group] = {}  # by form
        self._alike: dict[str, list[TableRun]] = {}  # by form
        for run in runs:
            self._alike.setdefault(_form(run), []).append(run)

    def of(self, unfinished: Sequence[TableRun]) -> Iterator[RunRequest]:
        """Yield the requests of runs, those that train side by side after one another."""
        waiting = {run.folder: run for run in unfinished}
        while waiting:
            run = next(iter(waiting.values()))
            group = self._group(run)
            beside = [waiting[folder] for folder in group.folders(run) if folder in waiting]
            for each in beside:
                del waiting[each.folder]
                yield self._request(each, group, len(beside))

    def _request(self, run: TableRun, group: _Group, beside: int) -> RunRequest:
        experiment = _experiment(run)
        is_shared = can_fork() or group.engine is not None
        ingredients = self._gather(experiment) if is_shared else None
        make = partial(_run, experiment, ingredients, run, group.engine)
        alike = group.form(run) if beside > 1 else ""
        return RunRequest(run.label, run.folder, make, alike, beside)

    def _group(self, run: TableRun) -> _Group:
        form = _form(run)
        if form not in self._groups:
            engine, apart = self._engine(self._alike[form])
            self._groups[form] = _Group(self._alike[form], engine, apart)
        return self._groups[form]

    def _engine(self, runs: Sequence[TableRun]) -> tuple[EngineChoice | None, frozenset[str]]:
        """Return the engine of runs that train side by side, None where each chooses its own.

        Also return the hyper-parameters in whose numbers those that do may not differ. Jobs that
        are not forked load their data themselves, so nothing is known of these runs here.
        """
        numbers = DifferingNumbers()
        if len(runs) == 1 or runs[0].audit is not None or not (self._jobs == 1 or can_fork()):
            return None, numbers.apart
        of_method = {run.experiment.method: run for run in reversed(runs)}
        rule = EngineRule()
        try:
            for run in reversed(of_method.values()):
                experiment = _experiment(run)
                prepared = prepare(experiment, self._gather(experiment))
                numbers.add(prepared)
                rule.add(prepared, shared_runs(prepared, len(runs)))
            engine = _earlier_engine(runs) or rule.choose()
            engine = with_parallel_runs(engine, prepared, numbers)
        except FedkeelError:  # which the run itself raises again
            return None, numbers.apart
        return (engine if engine.parallel_runs else None), numbers.apart

    def _gather(self, experiment: config.Experiment) -> Ingredients:
        tables = (experiment.data, experiment.partition, experiment.model, experiment.task)
        key = repr([table.model_dump_json() for table in tables])
        if key != self._key or self._ingredients is None:
            self._ingredients = None  # frees the memory before new data are loaded
            self._ingredients, self._key = gather(experiment), key
        return self._ingredients


@dataclass(frozen=True)
class _Group:
    """Runs of one form.

    Args:
        runs: the runs.
        engine: their engine where they train side by side, None where each has its own.
        apart: hyper-parameters in whose numbers those that train side by side do not differ.
    """

    runs: Sequence[TableRun]
    engine: EngineChoice | None
    apart: frozenset[str]

    def form(self, run: TableRun) -> str:
        """Return what a run has in common with those beside which it may train."""
        return f"{_form(run)} {without_numbers(run.experiment.method, self.apart)}"

    def folders(self, run: TableRun) -> list[Path]:
        """Return the folders of the runs that train side by side with one, and its own."""
        most = 1 if self.engine is None else self.engine.parallel_runs or 1
        alike = [other.folder for other in self.runs if self.form(other) == self.form(run)]
        first = alike.index(run.folder) // most * most
        return alike[first : first + most]


def _form(run: TableRun) -> str:
    """Return a text that is the same for runs that differ only in the seed, the rate or numbers."""
    left_out: dict[str, Any] = {"name": True, "seed": True, "method": True, "local": {"lr"}}
    settings = run.experiment.model_dump_json(exclude=left_out)
    return f"{without_numbers(run.experiment.method)} {settings} {run.audit}"


def _experiment(run: TableRun) -> config.Experiment:
    """Return the settings of a run that is made in one process."""
    engine = single_process(run.experiment.engine)
    return run.experiment.model_copy(update={"engine": engine})


def _earlier_engine(runs: Sequence[TableRun]) -> EngineChoice | None:
    """Return the engine of a run that was begun beside others, None where there is none."""
    for run in runs:
        folder = RunFolder(run.folder)
        engine = folder.read_run().engine if folder.exists() else EngineChoice()
        if engine.parallel_runs:
            return kept_engine(engine, _experiment(run).engine)
    return None


def _run(
    experiment: config.Experiment,
    ingredients: Ingredients | None,
    run: TableRun,
    engine: EngineChoice | None,
    display: ProgressDisplay,
    name: str,
) -> Status:
    """Make or continue a run, in its own engine where none is given.

    A process that was not forked loads the data itself.
    """
    ingredients, folder = ingredients or gather(experiment), run.folder
    if run.audit is not None:  # before the run, which is not begun again once it is finished
        try:
            record = examine(experiment, ingredients, run.audit, run.audit_folder)
        except KeyboardInterrupt:
            return "interrupted"
        write_audit(record, run.audit_folder)
    prepared = prepare(experiment, ingredients)
    callbacks = [display.follow(name)]
    result = start(prepared, folder, resume=True, callbacks=callbacks, choice=engine)
    if result.record.status == "finished":
        RunFolder(folder).drop_model()
    return result.record.status
