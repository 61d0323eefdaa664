"""A comparison: several methods with several seeds, everything else the same.

The run of a method depends only on its settings, the data and the seed. So a comparison can be
stopped, continued and extended: finished runs are used again, unfinished ones are continued.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.engine.choose.engine_rule import EngineRule, kept_engine
from fedkeel.engine.choose.memory import check_disk
from fedkeel.engine.choose.parallel_runs import DifferingNumbers, shared_runs, with_parallel_runs
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, FedkeelError, RunError, TrainingError, enumeration
from fedkeel.features.progress.display import ProgressDisplay, run_name
from fedkeel.method.grammar import read_terms, write_terms
from fedkeel.records.comparison import INDEX, runs_of, write_index
from fedkeel.records.folder import ANOTHER, RunFolder, deciding
from fedkeel.records.run_record import EngineChoice
from fedkeel.report.summary import Quantity
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.features import callbacks_of, features_asked_for
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.comparison import Comparison
from fedkeel.study.pool import (
    RunRequest,
    beside,
    can_be_scored,
    can_fork,
    default_jobs,
    make_run,
    run_all,
    single_process,
)
from fedkeel.study.tracked_group import TrackedGroup, tracked_group


def compare(
    settings: RunSettings,
    ingredients: Ingredients,
    methods: Sequence[str],
    seeds: int,
    out: Path | None = None,
    display: ProgressDisplay | None = None,
    callbacks: Sequence[Callback] = (),
    jobs: int | None = 1,
) -> Comparison:
    """Run every method with every seed.

    Runs of a method that differ in the seed, or in numbers of the method, train side by side where
    that pays.

    Args:
        settings: everything but method and seed; its seed is the first of the comparison. Without
            weights all methods have those of `with_one_weighting`.
        ingredients: data and model.
        methods: expressions.
        seeds: number of seeds.
        out: folder of the comparison, None to keep it in memory.
        display: shows the progress.
        callbacks: follow each run, one run after the other.
        jobs: runs, or groups of runs that train side by side, at a time; each in a process of one
            thread. A single job runs in this process. None takes `default_jobs`.

    Raises:
        FedkeelError: a method cannot be composed or run on this task; nothing has been run then.
        TrainingError: no run could be finished.
    """
    display = display or ProgressDisplay()
    display.prepare()
    if jobs is None and (out is None or callbacks or not methods):
        jobs = 1
    if jobs is None:
        first = settings.model_copy(update={"method": methods[0]})
        jobs = default_jobs(prepare(with_one_weighting(first), ingredients), len(methods) * seeds)
    if jobs > 1:
        check_jobs(jobs, out, callbacks)
        engine_of_job = single_process(settings.engine)
        settings = settings.model_copy(update={"engine": engine_of_job})
    is_weighting_chosen = settings.weights is not None
    settings = with_one_weighting(settings)
    if not methods:
        raise ConfigError(
            "There is nothing to compare.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    by_expression: dict[str, RunSettings] = {}  # one method may be written in several ways
    others: list[str] = []
    first_folders: list[str] = []  # of the first runs, by name
    rule, largest = EngineRule(), None  # of the runs, the one of the largest cohort
    numbers, forms = DifferingNumbers(), Counter(map(without_numbers, dict.fromkeys(methods)))
    for method in methods:
        of_method = settings.model_copy(update={"method": method})
        prepared = prepare(of_method, ingredients)  # refuse what is illegal before anything runs
        check_disk(prepared, out)
        by_expression.setdefault(prepared.plan.expression, of_method)
        if any(part.weights not in (None, prepared.plan.weights) for part in prepared.plan.parts):
            others.append(f"`{method}`")
        first_folders.append(run_folder_name(prepared))
        alike = forms[without_numbers(method)]
        if alike > 1 and not callbacks:
            numbers.add(prepared)
        rule.add(prepared, 1 if callbacks else shared_runs(prepared, seeds * alike))
        if largest is None or _cohort(prepared) > _cohort(largest):
            largest = prepared
    listed = runs_of(out) if out is not None and os.path.exists(out / INDEX) else []
    folders = [] if out is None else [*(out / name for name in first_folders), *listed]
    engine = earlier_engine(folders, settings) or rule.choose()
    engine = with_parallel_runs(engine, largest, numbers)
    form_of = {method: without_numbers(method, numbers.apart) for method in methods}
    seed_range = range(settings.seed, settings.seed + seeds)
    for seed in seed_range[1:]:
        ingredients.clients(seed)  # the partition may be impossible for some seeds
    if out is not None:
        create_folder(out)
    runs = [
        of_method.model_copy(update={"seed": seed})
        for seed in seed_range
        for of_method in by_expression.values()
    ]
    if engine.parallel_runs:  # runs of one form follow one another
        runs = [run for group in _of_one_form(runs, form_of, len(runs)) for run in group]
    display.plan(len(runs), len(runs) * settings.rounds)
    if others and not is_weighting_chosen:
        display.warn(
            settings.name,
            "every method weights clients by size here. Alone, "
            f"{enumeration(others)} would not: set weights = 'method' for what each method states",
        )
    with tracked_group(settings, "comparison", out) as tracked:
        comparison = _Runs(
            settings.name, ingredients, engine, form_of, out, display, callbacks, tracked
        )
        try:
            comparison.make(runs, jobs)
        except BaseException:  # such as a full disk, or a second Ctrl-C
            with suppress(FedkeelError, OSError):
                comparison.write_index()
            raise
        result = comparison.result()
        if tracked.is_open:
            _report_to(tracked, result)
    return result


def _report_to(tracked: TrackedGroup, comparison: Comparison) -> None:
    """Report the result of a comparison to its trackers."""
    figures: tuple[Quantity, ...] = ("best", "last")
    numbers = {
        f"{row.summary.method}/{figure}": stat.mean
        for row in comparison.table
        for figure in figures
        if (stat := row.stat(figure)) is not None
    }
    tracked.report(str(comparison), numbers, comparison.entries, comparison.complete)


def with_one_weighting(settings: RunSettings) -> RunSettings:
    """Return settings that weight clients by their examples where no weights are chosen.

    Methods that are compared then differ in nothing but the method.
    """
    asked = (feature.weights for feature in features_asked_for(settings))
    default = next(filter(None, asked), "examples")
    return settings.model_copy(update={"weights": settings.weights or default})


def earlier_engine(
    folders: Iterable[Path], settings: RunSettings, searched: Collection[str] = ()
) -> EngineChoice | None:
    """Return the engine of earlier runs of a comparison or a search, None where there are none.

    Args:
        folders: where these runs may be.
        settings: of any of its runs.
        searched: dotted keys of the settings in which its runs differ, beside method and seed.
    """

    def common(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in values.items() if k not in ("method", "seed", *searched)}

    expected = common(deciding(config.to_toml(settings)))
    for folder in map(RunFolder, dict.fromkeys(folders)):
        if not folder.exists() or common(folder.deciding()) != expected:
            continue
        try:
            record = folder.read_run()
        except RunError:  # it is damaged, which its own start and the report refuse
            continue
        return kept_engine(record.engine, settings.engine)
    return None


class _Runs:
    """Makes the runs of a comparison, and collects their results.

    Args:
        name: name of the experiment.
        ingredients: data and model.
        engine: the engine of all runs.
        form_of: of each method, its form: runs of one form are made side by side.
        out: folder of the comparison; None to keep it in memory.
        display: shows the progress.
        callbacks: follow each run.
        tracked: the comparison, as trackers know it.
    """

    def __init__(
        self,
        name: str,
        ingredients: Ingredients,
        engine: EngineChoice,
        form_of: Mapping[str, str],
        out: Path | None,
        display: ProgressDisplay,
        callbacks: Sequence[Callback],
        tracked: TrackedGroup,
    ) -> None:
        self._name, self._ingredients, self._engine, self._out = name, ingredients, engine, out
        self._form_of = form_of
        self._display, self._callbacks, self._group = display, callbacks, tracked.runs
        self._is_followed = tracked.is_open or bool(callbacks)
        self._folders: dict[str, list[str]] = {}  # by method
        self._results: dict[str, list[Result]] = {}
        self._failed: list[Result] = []
        self._failures: list[str] = []
        self._complete = True
        self._is_shown = False  # whether display and trackers have heard of them elsewhere

    def make(self, runs: Sequence[RunSettings], jobs: int) -> None:
        """Make the runs, those of a form side by side where that pays, until an interrupt comes.

        Several jobs make them in other processes, and they are read here.
        """
        wanted = {settings.method for settings in runs}
        for method in filter(wanted.__contains__, self._form_of):  # as they were given
            self._folders[method], self._results[method] = [], []
        is_read = jobs > 1 and self._out is not None
        with interrupts(self._display.stopping) as stop:
            if is_read and self._out is not None:
                requests = (self._request(settings, self._out) for settings in runs)
                outcomes = run_all(requests, jobs, self._display, can_be_scored)
                for outcome in filter(None, outcomes):
                    if outcome.error is not None and not can_be_scored(outcome):
                        raise outcome.error
                self._complete = None not in outcomes and len(outcomes) == len(runs)
                self._is_shown = True
                runs = [run for run, outcome in zip(runs, outcomes, strict=False) if outcome]
            size = 1 if self._is_followed or jobs > 1 else self._engine.parallel_runs or 1
            groups = list(_of_one_form(runs, self._form_of, size))
            for group in groups:
                made = self._make_group(group)
                is_last = group is groups[-1] or is_read  # what is finished is read to the end
                if not all(made) or (stop.is_set() and not is_last):
                    self._complete = False
                    break
        for results in self._results.values():
            results.sort(key=lambda result: result.record.seed)

    def _make_group(self, group: Sequence[RunSettings]) -> list[bool]:
        """Make runs side by side; return of each whether it was not interrupted."""
        from fedkeel.engine.vectorized.side_by_side import side_by_side  # slow to import

        return side_by_side([partial(self._make, settings) for settings in group])

    def _request(self, settings: RunSettings, out: Path) -> RunRequest:
        prepared = prepare(settings, self._ingredients)
        folder = out / run_folder_name(prepared)
        run = partial(make_run, prepared, folder, self._engine, group=self._group)
        group = beside(prepared, self._engine, self._is_followed)
        return RunRequest(run_name(settings), folder, run, *group)

    def _make(self, settings: RunSettings) -> bool:
        """Make a run; return whether it was not interrupted."""
        prepared = prepare(settings, self._ingredients)
        folder = None if self._out is None else self._out / run_folder_name(prepared)
        if folder is not None:
            self._folders[settings.method].append(folder.name)
        name = run_name(settings)
        callbacks = list(self._callbacks)
        if not self._is_shown:
            reported = callbacks_of(settings, folder, self._group)
            callbacks = [*reported, *callbacks, self._display.follow(name)]
        try:
            result = start(prepared, folder, resume=True, callbacks=callbacks, choice=self._engine)
        except TrainingError as error:
            self._display.end(name, error.what)
            self._failures.append(f"{settings.method}, seed {settings.seed}: {error.what}")
            if isinstance(error.result, Result):
                self._failed.append(error.result)
            return True
        self._results[settings.method].append(result)
        return result.record.status != "interrupted"

    def write_index(self) -> int:
        """List the runs that were begun; return how many in the folder have other settings."""
        if self._out is None:
            return 0
        folders = [name for of_method in self._folders.values() for name in of_method]
        return write_index(self._out, self._name, folders, self._engine)

    def result(self) -> Comparison:
        """Write the index, and return the comparison.

        Raises:
            TrainingError: no run could be finished.
            KeyboardInterrupt: nor was there time to.
        """
        others = self.write_index()
        results = [result for of_method in self._results.values() for result in of_method]
        if not results and not self._complete:
            raise KeyboardInterrupt  # before any run was finished
        if not results:
            got = "; ".join(self._failures)
            raise TrainingError("No run of the comparison could be finished.", got=got)
        return Comparison(results, self._failures, self._failed, others, self._complete, self._out)


def _cohort(prepared: Prepared) -> int:
    """Return the clients of a round, 0 for a baseline."""
    return 0 if prepared.is_baseline else prepared.largest_cohort


def without_numbers(method: str, kept: Collection[str] = ()) -> str:
    """Return the form of an expression: methods that differ only in numbers have the same.

    Args:
        method: the expression.
        kept: names of hyper-parameters whose numbers stay in the form.

    >>> without_numbers("fedprox(mu=0.1)+fedgc.cgc(margin=0.0, groups='model')", ["mu"])
    "fedprox(mu=0.1)+fedgc.cgc(groups='model')"
    """
    terms = read_terms(method)
    for term in terms:
        for name, value in [*term.values.items()]:
            if isinstance(value, float) and name not in kept:
                del term.values[name]
    return write_terms(terms)


def _of_one_form(
    runs: Sequence[RunSettings], form_of: Mapping[str, str], size: int
) -> Iterator[list[RunSettings]]:
    """Yield runs in groups whose methods have one form, of a size at most."""
    if size == 1:
        yield from ([run] for run in runs)
        return
    for form in dict.fromkeys(form_of[run.method] for run in runs):
        of_form = [run for run in runs if form_of[run.method] == form]
        for start_at in range(0, len(of_form), size):
            yield of_form[start_at : start_at + size]


def check_jobs(jobs: int, out: Path | None, callbacks: Sequence[Callback]) -> None:
    """Refuse several jobs where runs cannot be made in other processes.

    Raises:
        ConfigError: they cannot.
    """
    why = ""
    if not can_fork():
        why = "several runs at a time need processes that can be forked"
    elif out is None:
        why = "runs in other processes leave only their folders, and there is no `out`"
    elif callbacks:
        why = "callbacks live in this process, and the runs would not"
    if why:
        raise ConfigError(
            "Several jobs are not possible here.",
            got=f"jobs {jobs}",
            why=why,
            do="leave jobs at 1; engine.kind = 'workers' uses all cores for each run",
        )


def create_folder(out: Path) -> None:
    """Create the folder of a comparison or a search.

    Raises:
        RunError: it cannot be created, or it is a run folder.
    """
    if RunFolder(out).exists():
        raise RunError(
            f"{out} holds a run, not a comparison or a search.",
            do=f"{ANOTHER}, or with the command another name (-s name=...)",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError for a name that cannot be one
        raise RunError(f"{out} cannot be written to.", got=error, do=ANOTHER) from None


def run_folder_name(prepared: Prepared) -> str:
    """Return the name of a run folder: readable, and unique to the settings that decide numbers."""
    settings = prepared.settings
    return f"{file_name(settings.method)}-seed{settings.seed}-{prepared.key[:8]}"


def file_name(method: str) -> str:
    """Return an expression as part of a file name.

    >>> file_name("fedprox(mu=0.1)+gcfed")
    'fedprox-mu-0.1-gcfed'
    """
    return re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-")[:48]
