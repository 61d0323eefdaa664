"""What the page says besides tables and figures: titles, settings, diagnostics."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeel.errors import counted
from fedkeel.records.run_record import ModelRecord, RunRecord, to_json
from fedkeel.report.formatting import (
    NOTHING,
    duration,
    megabytes,
    number,
    percent,
    setting,
    spread,
    without_folders,
)
from fedkeel.report.runs import Entry, Run, settings
from fedkeel.report.sparklines import sparkline
from fedkeel.report.summary import Stat, finite, rounds_to_share
from fedkeel.report.tables import Row

Facts = list[tuple[str, str]]
"""Names and values, in the order they are shown."""

SHARES = (0.5, 0.9, 1.0)
"""Shares of a reference's best accuracy, as FedReg's R_a takes them."""

_HIDDEN = frozenset({"label_names", "histogram", "sizes", "names"})


@dataclass(frozen=True)
class Note:
    """A diagnostic of a method.

    Args:
        name: ``part.name``.
        mean: its mean over rounds and seeds, as text.
        last: its mean over seeds in the last round that has it, as text.
        lines: points of its sparkline, one polyline each.
        told: the same in words.
    """

    name: str
    mean: str
    last: str
    lines: list[str]
    told: str


@dataclass(frozen=True)
class Tile:
    """A figure that is shown large: its name, value, and what qualifies it."""

    name: str
    value: str
    about: str


def title(entries: Sequence[Entry]) -> str:
    """Return a title for the page."""
    first = entries[0].first
    if len(entries) == 1:
        runs = entries[0].runs
        return runs[0].folder if len(runs) == 1 else f"{entries[0].label} on {_sources(entries)}"
    return f"{len(entries)} methods on {_sources(entries) or first.name}"


def facts(entries: Sequence[Entry]) -> list[str]:
    """Return the experiment in a few words, for the line under the title."""
    every = [settings(entry.first) for entry in entries]
    common = {k: v for k, v in every[0].items() if all(one.get(k) == v for one in every)}
    first = entries[0].first
    told = [
        f"{first.data.train:,} training examples" if first.data.train else "",
        _partition(common),
        _model(first.model) if "model" in common else "",
        counted(first.rounds, "round") if "rounds" in common else "",
        common.get("participation", ""),
    ]
    return [one for one in told if one and one != NOTHING]


def tiles(row: Row, entry: Entry) -> list[Tile]:
    """Return the figures of a method that is reported alone."""
    group = entry.group
    best, target = group.summaries[0].best_round, row["target"]
    seeds = len(group.summaries)
    told = [
        Tile(
            "Best accuracy",
            f"{spread(group.stat('best'), scale=100, digits=1)} %",
            f"round {best}" if seeds == 1 and best is not None else "mean over seeds",
        ),
        Tile(
            "At the end",
            f"{spread(group.stat('last_mean'), scale=100, digits=1)} %",
            "mean of the last ten evaluations",
        ),
    ]
    if target is not None:
        reached = group.stat("rounds_to_target")
        about = "never" if reached is None else f"of {row['rounds']:,}"
        if 0 < row["reached"] < row["seeds"]:
            about += f"; {row['reached']} of {row['seeds']} seeds"
        value = NOTHING if reached is None else spread(reached, digits=0)
        told.append(Tile(f"Rounds to {100 * target:g} %", value, about))
    times = f"{number(row['traffic'])} × the model for each client and round"
    told += [
        Tile("Traffic", megabytes(row["sent"]), times if row["traffic"] is not None else "in all"),
        Tile(
            "Training",
            duration(row["seconds_per_client"]),
            f"for each client and round; {duration(row['seconds'])} in all",
        ),
    ]
    return told


def common_settings(entries: Sequence[Entry]) -> Facts:
    """Return what all runs share."""
    first, every = entries[0].first, [settings(entry.first) for entry in entries]
    told = [(k, v) for k, v in every[0].items() if all(one.get(k) == v for one in every)]
    if first.target is not None:
        told.append(("target accuracy", f"{percent(first.target)} %"))
    return [(name, value) for name, value in told if value != NOTHING]


def data_facts(entries: Sequence[Entry]) -> Facts:
    """Return the data and the model."""
    first = entries[0].first
    return _flat(to_json(first.data)) + [(f"model {k}", v) for k, v in _flat(to_json(first.model))]


def method_facts(entry: Entry) -> Facts:
    """Return a method's parts with their roles, its weights, and what was estimated for it."""
    record = entry.first
    parts = [(part.name, ", ".join(part.roles) or NOTHING) for part in record.parts if part.name]
    return [*parts, ("clients are weighted by", setting(record.weights)), *_estimate(record)]


def _estimate(record: RunRecord) -> Facts:
    """Return what each client sends and keeps, as it was reckoned before the run."""
    told = []
    needs = record.estimate
    for parts, words in (
        (needs.down, "sent to a client each round"),
        (needs.up, "sent by a client"),
    ):
        if parts:
            sizes = ", ".join(f"{name} {megabytes(size)}" for name, size in parts.items())
            told.append((words, sizes))
    for size, words in (
        (needs.client_state, "kept for each client"),
        (needs.table, "kept by the server for each client"),
        (needs.server_state, "kept by the server"),
    ):
        if size:
            told.append((words, megabytes(size)))
    return told


def environment(entries: Sequence[Entry]) -> Facts:
    """Return versions, machine and engine; several values where the runs differ."""
    found: dict[str, list[str]] = {}
    for run in (run for entry in entries for run in entry.runs):
        told = _flat(to_json(run.record.environment)) + [
            (f"engine {name}", value) for name, value in _flat(to_json(run.record.engine))
        ]
        for name, value in told:
            if value not in found.setdefault(name, []):
                found[name].append(value)
    return [
        (name, "; ".join(values[:3]) + (f"; {len(values) - 3} others" if len(values) > 3 else ""))
        for name, values in found.items()
    ]


def notes(entry: Entry) -> list[Note]:
    """Return a method's diagnostics: mean, last value and course over rounds."""
    rounds = sorted({row.round for run in entry.runs for row in run.rows if row.round > 0})
    names = sorted({name for run in entry.runs for row in run.rows for name in row.diagnostics})
    found = []
    for name in names:
        values: dict[int, list[float]] = {}
        for row in (row for run in entry.runs for row in run.rows):
            if (value := finite(row.diagnostics.get(name))) is not None:
                values.setdefault(row.round, []).append(value)
        if not values:
            continue
        course = [statistics.fmean(values[r]) if r in values else None for r in rounds]
        every = [value for one in values.values() for value in one]
        last = statistics.fmean(values[max(values)])
        told = f"{name}: from {number(min(every))} to {number(max(every))}"
        mean = number(statistics.fmean(every))
        found.append(Note(name, mean, number(last), sparkline(course), told))
    return found


def lost(entry: Entry) -> list[str]:
    """Return sentences on clients that did not report or whose update was left out."""
    told = []
    dropped: Counter[int] = Counter()
    excluded: Counter[int] = Counter()
    for row in (row for run in entry.runs for row in run.rows):
        dropped.update(row.dropped)
        excluded.update(row.excluded)
    trained = sum(run.summary.selections for run in entry.runs)
    for what, counter in (
        ("did not report", dropped),
        ("sent an update that was not finite, which was left out", excluded),
    ):
        if total := sum(counter.values()):
            share = percent(total / trained)
            often = ", ".join(f"{client} ({n} ×)" for client, n in counter.most_common(5))
            told.append(
                f"{total:,} of {trained:,} times ({share} %) a selected client {what}; "
                f"most often: {often}."
            )
    return told


def repeat(entries: Sequence[Entry]) -> list[str]:
    """Return the commands that make these numbers again, in a folder of their own."""
    runs = [run for entry in entries for run in entry.runs]
    if len(runs) == 1:
        return [f"fedkeel run {_config(runs[0])} --out runs/again"]
    methods = list(dict.fromkeys(entry.first.method for entry in entries))
    first = min(entries[0].runs, key=lambda run: run.record.seed)
    start, seeds = first.record.seed, len(entries[0].runs)
    wanted = list(range(start, start + seeds))  # as compare counts them, from that of its settings
    alike = len({run.common for run in runs}) == 1
    if (
        alike
        and len(methods) == len(entries)
        and all(sorted(entry.group.seeds) == wanted for entry in entries)
    ):
        return [
            f"fedkeel compare {_config(first)} --methods {_quoted(', '.join(methods))} "
            f"--seeds {seeds} --out runs/again"
        ]
    return [
        f"fedkeel run {_config(run)} --out {_quoted(f'runs/again/{run.folder}')}"
        for run in runs[:60]
    ]


def _config(run: Run) -> str:
    return _quoted(f"{run.path}/config.toml")


def runs_table(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Return one row for each run: folder, seed, state, time, date, key."""
    return [
        {
            "method": entry.label,
            "folder": run.folder,
            "seed": str(run.record.seed),
            "state": run.state,
            "best": f"{percent(run.summary.best, 2)}",
            "seconds": duration(run.summary.seconds),
            "key": run.record.key[:12],
        }
        for entry in entries
        for run in entry.runs
    ]


def steadiness(entries: Sequence[Entry]) -> tuple[str, list[dict[str, Any]]]:
    """Return how much accuracy moves between evaluations, and rounds to shares of a reference.

    The reference is FedAvg where it is there, else the first method: its best, mean over seeds.

    Returns:
        The reference's label, and one row for each method.
    """
    plain = (e for e in entries if e.first.method == "fedavg")
    reference = next(plain, entries[0])
    best = reference.group.stat("best")
    if best is None:
        return reference.label, []
    rows = []
    for entry in entries:
        group = entry.group
        reached = []
        for share in SHARES:
            found = [rounds_to_share(run.rows, share, best.mean) for run in entry.runs]
            known = [r for r in found if r is not None]
            told = spread(Stat.of(known), digits=0)
            reached.append(f"{told} ({len(known)}/{len(found)})")
        steps = [spread(group.fluctuation(figure), digits=2) for figure in ("mean", "std", "min")]
        rows.append({"method": entry.label, "index": entry.index, "cells": steps + reached})
    return reference.label, rows


def sources(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the last accuracy on each source of the test data, by method."""
    names: dict[str, None] = {}
    last: list[dict[str, list[float]]] = []
    for entry in entries:
        found: dict[str, list[float]] = {}
        for run in entry.runs:
            for name, top1 in _last_sources(run).items():
                names[name] = None
                if top1 is not None:
                    found.setdefault(name, []).append(top1)
        last.append(found)
    if not names:
        return []
    return [
        {
            "source": without_folders(name),
            "cells": [_mean_percent(found.get(name, [])) for found in last],
        }
        for name in names
    ]


def _last_sources(run: Run) -> dict[str, float | None]:
    """Return the last accuracy of each source, None where no example of it was seen."""
    row = next((row for row in reversed(run.rows) if row.sources), None)
    known = row.sources.items() if row else ()
    return {name: finite(v.top1) if v.examples else None for name, v in known}


def _mean_percent(values: Sequence[float]) -> str:
    return spread(Stat.of(values), scale=100, digits=2)


def _sources(entries: Sequence[Entry]) -> str:
    return settings(entries[0].first).get("data", "").replace(NOTHING, "")


def _partition(common: Mapping[str, str]) -> str:
    kind = common.get("partition", "")
    alpha = f" (alpha {common['alpha']})" if common.get("alpha", NOTHING) != NOTHING else ""
    clients = common.get("clients")
    return f"{clients} clients, {kind}{alpha}" if clients else f"{kind}{alpha}"


def _model(model: ModelRecord) -> str:
    size = f" ({model.parameters:,} parameters)" if model.parameters else ""
    return f"{setting(model.name)}{size}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Facts:
    told: Facts = []
    for name, value in values.items():
        if name in _HIDDEN or value in (None, "", [], {}):
            continue
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            told += _flat(value, f"{label} ")
        else:
            told.append((label, setting(value)))
    return told


def _quoted(text: str) -> str:
    return shlex.quote(text)
