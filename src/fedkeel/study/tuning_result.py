"""The result of a search: its trials, the best settings of each method, and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.base.named_files import read_regular
from fedkeel.config import Metric, Space, Value
from fedkeel.config import Run as RunSettings
from fedkeel.errors import RunError, counted
from fedkeel.records.files import parse_json, write_text
from fedkeel.records.folder import RunFolder
from fedkeel.records.score import ACCURACY, MetricInfo
from fedkeel.records.statistics import Stat
from fedkeel.report.alerts import change_told
from fedkeel.report.text_table import TextTable
from fedkeel.study.compare import file_name
from fedkeel.study.search_space import Axis, End, Point, expression_at

SUMMARY = "tune.json"
"""File in a search's folder with the chosen settings and every trial."""

BEST = "best"
"""Folder in it with an experiment file for each method."""


@dataclass(frozen=True)
class Trial:
    """One point of one method's search, with its scores.

    Args:
        method: the method as given.
        point: value by axis.
        values: score of each seed's run; None for a run that could not go on.
        runs: folder of each seed's run, within that of the search.
        error: why a run could not go on; "" where all could.
    """

    method: str
    point: Point
    values: tuple[float | None, ...]
    runs: tuple[str, ...]
    error: str = ""

    @property
    def stat(self) -> Stat | None:
        """Statistics of the score over seeds; None where a run could not go on."""
        return None if None in self.values else Stat.of(self.values)

    @property
    def value(self) -> float | None:
        """Mean score over the seeds; None where a run could not go on."""
        return None if self.stat is None else self.stat.mean


@dataclass(frozen=True)
class TunedMethod:
    """The best settings of a method.

    Args:
        method: the expression as given.
        chosen: settings by dotted key, and ``method``, the expression with its hyper-parameters;
            empty where every trial failed.
        value: mean score over the seeds; None where every trial failed.
        spread: sample standard deviation over the seeds; None for one seed.
        seeds: runs of each trial.
        trials: number of points that were tried.
        offered: number of points in the method's search space; None where it is infinite.
        failed: number of trials that could not go on, most often because training diverged.
        edge: the axes whose chosen value lies at an end of the choices.
        on: the split that the score is measured on: ``validation`` or ``test``.
        metric: how the scores of a run's rounds make one.
        score: the metric by which models are judged.
    """

    method: str
    chosen: dict[str, Value]
    value: float | None
    spread: float | None
    seeds: int
    trials: int
    offered: int | None
    failed: int
    edge: dict[str, End]
    on: str
    metric: Metric
    score: MetricInfo = ACCURACY


@dataclass(frozen=True, repr=False)
class TuningResult:
    """The result of a search.

    Args:
        rows: one for each method: those of earlier calls of the same search, then those of this
            call in the order given.
        trials: all trials, in the order in which the samplers asked for them.
        settings: the run's settings with the chosen values, by the method as given; without
            methods whose trials all failed.
        folder: where the runs are.
        validation_examples: held-out examples that trials were scored on; None for the test set.
        complete: whether every trial was made; false after an interrupt.
        replaced: methods of another search in this folder, whose files this search replaces.
    """

    rows: list[TunedMethod]
    trials: list[Trial]
    settings: dict[str, RunSettings]
    folder: Path
    validation_examples: int | None = None
    complete: bool = True
    replaced: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What is not as the finished runs of the trials have left it, one sentence each."""
        folders = dict.fromkeys(name for trial in self.trials for name in trial.runs)
        notes = []
        for folder in (RunFolder(self.folder / name) for name in folders):
            try:
                changes = folder.changes(folder.read_run(), folder.rows())
            except RunError as error:  # of an earlier call: it is gone, or damaged
                notes.append(error.what)
            else:
                notes += [f"{folder.path}: {change_told(change)}" for change in changes]
        return notes

    def __str__(self) -> str:
        return "\n".join([self._table().markdown(), *self._told()])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        table = self._table()
        return replace(table, notes=[*table.notes, *self._told()]).html()

    def _table(self) -> TextTable:
        from fedkeel.study.tuning_table import tuning_table  # it imports this module

        return tuning_table(self.rows, self.validation_examples)

    def _told(self) -> list[str]:
        """Return where the trials and the experiment files are, and whether trials are missing."""
        count = counted(len(self.trials), "trial")
        if not self.complete:
            return [f"Interrupted after {count}; the same call goes on in {self.folder}."]
        return [
            f"{count} in {self.folder}; experiment files with the best settings in its {BEST}/."
        ]


@dataclass(frozen=True)
class EarlierSearch:
    """What an earlier call left in the folder.

    Args:
        rows: other methods' rows of the same search.
        trials: their trials.
        replaced: methods of a different search.
    """

    rows: tuple[TunedMethod, ...] = ()
    trials: tuple[Trial, ...] = ()
    replaced: tuple[str, ...] = ()


def choose_best(
    method: str,
    axes: Sequence[Axis],
    trials: Sequence[Trial],
    size: int | None,
    space: Space,
    score: MetricInfo,
) -> TunedMethod:
    """Choose a method's trial with the best score, the first one of several equals."""
    scored = [(trial, trial.stat) for trial in trials if trial.stat is not None]
    best, stat = max(scored, key=lambda pair: score.sign * pair[1].mean, default=(None, None))
    chosen: dict[str, Value] = {}
    edge: dict[str, End] = {}
    if best is not None:
        for axis in axes:
            value = best.point[axis.name]
            if axis.term is None:
                chosen[axis.key] = value
            if (end := axis.end_at(value)) is not None:
                edge[axis.name] = end
        chosen["method"] = expression_at(best.point, axes, method)
    return TunedMethod(
        method=method,
        chosen=chosen,
        value=None if stat is None else stat.mean,
        spread=None if stat is None else stat.std,
        seeds=space.seeds,
        trials=len(trials),
        offered=size,
        failed=len(trials) - len(scored),
        edge=edge,
        on=space.split,
        metric=space.metric,
        score=score,
    )


def search_digest(settings: RunSettings, space: Space, run: RunFolder) -> str:
    """Return a digest of what all methods of one search share; a run's record adds the data."""
    ignored = {"name", "method", "compare", "tune", "flower", "engine", "track"}
    engine = {"dtype": settings.engine.dtype, "precision": settings.engine.precision}
    facts = [settings.model_dump(mode="json", exclude=ignored), engine]
    facts += [space.model_dump(mode="json"), run.read_run().content()]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_earlier(folder: Path, digest: str, methods: Collection[str]) -> EarlierSearch:
    """Return what earlier calls of the same search found for other methods.

    The methods of this call are left out. A summary that is damaged or was written by an earlier
    version counts as none.
    """
    try:
        summary = parse_json(read_regular(folder / SUMMARY))
        rows = [_row(row) for row in summary["rows"] if row["method"] not in methods]
        if summary["search"] != digest or not summary["complete"]:
            return EarlierSearch(replaced=tuple(row.method for row in rows))
        trials = [_trial(trial) for trial in summary["trials"] if trial["method"] not in methods]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return EarlierSearch()
    return EarlierSearch(tuple(rows), tuple(trials))


def _row(values: dict[str, Any]) -> TunedMethod:
    """Return the row of an entry in the summary."""
    return TunedMethod(**{**values, "score": MetricInfo(**values["score"])})


def _trial(values: dict[str, Any]) -> Trial:
    """Return the trial of an entry in the summary."""
    values = {field.name: values[field.name] for field in fields(Trial)}
    return Trial(**{**values, "values": tuple(values["values"]), "runs": tuple(values["runs"])})


def write_result(result: TuningResult, settings: RunSettings, sampler: str, digest: str) -> None:
    """Write the summary, and each method's experiment file where the search is complete."""
    summary = {
        "name": settings.name,
        "complete": result.complete,
        "search": digest,
        "sampler": sampler,
        "held": result.validation_examples,
        "rows": [asdict(row) for row in result.rows],
        "trials": [{**asdict(trial), "value": trial.value} for trial in result.trials],
    }
    write_text(result.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    if not result.complete:
        return
    (result.folder / BEST).mkdir(exist_ok=True)
    files = experiment_files(result)
    for row, file in zip(result.rows, files, strict=True):
        if row.value is not None:
            write_text(file, _experiment(row, result.settings[row.method], file.stem))
    current = {file for row, file in zip(result.rows, files, strict=True) if row.value is not None}
    for file in (result.folder / BEST).glob("*.toml"):
        if file not in current:  # of another search, or of a method whose trials now all failed
            file.unlink()


def experiment_files(result: TuningResult) -> list[Path]:
    """Return the path of each row's experiment file, which exists where a value was chosen."""
    names: list[str] = []
    for row in result.rows:
        name = file_name(row.method)
        same = [other for other in names if other == name or other.startswith(f"{name}--")]
        names.append(f"{name}--{len(same) + 1}" if same else name)
    return [result.folder / BEST / f"{name}.toml" for name in names]


def _experiment(row: TunedMethod, settings: RunSettings, name: str) -> str:
    """Return an experiment file that runs only the tuned method."""
    update: dict[str, Any] = {"name": f"{settings.name}-{name}"}
    if isinstance(settings, config.Experiment):
        methods = {"methods": (settings.method,)}
        update["compare"] = settings.compare.model_copy(update=methods)
    split = "a validation part of the training data" if row.on == "validation" else "the test set"
    seeds = f", mean of {row.seeds} seeds" if row.seeds > 1 else ""
    head = (
        f"# {row.method}: chosen from {row.trials} trials by {row.metric} {row.score.label} on "
        f"{split}:\n"
        f"# {row.score.format(row.value or 0.0, 2)}{seeds}.\n"
    )
    return head + config.to_toml(settings.model_copy(update=update))
