"""Several methods, several seeds, everything else the same.

A method's run depends on its settings, the data and the seed alone, so a comparison can be stopped,
taken up and extended: runs that are finished are used again, unfinished ones are continued.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedkeel.config import Run as RunSettings
from fedkeel.cost.memory import check_disk
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import ConfigError, FedkeelError, RunError, TrainingError, counted
from fedkeel.records.comparison import runs_of, write_index
from fedkeel.records.folder import ANOTHER, RunFolder
from fedkeel.report.alerts import differences, problems
from fedkeel.report.runs import MethodResults, RunResults, load_runs
from fedkeel.report.summary import summarise
from fedkeel.report.tables import ResultRow, markdown_table, result_rows
from fedkeel.runner.interrupts import interrupts
from fedkeel.runner.loop import Result
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import Silent, Watcher
from fedkeel.runner.start import start


@dataclass(frozen=True, repr=False)
class Comparison:
    """What a comparison came to.

    Args:
        results: the runs, methods in the order given and seeds within a method.
        failures: one line for each run that could not go on.
        failed: what these had come to.
        others: runs in the folder that have other settings, another model, other data or another
            version, and so are in no table of this one.
        complete: whether every run was made; false after an interrupt.
        folder: where it is on disk, None for a comparison in memory.
    """

    results: list[Result]
    failures: list[str] = field(default_factory=list)
    failed: list[Result] = field(default_factory=list)
    others: int = 0
    complete: bool = True
    folder: Path | None = None

    @property
    def entries(self) -> list[MethodResults]:
        """The runs, put together by method, as the report has them.

        Those that failed are among them, and on disk those of earlier calls that are alike but for
        method and seed.
        """
        if self.folder is not None:
            return load_runs(runs_of(self.folder))
        every = [*self.results, *self.failed]
        methods = dict.fromkeys(result.record.method for result in every)
        made = sorted(every, key=lambda one: one.record.seed)
        return [
            MethodResults(method, i, tuple(_run(r) for r in made if r.record.method == method))
            for i, method in enumerate(methods)
        ]

    @property
    def table(self) -> list[ResultRow]:
        """One row for each method, with its figures over seeds."""
        return result_rows([method.summary for method in self.entries])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `table` as plain values, ready for JSON."""
        return [row.to_json() for row in self.table]

    def __str__(self) -> str:
        notes = [*differences(self.entries), *problems(self.entries)]
        notes += [f"failed: {failure}" for failure in self.failures]
        return markdown_table(self.table) + "".join(f"\n{note}\n" for note in notes)

    def __repr__(self) -> str:
        """Return what a notebook shows: the table, where its folder is still there."""
        try:
            return str(self)
        except (OSError, FedkeelError):
            return f"Comparison of {counted(len(self.results), 'run')} in {self.folder}"


def _run(result: Result) -> RunResults:
    summary = summarise(result.rows, result.record.target, model_bytes=result.record.model.bytes)
    folder = "" if result.folder is None else result.folder.name
    return RunResults(folder, result.record, tuple(result.rows), summary)


def compare(
    settings: RunSettings,
    ingredients: Ingredients,
    methods: Sequence[str],
    seeds: int,
    out: Path | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Run every method with every seed.

    Args:
        settings: everything but method and seed; its seed is the first of the comparison.
        ingredients: data and model.
        methods: expressions.
        seeds: number of seeds.
        out: folder of the comparison, None to keep it in memory.
        watcher: follows it.

    Raises:
        FedkeelError: a method cannot be composed or run on this task; nothing has been run then.
        TrainingError: no run could be finished.
    """
    watcher = watcher or Silent()
    if not methods:
        raise ConfigError(
            "There is nothing to compare.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    wanted: dict[str, RunSettings] = {}  # however a method is written, it is one
    for method in methods:
        one = settings.model_copy(update={"method": method})
        prepared = prepare(one, ingredients)  # refuse what is illegal before anything runs
        check_disk(prepared, out)
        wanted.setdefault(prepared.plan.expression, one)
    for seed in range(settings.seed + 1, settings.seed + seeds):
        ingredients.clients(seed)  # not every seed's partition need be possible
    if out is not None:
        make_folder(out)
    results: dict[tuple[str, int], Result] = {}
    failures: list[str] = []
    failed: list[Result] = []
    made: dict[tuple[str, int], Path] = {}
    complete = True
    watcher.plan(len(wanted) * seeds, len(wanted) * seeds * settings.rounds)
    every = range(settings.seed, settings.seed + seeds)
    pairs = [(s, one) for s in every for one in wanted.values()]
    methods = [one.method for one in wanted.values()]
    listed = partial(_list, out, settings.name, methods, made)
    with _even_so(listed), interrupts(watcher.stopping) as stop:
        for number, (seed, one) in enumerate(pairs, 1):
            prepared = prepare(one.model_copy(update={"seed": seed}), ingredients)
            folder = None if out is None else out / folder_of(prepared)
            if folder is not None:
                made[one.method, seed] = folder
            last = number == len(pairs)
            try:
                result = start(prepared, folder, resume=True, watcher=watcher)
            except TrainingError as error:
                watcher.end(f"{one.method} seed {seed}", error.what)
                failures.append(f"{one.method}, seed {seed}: {error.what}")
                if isinstance(error.result, Result):
                    failed.append(error.result)
                complete = last or not stop.is_set()
                if not complete:
                    break
                continue
            results[one.method, seed] = result
            complete = result.record.status != "interrupted" and (last or not stop.is_set())
            if not complete:
                break
    others = listed()
    ordered = [results[key] for method in methods for key in results if key[0] == method]
    if not ordered:
        raise TrainingError("No run of the comparison could be finished.", got="; ".join(failures))
    return Comparison(ordered, failures, failed, others, complete, out)


def _list(
    out: Path | None, name: str, methods: Sequence[str], made: Mapping[tuple[str, int], Path]
) -> int:
    """List the runs that were begun; return how many of the folder are of other settings."""
    if out is None:
        return 0
    folders = [made[key] for method in methods for key in made if key[0] == method]
    return write_index(out, name, [one.name for one in folders])


@contextmanager
def _even_so(listed: Callable[[], int]) -> Iterator[None]:
    """List the runs also where an error, such as a full disk, or a second Ctrl-C ends them all."""
    try:
        yield
    except BaseException:
        with suppress(FedkeelError, OSError):
            listed()
        raise


def make_folder(out: Path) -> None:
    """Make the folder of a comparison or a search.

    Raises:
        RunError: it cannot be made, or it is that of a run.
    """
    if RunFolder(out).exists():
        raise RunError(
            f"{out} holds a run, not a comparison or a search.",
            do=f"{ANOTHER}, or with the command another name (-s name=...)",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be written to.", got=error, do=ANOTHER) from None


def folder_of(prepared: Prepared) -> str:
    """Return a run's folder: readable, and different for every difference that decides numbers."""
    settings = prepared.settings
    return f"{in_words(settings.method)}-seed{settings.seed}-{prepared.key[:8]}"


def in_words(method: str) -> str:
    """Return an expression as part of a file's name.

    >>> in_words("fedprox(mu=0.1)+gcfed")
    'fedprox-mu-0.1-gcfed'
    """
    return re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-")[:48]
