"""Searching hyper-parameters for a table: in each setting, each method with the same budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.errors import ConfigError, RunError, TrainingError
from fedkeel.records.folder import write_text
from fedkeel.reproduce.plan import Ask, Cell, cells, digest
from fedkeel.reproduce.table import Table
from fedkeel.runner.interrupts import interrupts
from fedkeel.runner.prepare import gather
from fedkeel.runner.progress import Watcher
from fedkeel.study.tune import tune

TUNED = "tuned.json"
"""File in a table's folder: what was chosen, by column and row."""

Found = dict[tuple[str, str], dict[str, Any]]
"""Settings that were chosen, by the name of the row and the id of the column."""


def search(table: Table, ask: Ask, folder: Path, jobs: int, watcher: Watcher) -> tuple[Found, bool]:
    """Search for every method in every setting, or take up what was found before.

    Methods that a table gives different settings are searched apart, each with the whole budget.
    One of which no trial could be finished is left out, and the watcher told.

    Args:
        table: the table.
        ask: which part of it, and where.
        folder: the table's folder.
        jobs: runs at a time.
        watcher: follows the runs.

    Returns:
        What was chosen, and whether no interrupt came between.

    Raises:
        ConfigError: the table says nothing about a search.
        RunError: what was found before cannot be read.
        TrainingError: nothing was found for any method, now or before.
    """
    if table.tune is None:
        raise ConfigError(f"{table.id} has no [tune].", do="run it without --tune")
    found = read(folder)
    lost: TrainingError | None = None
    with interrupts(watcher.stopping) as stop:  # one may come with the last run of a search
        for group in _groups(cells(table, ask)):
            if stop.is_set():
                break
            one = group[0].experiment
            methods = [cell.experiment.method for cell in group]
            place = ask.out / "tune" / f"{table.id}-{_digest(one, table.tune)}"
            try:
                tuned = tune(one, gather(one), methods, table.tune, place, jobs, watcher)
            except TrainingError as error:  # no trial of any of these methods
                chosen, lost = {}, error
            else:
                if not tuned.complete:
                    return found, False
                chosen = {r.method: _nested(r.chosen) for r in tuned.rows if r.value is not None}
            found = read(folder)  # also what another call, of other columns, has found meanwhile
            for cell in group:
                found.pop((cell.row.name, cell.column.id), None)  # of an earlier call
                if cell.experiment.method in chosen:
                    found[cell.row.name, cell.column.id] = chosen[cell.experiment.method]
                else:
                    watcher.hint(cell.label, _left_out(cell))
            _write(folder, found)
        if lost is not None and not found:
            raise lost
        return found, not stop.is_set()


def _left_out(cell: Cell) -> str:
    where = f"{cell.row.name}, {cell.column.name}"
    return f"{where}: no trial could be finished; it is left out of the tuned table"


def _write(folder: Path, found: Found) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = [{"row": row, "column": column, "chosen": own} for (row, column), own in found.items()]
    write_text(folder / TUNED, json.dumps(text, indent=1) + "\n")


def read(folder: Path) -> Found:
    """Return what was chosen before; nothing where nothing was searched.

    Raises:
        RunError: the file is damaged.
    """
    file = folder / TUNED
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {(one["row"], one["column"]): one["chosen"] for one in found}
    except (OSError, ValueError, TypeError, KeyError) as error:
        do = "delete it, and run the same command with --tune: its runs are taken again"
        raise RunError(f"{file} cannot be read.", got=error, do=do) from None


def words(space: config.Space) -> str:
    """Return what is searched, in words."""
    own = [f"{name} in {_values(values)}" for name, values in space.space.items()]
    own += [
        f"{method}'s {name} in {_values(values)}"
        for method, parameters in space.method.items()
        for name, values in parameters.items()
    ]
    trials = "the whole grid" if space.trials is None else f"{space.trials} trials"
    on = "the test set, as papers do" if space.on == "test" else "a validation part"
    return (
        f"Hyper-parameters of each method were searched in each setting: {'; '.join(own)}; "
        f"{trials} each, {space.seeds} seed{'s' * (space.seeds > 1)} a trial, chosen by {on}."
    )


def _values(values: object) -> str:
    if isinstance(values, Sequence) and not isinstance(values, str):
        return "{" + ", ".join(str(value) for value in values) + "}"
    return str(values)


def _groups(found: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells of the first seed whose data are here, by settings besides the method."""
    groups: dict[str, list[Cell]] = {}
    for cell in found:
        if cell.seed == found[0].seed and not cell.absent:
            same = cell.experiment.model_copy(update={"method": ""})
            groups.setdefault(digest(same), []).append(cell)
    yield from groups.values()


def _digest(experiment: config.Experiment, space: config.Space) -> str:
    """Return a digest of what a search depends on besides its methods."""
    same = digest(experiment.model_copy(update={"method": ""}))
    return hashlib.blake2b((same + space.model_dump_json()).encode(), digest_size=5).hexdigest()


def _nested(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as tables.

    >>> _nested({"local.lr": 0.1, "method": "fedprox(mu=0.1)"})
    {'local': {'lr': 0.1}, 'method': 'fedprox(mu=0.1)'}
    """
    out: dict[str, Any] = {}
    for key, value in chosen.items():
        *tables, name = key.split(".")
        here = out
        for table in tables:
            here = here.setdefault(table, {})
        here[name] = value
    return out
