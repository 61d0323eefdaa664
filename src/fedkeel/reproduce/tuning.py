"""The search for hyper-parameters of a table: the same budget for each method in each setting."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.base.named_files import writing
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import ConfigError, RunError, TrainingError, counted
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.files import parse_json, write_text
from fedkeel.records.folder import ANOTHER
from fedkeel.reproduce.plan import CellKey, TableRequest, TableRun, digest, table_runs
from fedkeel.reproduce.table import PaperTable
from fedkeel.runner.ingredients import gather
from fedkeel.study.tune import tune

TUNED = "tuned.json"
"""File in a table's folder with the chosen settings of each cell."""

CellSettings = dict[CellKey, dict[str, Any]]
"""The chosen settings of each cell, as nested tables."""


@dataclass(frozen=True)
class TableSearch:
    """The result of a table's search.

    Args:
        settings: the chosen settings of each cell.
        complete: false after an interrupt.
    """

    settings: CellSettings
    complete: bool


def search(
    table: PaperTable, request: TableRequest, jobs: int, display: ProgressDisplay
) -> TableSearch:
    """Search for each method in each setting, or read what was found before.

    Methods with different settings in the table are searched separately, each with the whole
    budget. A cell whose trials all fail is left out, and the display shows that.

    Args:
        table: the table.
        request: which part of it is wanted, and where.
        jobs: runs at a time.
        display: follows the runs.

    Raises:
        ConfigError: the table has no settings of a search.
        RunError: the file of an earlier search cannot be read.
        TrainingError: no cell has settings, now or before.
    """
    if table.tune is None:
        raise ConfigError(f"{table.id} has no [tune].", do="run it without --tune")
    folder = request.folder(table)
    settings = read_tuned_settings(folder)
    failure: TrainingError | None = None
    with interrupts(display.stopping) as stop:  # one may come with the last run of a search
        for group in _groups(table_runs(table, request)):
            if stop.is_set():
                break
            experiment = group[0].experiment
            weights = experiment.weights or "method"  # those of the paper
            paper_settings = experiment.model_copy(update={"weights": weights})
            methods = [run.experiment.method for run in group]
            out = request.out / "tune" / f"{table.id}-{_search_digest(experiment, table.tune)}"
            try:
                result = tune(
                    paper_settings, gather(experiment), methods, table.tune, out, jobs, display
                )
            except TrainingError as error:  # no trial of any of these methods
                chosen, failure = {}, error
            else:
                if not result.complete:
                    return TableSearch(settings, complete=False)
                rows = [row for row in result.rows if row.value is not None]
                chosen = {row.method: _nested(row.chosen) for row in rows}
            settings = read_tuned_settings(folder)  # another process may have added columns
            for run in group:
                settings.pop(run.key, None)  # of an earlier call
                if run.experiment.method in chosen:
                    settings[run.key] = chosen[run.experiment.method]
                else:
                    text = "no trial could be finished; it is left out of the tuned table"
                    display.warn(run.label, f"{run.row.name}, {run.column.name}: {text}")
            _write(folder, settings)
        if failure is not None and not settings:
            raise failure
        return TableSearch(settings, complete=not stop.is_set())


def _write(folder: Path, settings: CellSettings) -> None:
    entries = [{**key._asdict(), "chosen": chosen} for key, chosen in settings.items()]
    with writing(f"{folder} cannot be written to.", ANOTHER):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / TUNED, json.dumps(entries, indent=1) + "\n")


def read_tuned_settings(folder: Path) -> CellSettings:
    """Return the settings that an earlier search chose; none where there was none.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / TUNED
    if not os.path.exists(file):  # False for a name that is too long, too
        return {}
    try:
        entries = parse_json(file.read_bytes())
        return {CellKey(entry["row"], entry["column"]): entry["chosen"] for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        do = "delete it, and run the same command with --tune: its runs are taken again"
        raise RunError(f"{file} cannot be read.", got=error, do=do) from None


def search_text(space: config.Space) -> str:
    """Return the choices and the budget of a search as text."""
    axes = [f"{name} in {_choices(values)}" for name, values in space.space.items()]
    axes += [
        f"{method}'s {name} in {_choices(values)}"
        for method, parameters in space.method.items()
        for name, values in parameters.items()
    ]
    trials = "the whole grid" if space.trials is None else f"{space.trials} trials"
    split = "the test set, as papers do" if space.split == "test" else "a validation part"
    return (
        f"Hyper-parameters of each method were searched in each setting: {'; '.join(axes)}; "
        f"{trials} each, {counted(space.seeds, 'seed')} a trial, chosen by {split}."
    )


def _choices(values: object) -> str:
    if isinstance(values, Sequence) and not isinstance(values, str):
        return "{" + ", ".join(str(value) for value in values) + "}"
    return str(values)


def _groups(runs: Sequence[TableRun]) -> Iterator[list[TableRun]]:
    """Yield the runs of the first seed whose data are here, by all settings but the method."""
    groups: dict[str, list[TableRun]] = {}
    for run in runs:
        if run.seed == runs[0].seed and not run.absent:
            groups.setdefault(_digest_without_method(run.experiment), []).append(run)
    yield from groups.values()


def _digest_without_method(experiment: config.Experiment) -> str:
    return digest(experiment.model_copy(update={"method": ""}))


def _search_digest(experiment: config.Experiment, space: config.Space) -> str:
    """Return a digest of everything but the methods that a search depends on."""
    text = _digest_without_method(experiment) + space.model_dump_json()
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def _nested(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested tables.

    >>> _nested({"local.lr": 0.1, "method": "fedprox(mu=0.1)"})
    {'local': {'lr': 0.1}, 'method': 'fedprox(mu=0.1)'}
    """
    nested: dict[str, Any] = {}
    for key, value in chosen.items():
        *parents, name = key.split(".")
        table = nested
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return nested
