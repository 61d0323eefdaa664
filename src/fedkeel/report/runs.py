"""Runs read from disk, put together by method, and checked for being comparable."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeel.errors import RunError, counted
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import RunRecord, to_json
from fedkeel.report.formatting import NOTHING, setting
from fedkeel.report.summary import Group, Summary, summarise

_PARTITION = ("clients", "alpha", "min_size", "classes_per_client", "sigma", "holdout")
"""What of a partition is a setting; the rest of its record is what came out of it, by seed."""

_TOLD = re.compile(
    r"method|seed|rounds|weights|data\.(?!augment).*|model\..*|cohort\..*|evaluation\.target"
    r"|local\.(?!drop_last|schedule\.(?!kind)).*|partition\.(?!seed|sizes).*|engine\.dtype"
)
"""Settings that other words already tell apart, or of which a run's data and model tell."""


@dataclass(frozen=True)
class Run:
    """A run as the report sees it.

    Args:
        folder: name of its folder, without the path.
        record: what ran.
        rows: one a round.
        summary: its figures.
        common: digest of settings, version, model and data, without method and seed.
        deciding: the settings that decide numbers, by dotted key; none of a run in memory.
        path: of its folder as it was given, the name alone of an absolute one; "" where it has
            none. Pages are passed on, and are not to tell where somebody keeps files.
    """

    folder: str
    record: RunRecord
    rows: tuple[RoundRecord, ...]
    summary: Summary
    common: str = ""
    path: str = ""
    deciding: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether all rounds were made that were to be made."""
        return self.record.status == "finished"

    @property
    def early(self) -> bool:
        """Whether it was finished before its last round, as its settings say."""
        return self.finished and bool(self.record.message)

    @property
    def state(self) -> str:
        """What became of the run, in words.

        A run that says it is running may have been killed: the words claim no more than is known.
        """
        done = f"{self.summary.rounds:,} of {counted(self.record.rounds, 'round')}"
        words = {
            "finished": f"ended early, {done}" if self.early else "finished",
            "running": f"not finished when this page was written, {done}",
            "interrupted": f"interrupted, {done}",
            "failed": f"failed after {done}",
        }
        return words.get(self.record.status, f"{self.record.status}, {done}")


@dataclass(frozen=True)
class Entry:
    """One method with its runs over seeds.

    Args:
        label: the method, with what sets it apart where a method comes with several settings.
        index: place in the order of the methods, which decides its colour.
        runs: one for each seed.
    """

    label: str
    index: int
    runs: tuple[Run, ...]

    @property
    def first(self) -> RunRecord:
        """What ran, for the first seed."""
        return self.runs[0].record

    @property
    def group(self) -> Group:
        """The figures over seeds."""
        return Group(
            self.label,
            tuple(run.summary for run in self.runs),
            tuple(run.record.seed for run in self.runs),
            sum(not run.finished for run in self.runs),
            sum(run.record.status == "failed" for run in self.runs),
        )


def load(runs: Sequence[Path | RunFolder], target: float | None = None) -> list[Entry]:
    """Read runs and put them together: a method's seeds into one entry, in the order given.

    Runs of one method with different settings, models, data or versions become entries of their
    own; a run given twice counts once.

    Args:
        runs: run folders.
        target: accuracy for rounds to target, in place of what each run asked for.

    Raises:
        RunError: there is nothing to report, or a folder holds no run.
    """
    if not runs:
        raise RunError("There is no run to report on.", do="give at least one run folder")
    groups: dict[tuple[Any, ...], list[Run]] = {}
    seen: set[str] = set()
    for given in runs:
        run = _read(given, target)
        if run.record.key in seen:
            continue
        seen.add(run.record.key)
        groups.setdefault(_place(groups, run), []).append(run)
    members = list(groups.values())
    labels = _labels(members)
    return [Entry(labels[i], i, tuple(runs)) for i, runs in enumerate(members)]


def settings(record: RunRecord) -> dict[str, str]:
    """Return what a run was made with, in words, without what its seed decides."""
    divided = to_json(record.partition)
    partition = {name: divided.get(name) for name in _PARTITION}
    return {
        "data": setting(record.data.sources),
        "partition": setting(record.partition.kind),
        **{k.replace("_", " "): setting(v) for k, v in partition.items() if v},
        "model": setting(record.model.name),
        "rounds": setting(record.rounds),
        "participation": setting(record.participation),
        "local training": setting(record.local),
        "weights": setting(record.weights),
    }


def _told_apart(record: RunRecord) -> dict[str, str]:
    """Return what tells runs apart, in words: settings, and what settings do not tell."""
    return {
        **settings(record),
        "model parameters": setting(record.model.parameters or None),
        "version": setting(record.environment.fedkeel),
    }


def differences(entries: Sequence[Entry]) -> list[str]:
    """Return what keeps a comparison from being like for like, one sentence each."""
    found: list[str] = []
    if len(entries) < 2:
        return found
    every = [_told_apart(entry.first) for entry in entries]
    for name in dict.fromkeys(name for one in every for name in one):
        values = list(dict.fromkeys(one.get(name, NOTHING) for one in every))
        if len(values) > 1:
            verb = "differ" if name.endswith(("parameters", "weights")) else "differs"
            found.append(f"{name.capitalize()} {verb}: {_shown(values)}.")
    own = [entry.runs[0].deciding for entry in entries]
    for key in dict.fromkeys(key for one in own for key in one) if all(own) else ():
        values = list(dict.fromkeys(setting(one.get(key)) for one in own))
        if len(values) > 1 and not _TOLD.fullmatch(key):
            found.append(f"{key} differs: {_shown(values)}.")
    seeds = {e.label: ", ".join(str(s) for s in sorted(e.group.seeds)) for e in entries}
    if len(set(seeds.values())) > 1:
        told = [f"{label} ran {own}" for label, own in seeds.items()]
        found.append(f"Seeds differ: {_shown(told)}.")
    prints: dict[int, set[str]] = {}
    for run in (run for entry in entries for run in entry.runs):
        prints.setdefault(run.record.seed, set()).add(run.record.data.fingerprint)
    if "Data" not in "".join(found) and any(len(one) > 1 for one in prints.values()):
        found.append("The data are not the same: fingerprints differ for one seed.")
    found += _rewritten(entries)
    targets = {entry.first.target for entry in entries}
    if len(targets) > 1:
        found.append(f"The target differs: {_shown([setting(one) for one in targets])}.")
    return found


def _rewritten(entries: Sequence[Entry]) -> list[str]:
    """Return which methods of one's own were made by more than one version of their code."""
    dates: dict[str, dict[str, str]] = {}
    for entry in entries:
        date = entry.first.environment.date[:16].replace("T", " ")
        dates.setdefault(entry.first.method, {}).setdefault(_code(entry.first), date)
    return [
        f"The code of {method} was changed between runs: "
        + ", ".join(f"{code} ran {date}" for code, date in found.items())
        + "."
        for method, found in dates.items()
        if len(found) > 1
    ]


def _code(record: RunRecord) -> str:
    """Return a short digest of the code of a method's own parts, "" where it has none."""
    return " ".join(part.code[:6] for part in record.parts if part.code)


def _read(given: Path | RunFolder, target: float | None) -> Run:
    folder = given if isinstance(given, RunFolder) else RunFolder(given)
    record, rows = folder.read_run(), tuple(folder.rows())
    figures = summarise(
        rows, record.target if target is None else target, model_bytes=record.model.bytes or None
    )
    name = folder.path.resolve().name
    path = name if folder.path.is_absolute() else folder.path.as_posix()
    return Run(name, record, rows, figures, folder.common(), path, folder.deciding())


def _place(groups: dict[tuple[Any, ...], list[Run]], run: Run) -> tuple[Any, ...]:
    """Return the first group of the run's settings that does not hold its seed yet."""
    key = (run.record.method, run.common, _code(run.record), *settings(run.record).values())
    again = 0
    while any(one.record.seed == run.record.seed for one in groups.get((*key, again), ())):
        again += 1
    return (*key, again)


def _labels(members: Sequence[Sequence[Run]]) -> list[str]:
    """Return a label for each group that no other group has."""
    labels = []
    for runs in members:
        record = runs[0].record
        same = [other[0].record for other in members if other[0].record.method == record.method]
        every = [{**_told_apart(one), "code": _code(one)} for one in (record, *same)]
        own = every[0]
        apart = [name for name in own if len({one.get(name) for one in every}) > 1]
        parts = [record.method] + [f"{name} {own[name]}" for name in apart]
        labels.append(" · ".join(parts))
    return [
        label if labels.count(label) == 1 else f"{label} · {runs[0].folder}"
        for label, runs in zip(labels, members, strict=True)
    ]


def _shown(values: Sequence[str], limit: int = 4) -> str:
    more = f"; and {len(values) - limit} others" if len(values) > limit else ""
    return "; ".join(values[:limit]) + more
