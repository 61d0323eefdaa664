"""Runs read from disk and grouped by method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedkeel.errors import RunError, counted
from fedkeel.records.folder import RunFolder
from fedkeel.records.histogram import Histogram
from fedkeel.records.pictures import Pictures
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import PARTITION_SETTINGS, RunRecord, to_json
from fedkeel.records.score import MetricInfo
from fedkeel.report.formatting import format_setting
from fedkeel.report.summary import MethodSummary, RunSummary, summarise


@dataclass(frozen=True)
class RunResults:
    """A run as the report uses it.

    Args:
        folder: name of its folder, without the path.
        record: what ran.
        rows: its round records.
        summary: its figures.
        comparison_key: digest of settings, version, model and data, without method and seed.
        path: of its folder as the user gave it, only the name of an absolute one, as pages are
            passed on; "" where it has none.
        settings: the settings that decide numbers, by dotted key; none of a run in memory.
        changes: what is not as the run has left it in its folder, one sentence each.
        histogram: of the partition, where it has a file of its own.
        pictures: counts of what its last model answers, where it has any.
    """

    folder: str
    record: RunRecord
    rows: tuple[RoundRecord, ...]
    summary: RunSummary
    comparison_key: str = ""
    path: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    histogram: Histogram | None = None
    pictures: Pictures | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the run completed all its rounds, or stopped early as its settings say."""
        return self.record.status == "finished"

    @property
    def has_stopped_early(self) -> bool:
        """Whether the run finished before its last round, as its settings say."""
        return self.is_finished and bool(self.record.message)

    @property
    def state(self) -> str:
        """What became of the run, in words.

        A process that was killed leaves the status "running", so the words do not claim that the
        run goes on.
        """
        done = f"{self.summary.rounds:,} of {counted(self.record.rounds, 'round')}"
        states = {
            "finished": f"ended early, {done}" if self.has_stopped_early else "finished",
            "running": f"not finished when this page was written, {done}",
            "interrupted": f"interrupted, {done}",
            "failed": f"failed after {done}",
        }
        return states.get(self.record.status, f"{self.record.status}, {done}")


@dataclass(frozen=True)
class MethodResults:
    """One method with its runs over seeds.

    Args:
        label: the method, and the settings that differ where it ran with several.
        index: place in the order of the methods, which decides its colour.
        runs: one for each seed.
    """

    label: str
    index: int
    runs: tuple[RunResults, ...]

    def __repr__(self) -> str:
        return f"<MethodResults of {self.label}: {counted(len(self.runs), 'run')}>"

    @property
    def record(self) -> RunRecord:
        """What ran, for the first seed."""
        return self.runs[0].record

    @property
    def summary(self) -> MethodSummary:
        """The figures over seeds."""
        return MethodSummary(
            self.label,
            tuple(run.summary for run in self.runs),
            tuple(run.record.seed for run in self.runs),
            unfinished=sum(not run.is_finished for run in self.runs),
            failed=sum(run.record.status == "failed" for run in self.runs),
        )


def load_runs(
    folders: Sequence[Path | RunFolder], target: float | None = None
) -> list[MethodResults]:
    """Read runs and group them by method, in the order given.

    Runs of one method with different settings, models, data or versions become groups of their
    own; a run given twice counts once.

    Args:
        folders: run folders.
        target: score for rounds to target, in place of the one in each run's settings.

    Raises:
        RunError: there is nothing to report, a folder holds no run, or the target is not in the
            range of its score.
    """
    if not folders:
        raise RunError("There is no run to report on.", do="give at least one run folder")
    runs: dict[str, RunResults] = {}
    for folder in folders:
        run = _read(folder if isinstance(folder, RunFolder) else RunFolder(folder), target)
        runs.setdefault(run.record.key, run)
    groups: dict[tuple[object, ...], list[RunResults]] = {}
    for run in _with_settings_of_others(list(runs.values())):
        groups.setdefault(_group_key(groups, run), []).append(run)
    members = list(groups.values())
    return [
        MethodResults(label, index, tuple(group))
        for index, (label, group) in enumerate(zip(_labels(members), members, strict=True))
    ]


def _with_settings_of_others(runs: Sequence[RunResults]) -> list[RunResults]:
    """Return runs; one whose settings were deleted is compared as one that its record is like."""
    if all(run.settings for run in runs):
        return list(runs)
    keys = {run.record.likeness(): run.comparison_key for run in reversed(runs) if run.settings}
    return [
        run
        if run.settings
        else replace(run, comparison_key=keys.get(run.record.likeness(), run.comparison_key))
        for run in runs
    ]


def main_settings(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run as text by name, without those that its seed decides."""
    values = to_json(record.partition)
    partition = {name: values.get(name) for name in PARTITION_SETTINGS}
    return {
        "data": format_setting(record.data.sources),
        "partition": format_setting(record.partition.kind),
        **{k.replace("_", " "): format_setting(v) for k, v in partition.items() if v},
        "model": format_setting(record.model.name),
        "rounds": format_setting(record.rounds),
        "participation": format_setting(record.participation),
        "local training": format_setting(record.local),
        "weights": format_setting(record.weights),
        "loss": format_setting(record.task.loss),
        "score": record.score.label,
        "metrics": ", ".join(metric.label for metric in record.task.metrics),
        **record.feature_texts(),
    }


def all_metrics(methods: Sequence[MethodResults]) -> list[MetricInfo]:
    """Return the metrics that any run has measured, the first method's score first."""
    score = methods[0].record.score
    metrics = {score.name: score}
    for method in methods:
        for metric in method.record.task.metrics:
            metrics.setdefault(metric.name, metric)
    return list(metrics.values())


def distinguishing_facts(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run, and the facts beside them that set runs apart."""
    return {
        **main_settings(record),
        "model parameters": format_setting(record.model.parameters or None),
        "version": format_setting(record.environment.fedkeel),
    }


def code_digest(record: RunRecord) -> str:
    """Return a short digest of the user's own code in a method, "" where it has none."""
    return " ".join(part.code[:6] for part in record.parts if part.code)


def _read(folder: RunFolder, target: float | None) -> RunResults:
    record, rows = folder.read_run(), tuple(folder.rows())
    if target is not None:
        _check_target(target, record)
    summary = summarise(
        rows,
        record.target if target is None else target,
        score=record.score,
        loss=record.task.loss,
        judges=record.judges,
        model_bytes=record.model.bytes or None,
    )
    name = folder.path.resolve().name
    path = name if folder.path.is_absolute() else folder.path.as_posix()
    changes = folder.changes(record, rows)
    histogram, pictures = None, None
    try:
        histogram = folder.histogram()
        pictures = folder.pictures()
    except RunError as error:  # the page does without its chart
        changes = [*changes, error.what]
    return RunResults(
        folder=name,
        record=record,
        rows=rows,
        summary=summary,
        comparison_key=folder.common(),
        path=path,
        settings=folder.deciding(),
        changes=tuple(changes),
        histogram=histogram,
        pictures=pictures,
    )


def _check_target(target: float, record: RunRecord) -> None:
    score = record.score
    if math.isfinite(target) and (not score.is_share or 0 <= target <= 1):
        return
    raise RunError(
        f"The target is not a value of {score.label}.",
        got=f"{target:g}",
        expected="a share in [0, 1], such as 0.85" if score.is_share else "a number",
    )


def _group_key(
    groups: Mapping[tuple[object, ...], Sequence[RunResults]], run: RunResults
) -> tuple[object, ...]:
    """Return the first group with the run's settings that does not hold its seed yet."""
    record = run.record
    key = (
        record.method,
        run.comparison_key,
        code_digest(record),
        *main_settings(record).values(),
    )
    repetition = 0
    while any(r.record.seed == record.seed for r in groups.get((*key, repetition), ())):
        repetition += 1
    return (*key, repetition)


def _labels(groups: Sequence[Sequence[RunResults]]) -> list[str]:
    """Return a unique label for each group."""
    labels = []
    for runs in groups:
        method = runs[0].record.method
        facts = _label_facts(runs[0].record)
        others = [_label_facts(g[0].record) for g in groups if g[0].record.method == method]
        differing = [n for n in facts if any(other.get(n) != facts[n] for other in others)]
        labels.append(" · ".join([method, *(f"{name} {facts[name]}" for name in differing)]))
    return [
        label if labels.count(label) == 1 else f"{label} · {runs[0].folder}"
        for label, runs in zip(labels, groups, strict=True)
    ]


def _label_facts(record: RunRecord) -> dict[str, str]:
    return {**distinguishing_facts(record), "code": code_digest(record)}
