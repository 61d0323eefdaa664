"""What a search came to: trials, what was chosen, and the files that say so."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.config import Metric, Space, Value
from fedkeel.config import Run as RunSettings
from fedkeel.records.folder import RunFolder, write_text
from fedkeel.study.compare import in_words
from fedkeel.study.search_space import Axis, End, Point, expression

SUMMARY = "tune.json"
"""File in a search's folder: what was chosen, and every trial."""

BEST = "best"
"""Folder in it: an experiment file for each method."""


@dataclass(frozen=True)
class Trial:
    """One point of one method's space, and what it came to.

    Args:
        method: the method as given.
        point: value by axis.
        values: accuracy in [0, 1] of each seed's run, None for one that could not go on.
        runs: folder of each seed's run, within that of the search.
        error: why a run could not go on, "" where all did.
    """

    method: str
    point: Point
    values: tuple[float | None, ...]
    runs: tuple[str, ...]
    error: str = ""

    @property
    def value(self) -> float | None:
        """Mean accuracy over the seeds; None where a run could not go on."""
        known = [value for value in self.values if value is not None]
        return statistics.fmean(known) if len(known) == len(self.values) else None


@dataclass(frozen=True)
class TunedRow:
    """What was chosen for a method.

    Args:
        method: the expression as given.
        chosen: settings by dotted key, and ``method``, the expression with its hyper-parameters
            set; empty where every trial failed.
        value: mean accuracy over the seeds, in [0, 1]; None where every trial failed.
        spread: sample standard deviation over the seeds; None for one seed.
        seeds: runs of each trial.
        trials: how many points were tried.
        offered: how many there are in the method's space; None where they are without number.
        failed: how many of the trials could not go on, most often because training diverged.
        edge: the axes whose chosen value lies at an end of what was tried.
        on: where accuracy was measured: ``validation`` or ``test``.
        metric: what counted of a run.
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


@dataclass(frozen=True)
class Tuned:
    """What a search came to.

    Args:
        rows: one for each method, in the order given, after those of earlier calls of the same
            search.
        trials: all of them, in the order in which they were asked for.
        settings: for each method that has any, by its expression, the run's settings with what was
            chosen.
        folder: where the runs are.
        held: examples that were chosen by; None for the test set.
        complete: whether every trial was made; false after an interrupt.
        replaced: methods that another search in this folder had chosen for, and this one has not.
    """

    rows: list[TunedRow]
    trials: list[Trial]
    settings: dict[str, RunSettings]
    folder: Path
    held: int | None = None
    complete: bool = True
    replaced: tuple[str, ...] = ()


def chosen(
    method: str,
    searched: Sequence[Axis],
    trials: Sequence[Trial],
    offered: int | None,
    space: Space,
) -> TunedRow:
    """Choose among a method's trials: the highest value, the first where several have it.

    Args:
        method: the expression as given.
        searched: its axes.
        trials: what was tried.
        offered: how many points there are; None where they are without number.
        space: what is chosen by.
    """
    made = [trial for trial in trials if trial.value is not None]
    best = max(made, key=lambda trial: trial.value or 0.0, default=None)
    values = [value for value in best.values if value is not None] if best else []
    point: Point = best.point if best else {}
    edges = {axis.name: axis.end(point[axis.name]) for axis in searched if point}
    own = {axis.key: point[axis.name] for axis in searched if point and axis.term is None}
    return TunedRow(
        method=method,
        chosen={**own, "method": expression(method, searched, point)} if best else {},
        value=best.value if best else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        seeds=space.seeds,
        trials=len(trials),
        offered=offered,
        failed=len(trials) - len(made),
        edge={name: end for name, end in edges.items() if end is not None},
        on=space.on,
        metric=space.metric,
    )


def searched(settings: RunSettings, space: Space, run: RunFolder) -> str:
    """Return a digest of what methods that are searched for alike have in common.

    Args:
        settings: what is not searched.
        space: what is, and by how many trials.
        run: one of the search, which says what model and data it has.
    """
    apart = {"name", "method", "compare", "tune", "flower", "engine"}
    engine = {"dtype": settings.engine.dtype, "precision": settings.engine.precision}
    facts = [settings.model_dump(mode="json", exclude=apart), engine, space.model_dump(mode="json")]
    text = json.dumps([*facts, run.read_run().content()], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def earlier(
    folder: Path, search: str, but: Collection[str]
) -> tuple[list[TunedRow], list[Trial], list[str]]:
    """Return what earlier calls of the same search came to for other methods.

    Args:
        folder: of the search.
        search: its digest, see `searched`.
        but: methods that are left out: this call has them.

    Returns:
        Rows and trials; and methods of another search, whose place this one takes.
    """
    try:
        found = json.loads((folder / SUMMARY).read_text("utf-8"))
        rows = [TunedRow(**row) for row in found["rows"] if row["method"] not in but]
        if found["search"] != search or not found["complete"]:
            return [], [], [row.method for row in rows]
        known = {field.name for field in fields(Trial)}
        kept = [{k: v for k, v in trial.items() if k in known} for trial in found["trials"]]
        trials = [
            Trial(**{**one, **{k: tuple(one[k]) for k in ("values", "runs")}}) for one in kept
        ]
    except (OSError, ValueError, KeyError, TypeError):  # none, or of an earlier version
        return [], [], []
    return rows, [trial for trial in trials if trial.method not in but], []


def write(tuned: Tuned, settings: RunSettings, sampler: str, search: str) -> None:
    """Write the summary, and where the search is complete, each method's experiment file.

    Args:
        tuned: what the search came to.
        settings: what was not searched.
        sampler: what said which points to try.
        search: digest of what the methods have in common, see `searched`.
    """
    summary: dict[str, Any] = {
        "name": settings.name,
        "complete": tuned.complete,
        "search": search,
        "sampler": sampler,
        "held": tuned.held,
        "rows": [asdict(row) for row in tuned.rows],
        "trials": [{**asdict(trial), "value": trial.value} for trial in tuned.trials],
    }
    write_text(tuned.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    if not tuned.complete:
        return
    (tuned.folder / BEST).mkdir(exist_ok=True)
    own = files(tuned)
    for file in (tuned.folder / BEST).glob("*.toml"):
        if file not in own:  # of another search, whose runs are still there
            file.unlink()
    for row, file in zip(tuned.rows, own, strict=True):
        if row.value is not None:
            write_text(file, _experiment(row, tuned.settings[row.method], file.stem))
        else:
            file.unlink(missing_ok=True)  # of an earlier search


def files(tuned: Tuned) -> list[Path]:
    """Return the experiment file of each row, which is there where anything was chosen."""
    names: list[str] = []
    for row in tuned.rows:
        words = in_words(row.method)
        same = [name for name in names if name == words or name.startswith(f"{words}--")]
        names.append(f"{words}--{len(same) + 1}" if same else words)
    return [tuned.folder / BEST / f"{name}.toml" for name in names]


def _experiment(row: TunedRow, settings: RunSettings, name: str) -> str:
    """Return the experiment of a row: of its own name, comparing this method alone."""
    update: dict[str, Any] = {"name": f"{settings.name}-{name}"}
    if isinstance(settings, config.Experiment):
        only = {"methods": (settings.method,)}
        update["compare"] = settings.compare.model_copy(update=only)
    where = "a validation part of the training data" if row.on == "validation" else "the test set"
    seeds = f", mean of {row.seeds} seeds" if row.seeds > 1 else ""
    head = (
        f"# {row.method}: chosen from {row.trials} trials by {row.metric} accuracy on {where}:\n"
        f"# {100 * (row.value or 0.0):.2f} %{seeds}.\n"
    )
    return head + config.to_toml(settings.model_copy(update=update))
