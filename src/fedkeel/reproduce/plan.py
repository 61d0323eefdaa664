"""What a table needs to be run: its runs, where they lie, and what has become of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.sources import locate
from fedkeel.errors import ConfigError, did_you_mean
from fedkeel.records.folder import RunFolder
from fedkeel.reproduce.table import Column, Row, Table, laid_over
from fedkeel.source_digest import file_digest
from fedkeel.study.compare import file_name
from fedkeel.version import __version__

Chosen = Mapping[tuple[str, str], Mapping[str, Any]]
"""Settings found by a search, by the name of the row and the id of the column."""


@dataclass(frozen=True)
class Ask:
    """Which part of a table, how, and where.

    Args:
        out: folder of all tables; runs lie in ``runs`` below it, whichever table they are for.
        quick: whether the smaller version is meant.
        columns: ids of the columns; all where nothing is given.
        seeds: number of seeds, None for the table's.
        chosen: settings found by a search, laid over everything else; where it is given, cells for
            which nothing was found are left out.
    """

    out: Path
    quick: bool = False
    columns: tuple[str, ...] = ()
    seeds: int | None = None
    chosen: Chosen | None = None

    def folder(self, table: Table, tuned: bool) -> Path:
        """Return where the report of a table lies, and what a search found."""
        return self.out / f"{table.id}{'-tuned' * tuned}{'-quick' * self.quick}"


@dataclass(frozen=True)
class Cell:
    """One run: a method in a setting with a seed.

    Args:
        row: the method.
        column: the setting.
        seed: the run's seed.
        experiment: its settings in full.
        folder: its run folder, which depends on the settings alone.
        absent: data sets that it needs and that are not here.
    """

    row: Row
    column: Column
    seed: int
    experiment: config.Experiment
    folder: Path
    absent: tuple[str, ...]

    @property
    def label(self) -> str:
        """The run in a few words."""
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether it has been run to its end."""
        return status(self.folder) == "finished"


def cells(table: Table, ask: Ask) -> list[Cell]:
    """Return the runs of a table, seed by seed, in each seed column by column.

    Raises:
        ConfigError: a column is not known, or there is no smaller version.
    """
    if ask.quick and table.quick is None:
        raise ConfigError(f"{table.id} has no quick version.", do="run it without --quick")
    known = [column.id for column in table.columns]
    for wanted in ask.columns:
        if wanted not in known:
            raise ConfigError(
                f"{table.id} has no column {wanted!r}.", do=did_you_mean(wanted, known, 24)
            )
    return list(_cells(table, ask))


def _cells(table: Table, ask: Ask) -> Iterator[Cell]:
    if not table.runnable:
        return
    first = int(table.base.get("seed", 0))
    absent: dict[tuple[str, ...], tuple[str, ...]] = {}
    pairs = [
        (row, column)
        for row, column in table.cells(ask.quick and not ask.columns)
        if (not ask.columns or column.id in ask.columns) and _is_asked(table, row, ask)
    ]
    for seed in range(first, first + count(table, ask)):
        for row, column in pairs:
            made = table.experiment(row, column, seed, ask.quick)
            more: Mapping[str, Any] | None = None
            if ask.chosen is not None:
                more = ask.chosen.get((row.name, column.id))
                if more is None:  # untuned settings are in no tuned table
                    continue
            if more:
                values = laid_over(made.model_dump(exclude_none=True), more)
                made = config.build(config.Experiment, values, f"{table.id}, tuned {row.name!r}")
            sources = made.data.sources
            if sources not in absent:
                absent[sources] = missing_data(sources)
            yield Cell(row, column, seed, made, ask.out / "runs" / _name(made), absent[sources])


def _is_asked(table: Table, row: Row, ask: Ask) -> bool:
    """Whether the smaller version has a row, also where columns are chosen by hand."""
    rows: Collection[str] = table.quick.rows if ask.quick and table.quick else ()
    return not rows or row.name in rows


def count(table: Table, ask: Ask) -> int:
    """Return the number of seeds."""
    if ask.seeds is not None:
        return ask.seeds
    return table.quick.seeds if ask.quick and table.quick else table.seeds


def missing_data(names: Sequence[str]) -> tuple[str, ...]:
    """Return which data sets are not here: known sets by name, others by their path."""
    return tuple(name for name in names if not _is_here(name))


def _is_here(name: str) -> bool:
    if name not in SOURCES:
        return Path(name).expanduser().exists()
    source = SOURCES[name]
    return source.layout == "embedded" or locate(source) is not None


def _name(experiment: config.Experiment) -> str:
    """Return the name of a run's folder: readable, and another for other settings."""
    return f"{file_name(experiment.method)}-seed{experiment.seed}-{digest(experiment)}"


def digest(experiment: config.Experiment) -> str:
    """Return a digest of the settings that decide numbers, and of fedkeel's version."""
    values = experiment.model_dump(mode="json")
    for name in ("name", "compare", "flower", "tune"):
        values.pop(name, None)
    values["engine"] = {"dtype": experiment.engine.dtype}
    if experiment.engine.precision != "float32":
        values["engine"]["precision"] = experiment.engine.precision
    if not experiment.data.drop:  # a setting that came later: earlier runs keep their names
        del values["data"]["drop"]
    values["version"] = __version__
    if own := _own(experiment):
        values["own"] = own
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _own(experiment: config.Experiment) -> dict[str, str]:
    """Return digests of the files of one's own that an experiment names: data, model, methods."""
    found: dict[str, str] = {}
    names = [name for name in experiment.data.sources if name not in SOURCES]
    if experiment.data.test is not None:  # a path, whatever it is called
        names.append(experiment.data.test)
    for name in names:
        path = Path(name).expanduser()
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found[name] = _digest_of([file for file in files if file.is_file()])
    for place in re.findall(r"([\w.]+):\w", f"{experiment.model.name} {experiment.method}"):
        file = Path(*place.split(".")).with_suffix(".py")
        found[place] = _digest_of([file] if file.is_file() else [])
    return found


def _digest_of(files: Sequence[Path]) -> str:
    told = [file_digest(str(file), file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b("".join(told).encode(), digest_size=6).hexdigest()


def status(folder: Path) -> str:
    """Return what has become of a run, "" where it was never begun."""
    run = RunFolder(folder)
    return run.read_run().status if run.exists() else ""


@dataclass(frozen=True)
class State:
    """How far a table is.

    Args:
        finished: runs that are finished.
        begun: runs that were begun and are not finished.
        possible: runs whose data are here.
        runs: all runs.
        absent: data sets that are not here.
    """

    finished: int
    begun: int
    possible: int
    runs: int
    absent: tuple[str, ...]

    def words(self, table: Table) -> str:
        """Return it in words."""
        if table.missing:
            return "cannot be run"
        if table.waits:
            return "waiting"
        if not self.runs:
            return "no smaller version"
        if not self.possible:
            return f"needs {', '.join(self.absent)}"
        lacks = f" (needs {', '.join(self.absent)} for the rest)" if self.absent else ""
        if not self.finished and not self.begun:
            return f"not run{lacks}"
        if self.finished < self.runs:
            return f"partly run: {self.finished} of {self.runs}{lacks}"
        return "done"


def state(own: Sequence[Cell]) -> State:
    """Return how far the runs of a table are; those that several cells share count once."""
    once = {cell.folder: cell for cell in own}
    found = {folder: status(folder) for folder in once}
    return State(
        finished=sum(one == "finished" for one in found.values()),
        begun=sum(one not in ("", "finished") for one in found.values()),
        possible=sum(not cell.absent for cell in once.values()),
        runs=len(once),
        absent=tuple(dict.fromkeys(name for cell in once.values() for name in cell.absent)),
    )
