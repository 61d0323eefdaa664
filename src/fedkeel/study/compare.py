"""A comparison: several methods with several seeds, everything else the same.

The run of a method depends only on its settings, the data and the seed. So a comparison can be
stopped, continued and extended: finished runs are used again, unfinished ones are continued.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.engine.choose.engine_rule import EngineRule, kept_engine
from fedkeel.engine.choose.memory import check_disk
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, FedkeelError, RunError, TrainingError
from fedkeel.features.progress.display import ProgressDisplay, run_name
from fedkeel.records.comparison import INDEX, runs_of, write_index
from fedkeel.records.folder import ANOTHER, RunFolder, deciding
from fedkeel.records.run_record import EngineChoice
from fedkeel.report.formatting import enumeration
from fedkeel.report.summary import Quantity
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.feature import RunGroup
from fedkeel.runner.features import callbacks_of, features_asked_for
from fedkeel.runner.prepare import prepare
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.comparison import Comparison
from fedkeel.study.tracked_group import TrackedGroup, tracked_group


def compare(
    settings: RunSettings,
    ingredients: Ingredients,
    methods: Sequence[str],
    seeds: int,
    out: Path | None = None,
    display: ProgressDisplay | None = None,
    callbacks: Sequence[Callback] = (),
) -> Comparison:
    """Run every method with every seed.

    Args:
        settings: everything but method and seed; its seed is the first of the comparison. Without
            weights all methods have those of `with_one_weighting`.
        ingredients: data and model.
        methods: expressions.
        seeds: number of seeds.
        out: folder of the comparison, None to keep it in memory.
        display: shows the progress.
        callbacks: follow each run, one run after the other.

    Raises:
        FedkeelError: a method cannot be composed or run on this task; nothing has been run then.
        TrainingError: no run could be finished.
    """
    display = display or ProgressDisplay()
    is_weighting_chosen = settings.weights is not None
    settings = with_one_weighting(settings)
    if not methods:
        raise ConfigError(
            "There is nothing to compare.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    display.prepare()
    by_expression: dict[str, RunSettings] = {}  # one method may be written in several ways
    others: list[str] = []
    first_folders: list[str] = []  # of the first runs, by name
    rule = EngineRule()
    for method in methods:
        of_method = settings.model_copy(update={"method": method})
        prepared = prepare(of_method, ingredients)  # refuse what is illegal before anything runs
        check_disk(prepared, out)
        by_expression.setdefault(prepared.plan.expression, of_method)
        if any(part.weights not in (None, prepared.plan.weights) for part in prepared.plan.parts):
            others.append(f"`{method}`")
        first_folders.append(run_folder_name(prepared))
        rule.add(prepared)
    listed = runs_of(out) if out is not None and os.path.exists(out / INDEX) else []
    folders = [] if out is None else [*(out / name for name in first_folders), *listed]
    engine = earlier_engine(folders, settings) or rule.choose()
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
    display.plan(len(runs), len(runs) * settings.rounds)
    if others and not is_weighting_chosen:
        display.warn(
            settings.name,
            "every method weights clients by size here. Alone, "
            f"{enumeration(others)} would not: set weights = 'method' for what each method states",
        )
    with tracked_group(settings, "comparison", out) as tracked:
        comparison = _Runs(
            settings.name, ingredients, engine, out, display, callbacks, tracked.runs
        )
        try:
            comparison.make(runs)
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
        out: folder of the comparison; None to keep it in memory.
        display: shows the progress.
        callbacks: follow each run.
        group: the comparison, as trackers know it.
    """

    def __init__(
        self,
        name: str,
        ingredients: Ingredients,
        engine: EngineChoice,
        out: Path | None,
        display: ProgressDisplay,
        callbacks: Sequence[Callback],
        group: RunGroup,
    ) -> None:
        self._name, self._ingredients, self._engine, self._out = name, ingredients, engine, out
        self._display, self._callbacks, self._group = display, callbacks, group
        self._folders: dict[str, list[str]] = {}  # by method
        self._results: dict[str, list[Result]] = {}
        self._failed: list[Result] = []
        self._failures: list[str] = []
        self._complete = True

    def make(self, runs: Sequence[RunSettings]) -> None:
        """Make the runs one after the other, until an interrupt comes."""
        for settings in runs:
            self._folders[settings.method], self._results[settings.method] = [], []
        with interrupts(self._display.stopping) as stop:
            for settings in runs:
                was_interrupted = self._make(settings)
                is_last = settings is runs[-1]
                if was_interrupted or (stop.is_set() and not is_last):
                    self._complete = False
                    return

    def _make(self, settings: RunSettings) -> bool:
        """Make a run; return whether it was interrupted."""
        prepared = prepare(settings, self._ingredients)
        folder = None if self._out is None else self._out / run_folder_name(prepared)
        if folder is not None:
            self._folders[settings.method].append(folder.name)
        name = run_name(settings)
        reported = callbacks_of(settings, folder, self._group)
        callbacks = [*reported, *self._callbacks, self._display.follow(name)]
        try:
            result = start(prepared, folder, resume=True, callbacks=callbacks, choice=self._engine)
        except TrainingError as error:
            self._display.end(name, error.what)
            self._failures.append(f"{settings.method}, seed {settings.seed}: {error.what}")
            if isinstance(error.result, Result):
                self._failed.append(error.result)
            return False
        self._results[settings.method].append(result)
        return result.record.status == "interrupted"

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
        """
        others = self.write_index()
        results = [result for of_method in self._results.values() for result in of_method]
        if not results:
            got = "; ".join(self._failures)
            raise TrainingError("No run of the comparison could be finished.", got=got)
        return Comparison(results, self._failures, self._failed, others, self._complete, self._out)


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
