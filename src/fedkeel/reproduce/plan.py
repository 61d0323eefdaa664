"""The runs of a table: their settings, their folders, and how many of them are finished."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedkeel import config
from fedkeel.base.feature import declared_tables
from fedkeel.base.fingerprint.source_digest import file_digest
from fedkeel.base.named_files import expanded
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.sources import locate
from fedkeel.errors import ConfigError, did_you_mean
from fedkeel.features.diagnose.settings import diagnose_of
from fedkeel.records.folder import RunFolder
from fedkeel.reproduce.table import PaperColumn, PaperTable, Row, merge_settings
from fedkeel.study.compare import file_name
from fedkeel.version import __version__


class CellKey(NamedTuple):
    """The name of a row and the id of a column."""

    row: str
    column: str


TunedSettings = Mapping[CellKey, Mapping[str, Any]]
"""The settings that a search found, as nested tables."""


@dataclass(frozen=True)
class TableRequest:
    """Which part of a table is wanted, in which version, and where its runs are.

    Args:
        out: folder of all tables; their runs share its subfolder ``runs``.
        quick: whether the smaller version is wanted.
        columns: ids of the columns; empty for all.
        rows: names of the rows; empty for all.
        seeds: number of seeds; None for the table's.
        device: where all runs train, in place of what the table says.
        tuned: whether the version with searched hyper-parameters is wanted.
        tuned_settings: what the search found; None before it. Cells without an entry are left out.
    """

    out: Path
    quick: bool = False
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    seeds: int | None = None
    device: str | None = None
    tuned: bool = False
    tuned_settings: TunedSettings | None = None

    def folder(self, table: PaperTable) -> Path:
        """Return the folder of a table's pages and of its search result."""
        return self.out / f"{table.id}{'-tuned' * self.tuned}{'-quick' * self.quick}"

    def is_quick(self, table: PaperTable) -> bool:
        """Return whether a smaller version of this table is wanted."""
        return self.quick and table.quick is not None

    def seed_count(self, table: PaperTable) -> int:
        """Return the number of seeds."""
        if self.seeds is not None:
            return self.seeds
        return table.quick.seeds if self.quick and table.quick else table.seeds


@dataclass(frozen=True)
class TableRun:
    """One run of a table: a method in a setting with a seed.

    Args:
        row: the method.
        column: the setting.
        seed: the run's seed.
        experiment: all its settings.
        folder: its run folder, which depends only on the settings.
        absent: data sets that it needs and that are not on this machine.
        audit: the attack on its messages; None where the table shows none.
    """

    row: Row
    column: PaperColumn
    seed: int
    experiment: config.Experiment
    folder: Path
    absent: tuple[str, ...]
    audit: config.Audit | None = None

    @property
    def audit_folder(self) -> Path:
        """The folder of what the attack finds, beside the run's."""
        return self.folder.with_name(f"{self.folder.name}-audit")

    @property
    def key(self) -> CellKey:
        """The cell that the run is for."""
        return CellKey(self.row.name, self.column.id)

    @property
    def label(self) -> str:
        """Method, setting and seed as text."""
        return f"{self.row.name}, {self.column.name}, seed {self.seed}"

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended regularly."""
        return run_status(self.folder) == "finished"


def table_runs(table: PaperTable, request: TableRequest) -> list[TableRun]:
    """Return the runs of a table, seed by seed, in each seed column by column.

    Raises:
        ConfigError: an unknown column, row or device, or there is no smaller version.
    """
    if request.quick and table.quick is None:
        raise ConfigError(f"{table.id} has no quick version.", do="run it without --quick")
    columns, rows = [column.id for column in table.columns], [row.name for row in table.rows]
    for what, wanted, known in (
        *(("column", name, columns) for name in request.columns),
        *(("row", name, rows) for name in request.rows),
    ):
        if wanted not in known:
            raise ConfigError(
                f"{table.id} has no {what} {wanted!r}.", do=did_you_mean(wanted, known, 24)
            )
    return list(_runs(table, request)) if table.is_runnable else []


def _runs(table: PaperTable, request: TableRequest) -> Iterator[TableRun]:
    absent: dict[tuple[str, ...], tuple[str, ...]] = {}
    first_seed = int(table.base.get("seed", 0))
    for seed in range(first_seed, first_seed + request.seed_count(table)):
        for row, column in _cells(table, request):
            experiment = table.experiment(row, column, seed, request.quick)
            if request.device is not None:
                values = {**experiment.engine.model_dump(), "kind": "auto"}
                engine = config.build(
                    config.Engine, {**values, "device": request.device}, "--device"
                )
                experiment = experiment.model_copy(update={"engine": engine})
            if request.tuned_settings is not None:
                tuned = request.tuned_settings.get(CellKey(row.name, column.id))
                if tuned is None:
                    continue
                values = merge_settings(experiment.model_dump(exclude_none=True), tuned)
                where = f"{table.id}, tuned {row.name!r}"
                experiment = config.build(config.Experiment, values, where)
            sources = experiment.data.sources
            if sources not in absent:
                absent[sources] = tuple(name for name in sources if not _is_here(name))
            audit = table.audit_of(row, column, seed, request.quick)
            folder = request.out / "runs" / _folder_name(experiment, audit)
            yield TableRun(row, column, seed, experiment, folder, absent[sources], audit)


def _cells(table: PaperTable, request: TableRequest) -> list[tuple[Row, PaperColumn]]:
    """Return the wanted cells; named columns and rows replace those of the smaller version."""
    quick = table.quick if request.quick else None
    columns = request.columns or (quick.columns if quick else ())
    rows = request.rows or (quick.rows if quick else ())
    return [
        (row, column)
        for row, column in table.cells()
        if (not columns or column.id in columns) and (not rows or row.name in rows)
    ]


def _is_here(name: str) -> bool:
    """Return whether a known data set or a file is on this machine."""
    if name not in SOURCES:
        return expanded(name).exists()
    return SOURCES[name].layout == "embedded" or locate(SOURCES[name]) is not None


def _folder_name(experiment: config.Experiment, audit: config.Audit | None = None) -> str:
    """Return the name of a run folder: readable, and unique to the settings."""
    name = f"{file_name(experiment.method)}-seed{experiment.seed}-{digest(experiment)}"
    return name if audit is None else f"{name}-{_digest_of_text(audit.model_dump_json())}"


_ALWAYS_NAMED = ("adversary", "stop", "system")
"""Tables that are in the names of folders also where they say nothing, as they always were."""


def digest(experiment: config.Experiment) -> str:
    """Return a digest of the settings that decide numbers, and of fedkeel's version."""
    values = experiment.model_dump(mode="json")
    for name in ("name", "compare", "flower", "track", "tune"):
        values.pop(name, None)
    values["engine"] = {"dtype": experiment.engine.dtype}
    if experiment.engine.precision != "float32":
        values["engine"]["precision"] = experiment.engine.precision
    if not experiment.data.drop:  # settings that were added later: older runs keep their names
        del values["data"]["drop"]
    if experiment.data.channels == "first":
        del values["data"]["channels"]
    if experiment.data.missing_targets == "refuse":
        del values["data"]["missing_targets"]
    later = (("data", "text"), ("data", "public"), ("data", "public_fraction"), ("model", "lora"))
    for table, name in (*later, ("local", "train")):
        if values[table][name] is None:
            del values[table][name]
    if not diagnose_of(experiment).kinds:
        del values["diagnose"]
    for table, kind in declared_tables().items():
        if table not in _ALWAYS_NAMED and getattr(experiment, table) == kind.default:
            values.pop(table, None)
    values["version"] = __version__
    if user_files := _user_file_digests(experiment):
        values["own"] = user_files
    return _digest_of_text(json.dumps(values, sort_keys=True))


def _user_file_digests(experiment: config.Experiment) -> dict[str, str]:
    """Return digests of the user's files that an experiment names: data, model, methods."""
    digests: dict[str, str] = {}
    names = [name for name in experiment.data.sources if name not in SOURCES]
    # always paths, also with the name of a known set
    root = getattr(experiment, "root", None)
    places = (experiment.data.test, experiment.data.public, root and root.file)
    names += [place for place in places if place is not None]
    for name in names:
        path = expanded(name)
        digests[name] = _digest_of_files(sorted(path.rglob("*")) if path.is_dir() else [path])
    code = [experiment.model.name, *(model.name for model in experiment.model.others.values())]
    for module in re.findall(r"([\w.]+):\w", " ".join([*code, experiment.method])):
        digests[module] = _digest_of_files([Path(*module.split(".")).with_suffix(".py")])
    return digests


def _digest_of_files(paths: Sequence[Path]) -> str:
    files = [path for path in paths if path.is_file()]
    return _digest_of_text("".join(file_digest(str(f), f.stat().st_mtime_ns) for f in files))


def _digest_of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def run_status(folder: Path) -> str:
    """Return the status of a run; "" where it was never begun."""
    run = RunFolder(folder)
    return run.read_run().status if run.exists() else ""


@dataclass(frozen=True)
class TableProgress:
    """How many runs of a table are finished.

    Args:
        finished: runs that are finished.
        begun: runs that were begun and are not finished.
        possible: runs whose data are on this machine.
        runs: all runs.
        absent: data sets that are not on this machine.
    """

    finished: int
    begun: int
    possible: int
    runs: int
    absent: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[TableRun]) -> TableProgress:
        """Count runs; one that several cells share counts once."""
        unique = {run.folder: run for run in runs}
        statuses = [run_status(folder) for folder in unique]
        return cls(
            finished=statuses.count("finished"),
            begun=sum(status not in ("", "finished") for status in statuses),
            possible=sum(not run.absent for run in unique.values()),
            runs=len(unique),
            absent=tuple(dict.fromkeys(name for run in unique.values() for name in run.absent)),
        )

    def text(self, table: PaperTable) -> str:
        """Return the progress of a table as text."""
        if table.missing:
            return "cannot be run"
        if not self.runs:
            return "no smaller version"
        absent = ", ".join(self.absent)
        if not self.possible:
            return f"needs {absent}"
        rest = f" (needs {absent} for the rest)" if self.absent else ""
        if not self.finished and not self.begun:
            return f"not run{rest}"
        if self.finished < self.runs:
            return f"partly run: {self.finished} of {self.runs}{rest}"
        return "done"
