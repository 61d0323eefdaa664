"""A search for good settings: each method gets the same budget and the same score.

A search is a folder of runs. It starts from the beginning each time and reads finished runs from
the folder. The next points depend only on a fixed seed and on finished runs, so a search that was
killed and repeated gives the same result as one that was not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedkeel.config import Run as RunSettings
from fedkeel.config import Space
from fedkeel.engine.choose.engine_rule import EngineRule
from fedkeel.engine.choose.memory import check_disk
from fedkeel.engine.choose.parallel_runs import DifferingNumbers, shared_runs, with_parallel_runs
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, TrainingError
from fedkeel.features.diagnose.settings import Diagnose
from fedkeel.features.progress.display import ProgressDisplay, WithoutScores
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import EngineChoice
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.runner.feature import RunGroup
from fedkeel.runner.prepare import prepare
from fedkeel.study.compare import (
    create_folder,
    earlier_engine,
    run_folder_name,
    with_one_weighting,
)
from fedkeel.study.pool import (
    RunOutcome,
    RunRequest,
    beside,
    can_be_scored,
    can_fork,
    default_jobs,
    make_run,
    run_all,
    single_process,
)
from fedkeel.study.samplers import WAVE, Sampler, make_sampler, sampler_name
from fedkeel.study.search_space import (
    Axis,
    Point,
    check_space,
    points_of_numbers,
    search_axes,
    settings_at,
    with_values,
)
from fedkeel.study.tracked_group import tracked_group
from fedkeel.study.trial_score import TrialScore
from fedkeel.study.tuning_result import (
    EarlierSearch,
    Trial,
    TuningResult,
    choose_best,
    read_earlier,
    search_digest,
    write_result,
)
from fedkeel.study.tuning_table import tuning_table


@dataclass
class _Search:
    """The search of one method: its axes, its sampler, and the trials made so far."""

    method: str
    axes: tuple[Axis, ...]
    sampler: Sampler
    trials: list[Trial] = field(default_factory=list)


def tune(
    settings: RunSettings,
    ingredients: Ingredients,
    methods: Sequence[str],
    space: Space,
    out: Path,
    jobs: int | None = 1,
    display: ProgressDisplay | None = None,
) -> TuningResult:
    """Search for the best settings of each method.

    Args:
        settings: everything that is not searched; trials are not diagnosed. Without weights all
            methods have those of `with_one_weighting`.
        ingredients: data and model.
        methods: expressions.
        space: the choices, the budget and the score.
        out: folder of the search. Finished runs in it are used again, unfinished ones continued.
        jobs: runs at a time, each in a process of one thread; a single job runs in this process.
            None takes `default_jobs`.
        display: follows the runs.

    Raises:
        FedkeelError: something cannot be searched or run; nothing has been run then.
        TrainingError: no trial of any method could be finished.
    """
    settings = with_one_weighting(settings).model_copy(update={"diagnose": Diagnose()})
    display = display or ProgressDisplay()
    display = display if space.split == "test" else WithoutScores(display)
    methods = list(dict.fromkeys(methods))
    if not methods:
        raise ConfigError(
            "There is no method to search for.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    if jobs is None:
        first = settings.model_copy(update={"method": methods[0]})
        jobs = default_jobs(prepare(first, ingredients), (space.trials or WAVE) * space.seeds)
    if jobs > 1 and not can_fork():
        raise ConfigError(
            "Several runs at a time need processes that can be forked.",
            got=f"jobs {jobs} on this system",
            do="leave jobs at 1; engine.kind = 'workers' uses all cores for each run",
        )
    check_space(settings, methods, space)
    display.prepare()
    first_seed = settings.seed if space.seed is None else space.seed
    score = TrialScore.prepare(settings, ingredients, space)
    searches: list[_Search] = []
    for method in methods:
        axes = search_axes(method, space)
        searches.append(_Search(method, axes, make_sampler(axes, space, settings.seed)))
    trial_runs = _TrialRuns(score, out, range(first_seed, first_seed + space.seeds), jobs, display)
    trial_runs.check(searches)
    create_folder(out)
    runs = sum(search.sampler.trials for search in searches) * space.seeds
    display.plan(runs, runs * settings.rounds)
    complete = True
    with tracked_group(settings, "search", out, shows_test=space.split == "test") as tracked:
        trial_runs.group, trial_runs.is_tracked = tracked.runs, tracked.is_open
        with interrupts(display.stopping) as stop:  # one may come with the last run of a wave
            while complete and (wave := _next_wave(searches)):
                complete = not stop.is_set() and trial_runs.make(wave)
        result, digest = _result(searches, trial_runs, settings, space, complete)
        if tracked.is_open:
            numbers = {
                f"{row.method}/{row.metric}": row.value
                for row in result.rows
                if row.value is not None
            }
            tracked.report(tuning_table(result.rows).markdown(), numbers, complete=complete)
    write_result(result, settings, sampler_name(space), digest)
    return result


def _next_wave(searches: Sequence[_Search]) -> list[tuple[_Search, Point]]:
    """Return the points that the searches ask for next."""
    return [(search, point) for search in searches for point in search.sampler.ask()]


def _result(
    searches: Sequence[_Search],
    trial_runs: _TrialRuns,
    settings: RunSettings,
    space: Space,
    complete: bool,
) -> tuple[TuningResult, str]:
    """Return the result of the trials so far, with those of earlier calls, and its digest."""
    rows = [
        choose_best(s.method, s.axes, s.trials, s.sampler.size, space, trial_runs.metric)
        for s in searches
    ]
    if all(row.value is None for row in rows) and complete:
        errors = dict.fromkeys(trial.error for search in searches for trial in search.trials)
        raise TrainingError("No trial could be finished.", got="; ".join(list(errors)[:2]))
    trials = [trial for search in searches for trial in search.trials]
    out = trial_runs.out
    digest, earlier = "", EarlierSearch()
    if trials:
        digest = search_digest(settings, space, RunFolder(out / trials[0].runs[0]))
        earlier = read_earlier(out, digest, [search.method for search in searches])
    rows = [*earlier.rows, *rows]
    result = TuningResult(
        rows=rows,
        trials=[*earlier.trials, *trials],
        settings={
            row.method: with_values(settings, row.chosen) for row in rows if row.value is not None
        },
        folder=out,
        validation_examples=trial_runs.score.validation_examples,
        complete=complete,
        replaced=earlier.replaced,
    )
    return result, digest


@dataclass
class _TrialRuns:
    """Makes the runs of trials, all in one engine."""

    score: TrialScore
    out: Path
    seeds: range
    jobs: int
    display: ProgressDisplay
    engine: EngineChoice | None = None
    metric: MetricInfo = ACCURACY
    group: RunGroup | None = None
    is_tracked: bool = False

    def settings(self, search: _Search, point: Point, seed: int) -> RunSettings:
        settings = settings_at(point, search.axes, search.method, self.score.settings)
        engine = single_process(settings.engine) if self.jobs > 1 else settings.engine
        return settings.model_copy(update={"seed": seed, "engine": engine})

    def check(self, searches: Sequence[_Search]) -> None:
        """Refuse what cannot run before anything runs, and choose the engine of all runs."""
        for seed in self.seeds:
            self.score.ingredients.clients(seed)
        own: list[Path] = []  # folders that first trials may have
        rule, numbers = EngineRule(), DifferingNumbers()
        for search in searches:
            first, last = points_of_numbers(search.axes)
            settings = self.settings(search, first, self.seeds[0])
            prepared = prepare(settings, self.score.ingredients)
            if last != first:
                numbers.add(prepared)
                other = self.settings(search, last, self.seeds[0])
                numbers.add(prepare(other, self.score.ingredients))
            check_disk(prepared, self.out)
            self.metric = prepared.setup.metrics.score
            own.append(self.out / run_folder_name(prepared))
            rule.add(prepared, shared_runs(prepared, self._alike(search, numbers)))
        others = sorted(self.out.iterdir()) if os.path.isdir(self.out) else []
        searched = {axis.key for search in searches for axis in search.axes if axis.term is None}
        choice = earlier_engine([*own, *others], settings, searched) or rule.choose()
        self.engine = with_parallel_runs(choice, prepared, numbers)

    def _alike(self, search: _Search, numbers: DifferingNumbers) -> int:
        """Return how many runs of a search may train side by side, as far as that is known."""
        axes = [axis for axis in search.axes if axis.key == "local.lr"]
        for axis in search.axes:
            is_number = axis.term is not None and isinstance(axis.examples[-1], float)
            axes += [axis] * (is_number and axis.key not in numbers.apart)
        return math.prod(axis.size or 1 for axis in axes) * len(self.seeds)

    def make(self, wave: Sequence[tuple[_Search, Point]]) -> bool:
        """Try points and tell the samplers their scores; return false after an interrupt."""
        requests = [(search, point, seed) for search, point in wave for seed in self.seeds]
        outcomes = run_all(
            (self._request(*request) for request in requests),
            self.jobs,
            self.display,
            can_be_scored,
        )
        for outcome in outcomes:
            if outcome is not None and outcome.error is not None and not can_be_scored(outcome):
                raise outcome.error
        outcomes += [None] * (len(requests) - len(outcomes))
        seeds = len(self.seeds)
        for index, (search, point) in enumerate(wave):
            of_point = outcomes[index * seeds : (index + 1) * seeds]
            ended = [outcome for outcome in of_point if outcome is not None]
            if len(ended) == seeds:
                trial = self._trial(search.method, point, ended)
                search.trials.append(trial)
                value = None if trial.value is None else self.metric.sign * trial.value
                search.sampler.tell(point, value)
        return None not in outcomes

    def _request(self, search: _Search, point: Point, seed: int) -> RunRequest:
        settings = self.settings(search, point, seed)
        prepared = prepare(settings, self.score.ingredients)
        self.metric = prepared.setup.metrics.score
        folder = self.out / run_folder_name(prepared)
        values = ", ".join(f"{name} {_short(value)}" for name, value in point.items())
        name = f"{search.method}, {values}, seed {seed}"
        run = partial(make_run, prepared, folder, self.engine, group=self.group)
        return RunRequest(name, folder, run, *beside(prepared, self.engine, self.is_tracked))

    def _trial(self, method: str, point: Point, outcomes: Sequence[RunOutcome]) -> Trial:
        return Trial(
            method,
            point,
            tuple(None if run.error else self.score.of(run.rows, self.metric) for run in outcomes),
            tuple(outcome.folder.name for outcome in outcomes),
            next((outcome.error.what for outcome in outcomes if outcome.error), ""),
        )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
