"""Several methods, several seeds, everything else the same.

A method's run depends on its settings, the data and the seed alone, so a comparison can be stopped,
taken up and extended: runs that are finished are used again, unfinished ones are continued.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedkeel.config import Run as RunSettings
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.experiment.execute import start
from fedkeel.experiment.interrupts import interrupts
from fedkeel.experiment.prepare import prepare
from fedkeel.experiment.prepared import Ingredients, Prepared
from fedkeel.experiment.progress import Silent, Watcher
from fedkeel.experiment.room import check_disk
from fedkeel.experiment.rounds import Result
from fedkeel.records.comparison import write_index
from fedkeel.records.folder import RunFolder
from fedkeel.report.runs import Entry, Run
from fedkeel.report.summary import summarise
from fedkeel.report.tables import Row, table


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to.

    Args:
        results: the runs, methods in the order given and seeds within a method.
        failures: one line for each run that could not go on.
        complete: whether every run was made; false after an interrupt.
        folder: where it is on disk, None for a comparison in memory.
    """

    results: list[Result]
    failures: list[str] = field(default_factory=list)
    complete: bool = True
    folder: Path | None = None

    @property
    def entries(self) -> list[Entry]:
        """The runs, put together by method, as the report has them."""
        methods = dict.fromkeys(result.record.method for result in self.results)
        return [
            Entry(method, i, tuple(_run(r) for r in self.results if r.record.method == method))
            for i, method in enumerate(methods)
        ]

    @property
    def rows(self) -> list[Row]:
        """One row for each method: plain values, ready for JSON."""
        return table([entry.group for entry in self.entries])

    def __str__(self) -> str:
        from fedkeel.report.tables import to_markdown

        return to_markdown(self.rows)


def _run(result: Result) -> Run:
    summary = summarise(result.rows, result.record.target, model_bytes=result.record.model["bytes"])
    folder = "" if result.folder is None else result.folder.name
    return Run(folder, result.record, tuple(result.rows), summary)


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
    methods = list(dict.fromkeys(methods))
    if not methods:
        raise ConfigError(
            "There is nothing to compare.",
            do='give methods: --methods "fedavg, fedprox+gcfed", or compare.methods in the file',
        )
    wanted = [settings.model_copy(update={"method": method}) for method in methods]
    for one in wanted:  # refuse what is illegal before anything runs
        check_disk(prepare(one, ingredients), out)
    for seed in range(settings.seed + 1, settings.seed + seeds):
        ingredients.clients(seed)  # not every seed's partition need be possible
    if out is not None:
        make_folder(out)
    results: dict[tuple[str, int], Result] = {}
    failures: list[str] = []
    complete = True
    watcher.plan(len(methods) * seeds, len(methods) * seeds * settings.rounds)
    pairs = [(s, one) for s in range(settings.seed, settings.seed + seeds) for one in wanted]
    with interrupts(watcher.stopping) as stop:
        for number, (seed, one) in enumerate(pairs, 1):
            prepared = prepare(one.model_copy(update={"seed": seed}), ingredients)
            folder = None if out is None else out / folder_of(prepared)
            try:
                result = start(prepared, folder, resume=True, watcher=watcher)
            except TrainingError as error:
                watcher.end(f"{one.method} seed {seed}", error.what)
                failures.append(f"{one.method}, seed {seed}: {error.what}")
                continue
            results[one.method, seed] = result
            last = number == len(pairs)
            complete = result.record.status != "interrupted" and (last or not stop.is_set())
            if not complete:
                break
    ordered = [results[key] for method in methods for key in results if key[0] == method]
    if not ordered:
        raise TrainingError(
            "No run of the comparison could be finished.", got="; ".join(failures[:2])
        )
    if out is not None:
        made = [(r.record, r.folder.name) for r in ordered if r.folder is not None]
        write_index(out, settings.name, made)
    return Comparison(ordered, failures, complete, out)


def make_folder(out: Path) -> None:
    """Make the folder of a comparison or a search.

    Raises:
        RunError: it cannot be made, or it is that of a run.
    """
    if RunFolder(out).exists():
        raise RunError(
            f"{out} holds a run, not a comparison or a search.", do="choose another folder (--out)"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{out} cannot be written to.", got=error, do="choose another folder (--out)"
        ) from None


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
