"""A search for good settings: for each method with the same budget, by the same measure.

A search is a folder of runs. It is made again from the start each time, and takes what is finished
from the folder. What is tried next depends on a fixed seed and on finished runs alone, so one that
was killed and repeated comes to the same as one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedkeel.config import Run as RunSettings
from fedkeel.config import Space
from fedkeel.cost.memory import check_disk
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import ConfigError, TrainingError
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import Status
from fedkeel.runner.interrupts import interrupts
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import Blind, Silent, Watcher
from fedkeel.runner.start import start
from fedkeel.study.compare import folder_of, make_folder
from fedkeel.study.pool import Made, Order, alone, can_fork, make_all
from fedkeel.study.samplers import Suggester, sampler_of, suggester
from fedkeel.study.search_space import Axis, Point, applied, axes, changed, check
from fedkeel.study.selection import Measure
from fedkeel.study.tuning_result import Trial as Trial
from fedkeel.study.tuning_result import Tuned as Tuned
from fedkeel.study.tuning_result import TunedRow as TunedRow
from fedkeel.study.tuning_result import chosen, earlier, searched, write


@dataclass
class _Search:
    """One method's: what is searched, what suggests, what was tried."""

    method: str
    axes: tuple[Axis, ...]
    suggester: Suggester
    trials: list[Trial] = field(default_factory=list)


def tune(
    settings: RunSettings,
    ingredients: Ingredients,
    methods: Sequence[str],
    space: Space,
    out: Path,
    jobs: int = 1,
    watcher: Watcher | None = None,
) -> Tuned:
    """Search for the best settings of each method.

    Args:
        settings: everything that is not searched.
        ingredients: data and model.
        methods: expressions.
        space: what is searched, and what is chosen by.
        out: folder of the search. Runs that are finished in it are used again, others are
            continued.
        jobs: runs at a time, each in a process of one thread; 1 makes them in this process.
        watcher: follows the runs.

    Raises:
        FedkeelError: something cannot be searched or run; nothing has been run then.
        TrainingError: no trial of any method could be finished.
    """
    watcher = watcher or Silent()
    watcher = watcher if space.on == "test" else Blind(watcher)
    methods = list(dict.fromkeys(methods))
    if not methods:
        raise ConfigError(
            "There is no method to search for.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    if jobs > 1 and not can_fork():
        raise ConfigError(
            "Several runs at a time need processes that can be forked.",
            got=f"jobs {jobs} on this system",
            do="leave jobs at 1; engine.kind = 'workers' uses all cores for each run",
        )
    check(settings, methods, space)
    first = settings.seed if space.seed is None else space.seed
    measure = Measure.of(settings, ingredients, space)
    searches = [
        _Search(method, found, suggester(found, space, settings.seed))
        for method in methods
        for found in [axes(method, space)]
    ]
    work = _Work(measure, out, range(first, first + space.seeds), jobs, watcher)
    work.check(searches)
    make_folder(out)
    runs = sum(search.suggester.trials for search in searches) * space.seeds
    watcher.plan(runs, runs * settings.rounds)
    complete = True
    with interrupts(watcher.stopping) as stop:  # one may come with the last run of a wave
        while complete and (wave := [(s, point) for s in searches for point in s.suggester.ask()]):
            complete = not stop.is_set() and work.make(wave)
    rows = [chosen(s.method, s.axes, s.trials, s.suggester.offered, space) for s in searches]
    if all(row.value is None for row in rows) and complete:
        errors = dict.fromkeys(t.error for s in searches for t in s.trials)
        raise TrainingError("No trial could be finished.", got="; ".join(list(errors)[:2]))
    trials = [trial for search in searches for trial in search.trials]
    search = ""
    replaced: list[str] = []
    if trials:
        search = searched(settings, space, RunFolder(out / trials[0].runs[0]))
        before, made, replaced = earlier(out, search, methods)
        rows, trials = [*before, *rows], [*made, *trials]
    best = {r.method: changed(settings, r.chosen) for r in rows if r.value is not None}
    tuned = Tuned(rows, trials, best, out, measure.held, complete, tuple(replaced))
    write(tuned, settings, sampler_of(space), search)
    return tuned


@dataclass(frozen=True)
class _Work:
    """Makes the runs of trials."""

    measure: Measure
    out: Path
    seeds: range
    jobs: int
    watcher: Watcher

    def settings(self, search: _Search, point: Point, seed: int) -> RunSettings:
        one = applied(self.measure.settings, search.method, search.axes, point)
        return one.model_copy(update={"seed": seed})

    def check(self, searches: Sequence[_Search]) -> None:
        """Refuse what cannot run before anything does: each method once, each seed's clients."""
        for seed in self.seeds:
            self.measure.check(seed)
        for search in searches:
            point: Point = {axis.name: axis.some[0] for axis in search.axes}
            one = self.settings(search, point, self.seeds[0])
            check_disk(prepare(one, self.measure.ingredients), self.out)

    def make(self, wave: Sequence[tuple[_Search, Point]]) -> bool:
        """Try points, and tell the suggesters; return false after an interrupt."""
        wanted = [(search, point, seed) for search, point in wave for seed in self.seeds]
        made = make_all((self._order(*one) for one in wanted), self.jobs, self.watcher, _counts)
        for run in made:
            if run is not None and run.error is not None and not _counts(run):
                raise run.error
        made += [None] * (len(wanted) - len(made))
        for index, (search, point) in enumerate(wave):
            seeds = len(self.seeds)
            runs = [run for run in made[index * seeds : (index + 1) * seeds] if run is not None]
            if len(runs) == seeds:
                trial = self._trial(search.method, point, runs)
                search.trials.append(trial)
                search.suggester.tell(point, trial.value)
        return all(run is not None for run in made)

    def _order(self, search: _Search, point: Point, seed: int) -> Order:
        settings = self.settings(search, point, seed)
        if self.jobs > 1:
            settings = settings.model_copy(update={"engine": alone(settings.engine)})
        prepared = prepare(settings, self.measure.ingredients)
        folder = self.out / folder_of(prepared)
        tried = ", ".join(f"{name} {_short(value)}" for name, value in point.items())
        name = f"{search.method}, {tried}, seed {seed}"
        return Order(name, folder, partial(_make, prepared, folder))

    def _trial(self, method: str, point: Point, runs: Sequence[Made]) -> Trial:
        return Trial(
            method,
            point,
            tuple(None if run.error else self.measure.value(run.rows) for run in runs),
            tuple(run.folder.name for run in runs),
            next((run.error.what for run in runs if run.error), ""),
        )


def _counts(made: Made) -> bool:
    """Return whether a run has come to something that a trial can be judged by."""
    return made.error is None or isinstance(made.error, TrainingError)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _make(prepared: Prepared, folder: Path, watcher: Watcher, name: str) -> Status:
    return start(prepared, folder, resume=True, watcher=watcher, name=name).record.status
