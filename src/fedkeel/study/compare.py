"""A comparison: several methods with several seeds, everything else the same.

The run of a method depends only on its settings, the data and the seed. So a comparison can be
stopped, continued and extended: finished runs are used again, unfinished ones are continued.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.cost.engine_rule import EngineRule, kept_engine
from fedkeel.cost.memory import check_disk
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, FedkeelError, RunError, TrainingError, counted
from fedkeel.records.comparison import INDEX, runs_of, write_index
from fedkeel.records.folder import ANOTHER, RunFolder, deciding
from fedkeel.records.run_record import EngineChoice
from fedkeel.report.alerts import differences, problems
from fedkeel.report.claims import Claims, claims_of
from fedkeel.report.client_gains import ClientRow, markdown_client_table, personal_rows
from fedkeel.report.columns import ResultRow
from fedkeel.report.federation_gain import federation_notes
from fedkeel.report.formatting import enumeration
from fedkeel.report.runs import MethodResults, RunResults, load_runs
from fedkeel.report.summary import summarise
from fedkeel.report.tables import markdown_table, result_rows
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import ProgressDisplay, run_name
from fedkeel.runner.result import Result
from fedkeel.runner.start import start


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of a comparison.

    Args:
        results: the finished runs, by method in the order given, then by seed.
        failures: one line for each run that could not go on.
        failed: the results of these runs until then.
        others: number of runs in the folder that no table of this comparison holds, because they
            have other settings, another model, other data or another version.
        complete: whether every run was made; false after an interrupt.
        folder: where it is on disk; None for a comparison in memory.
    """

    results: list[Result]
    failures: list[str] = field(default_factory=list)
    failed: list[Result] = field(default_factory=list)
    others: int = 0
    complete: bool = True
    folder: Path | None = None

    @property
    def entries(self) -> list[MethodResults]:
        """The runs, grouped by method, as the report takes them.

        Failed runs are among them; on disk also those of earlier calls that differ only in method
        and seed.
        """
        if self.folder is not None:
            return load_runs(runs_of(self.folder))
        results = [*self.results, *self.failed]
        by_method: dict[str, list[RunResults]] = {}
        for result in sorted(results, key=lambda result: result.record.seed):
            by_method.setdefault(result.record.method, []).append(_run_results(result))
        methods = dict.fromkeys(result.record.method for result in results)
        return [
            MethodResults(method, index, tuple(by_method[method]))
            for index, method in enumerate(methods)
        ]

    @property
    def table(self) -> list[ResultRow]:
        """One row for each method, with its figures over seeds."""
        return result_rows([method.summary for method in self.entries], self.claims())

    def claims(self, reference: str | None = None, margin: float | None = None) -> Claims | None:
        """Return what may be claimed of each method against a reference: see `claims_of`.

        Its ``sentence`` says it in words. None for one method.
        """
        return claims_of([method.summary for method in self.entries], reference, margin)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `table` as plain values, ready for JSON."""
        clients: dict[str, list[dict[str, Any]]] = {}
        for row in self.clients:
            clients.setdefault(row.scores.method.label, []).append(row.to_json())
        return [{**row.to_json(), **_clients_of(row, clients)} for row in self.table]

    @property
    def clients(self) -> list[ClientRow]:
        """How scores are distributed over clients; empty where no method has personal models."""
        return personal_rows(self.entries)

    @property
    def notes(self) -> list[str]:
        """What to know beside the table: claims, the gain by federation, differences, problems."""
        entries, claims = self.entries, self.claims()
        sentences = [claims.sentence] if claims else []
        return [*sentences, *federation_notes(entries), *differences(entries), *problems(entries)]

    def __str__(self) -> str:
        notes = [*self.notes, *(f"failed: {failure}" for failure in self.failures)]
        clients = self.clients
        tables = [markdown_table(self.table), markdown_client_table(clients) if clients else ""]
        return "\n".join(filter(None, tables)) + "".join(f"\n{note}\n" for note in notes)

    def __repr__(self) -> str:
        """Return what a notebook shows: the table, where its folder still exists."""
        try:
            return str(self)
        except (OSError, FedkeelError):
            return f"Comparison of {counted(len(self.results), 'run')} in {self.folder}"


def _clients_of(row: ResultRow, clients: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    label = row.summary.method
    return {"clients": clients[label]} if label in clients else {}


def _run_results(result: Result) -> RunResults:
    summary = summarise(
        result.rows,
        result.record.target,
        score=result.record.score,
        loss=result.record.task.loss,
        judges=result.record.judges,
        model_bytes=result.record.model.bytes,
    )
    folder = "" if result.folder is None else result.folder.name
    return RunResults(folder, result.record, tuple(result.rows), summary)


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
    comparison = _Runs(settings.name, ingredients, engine, out, display, callbacks)
    try:
        comparison.make(runs)
    except BaseException:  # such as a full disk, or a second Ctrl-C
        with suppress(FedkeelError, OSError):
            comparison.write_index()
        raise
    return comparison.result()


def with_one_weighting(settings: RunSettings) -> RunSettings:
    """Return settings that weight clients by their examples where no weights are chosen.

    Methods that are compared then differ in nothing but the method.
    """
    is_private = settings.privacy is not None and settings.privacy.unit == "client"
    default = "uniform" if is_private else "examples"
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
    """

    def __init__(
        self,
        name: str,
        ingredients: Ingredients,
        engine: EngineChoice,
        out: Path | None,
        display: ProgressDisplay,
        callbacks: Sequence[Callback],
    ) -> None:
        self._name, self._ingredients, self._engine, self._out = name, ingredients, engine, out
        self._display, self._callbacks = display, callbacks
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
        callbacks = [*self._callbacks, self._display.follow(name)]
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
