"""What the page shows besides results and charts: settings, diagnostics, runs, commands."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeel.base.feature import declarations
from fedkeel.errors import counted, enumeration
from fedkeel.records.run_record import RunRecord, to_json
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import Stat, finite_or_none
from fedkeel.report.formatting import (
    MISSING,
    Fact,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_score,
    format_setting,
    format_stat,
    format_target,
    join_values,
    without_folders,
)
from fedkeel.report.runs import MethodResults, RunResults, all_metrics, main_settings
from fedkeel.report.sparklines import sparkline
from fedkeel.report.summary import Quantity, rounds_to, shared_score

SHARES = (0.5, 0.9, 1.0)
"""Shares a of a reference's best score A for FedReg's R_a: rounds until the score is a A."""

_MAX_COMMANDS = 60
_HIDDEN = frozenset({"label_names", "histogram", "sizes", "names"})


@dataclass(frozen=True)
class Tile:
    """A figure that is shown large: its name, its value, and what it refers to."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class Diagnostic:
    """A diagnostic of a method.

    Args:
        name: ``part.name``.
        stat: statistics over rounds and seeds.
        last: mean over seeds in the last round that has it.
        lines: points of its sparkline, one polyline each.
    """

    name: str
    stat: Stat
    last: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class SourceRow:
    """The last score on one source of the test data, for each method."""

    source: str
    scores: tuple[Stat | None, ...]


@dataclass(frozen=True)
class MetricColumn:
    """The value of a metric at the last evaluation, for each method."""

    metric: MetricInfo
    stats: tuple[Stat | None, ...]


def page_title(methods: Sequence[MethodResults]) -> str:
    """Return a title for the page."""
    data = main_settings(methods[0].record)["data"].replace(MISSING, "")
    if len(methods) > 1:
        return f"{len(methods)} methods on {data or methods[0].record.name}"
    runs = methods[0].runs
    return runs[0].folder if len(runs) == 1 else f"{methods[0].label} on {data}"


def overview(methods: Sequence[MethodResults]) -> list[str]:
    """Return the main settings in a few words each, for the line under the title."""
    shared = _shared_settings(methods)
    record = methods[0].record
    size = f" ({record.model.parameters:,} parameters)" if record.model.parameters else ""
    clients = f"{shared['clients']} clients" if "clients" in shared else ""
    alpha = f" (alpha {shared['alpha']})" if "alpha" in shared else ""
    partition = f"{shared.get('partition', '')}{alpha}"
    items = [
        f"{record.data.train:,} training examples" if record.data.train else "",
        ", ".join(filter(None, (clients, partition))),
        f"{shared['model']}{size}" if "model" in shared else "",
        counted(record.rounds, "round") if "rounds" in shared else "",
        shared.get("participation", ""),
    ]
    labels = [kind.label or kind.table for kind in declarations().values() if kind.is_in_overview]
    items += [f"{label}: {shared[label]}" for label in labels if label in shared]
    return [item for item in items if item]


def tiles(method: MethodResults) -> list[Tile]:
    """Return the figures of a method that is reported by itself."""
    summary = method.summary
    runs = summary.runs
    best_round = runs[0].best_round if len(runs) == 1 else None
    best_note = "mean over seeds" if best_round is None else f"round {best_round}"
    score = summary.score
    if not score.higher_is_better:
        best_note += "; lower is better"

    def shown(quantity: Quantity) -> str:
        return format_score(summary.stat(quantity), score, 1, has_unit=True)

    result = [
        Tile(f"Best {score.label}", shown("best"), best_note),
        Tile(f"Last {score.label}", shown("last"), "after the last round"),
        Tile("Mean of the last ten", shown("last_mean"), "evaluations before the end"),
    ]
    if summary.target is not None:
        reached = summary.stat("rounds_to_target")
        note = f"of {max(run.rounds for run in runs):,}" if reached else "never"
        if reached and reached.count < len(runs):
            note += f"; {reached.count} of {len(runs)} seeds"
        name = f"Rounds to {format_target(summary.target, score)}"
        result.append(Tile(name, format_stat(reached, decimals=0), note))
    for table, kind in declarations().items():
        record = method.record.features.get(table)
        note = "" if record is None else kind.tile_note(record)
        for figure in kind.figures:
            if figure.tile and (stat := summary.stat(figure.key_of_run)) is not None:
                result.append(Tile(figure.tile, format_number(stat.mean), note or figure.unit))
    traffic, sent = summary.stat("traffic"), summary.stat("sent")
    seconds, total = summary.stat("seconds_per_client"), summary.stat("seconds")
    for_each = "for each client and round"
    times = f"{format_number(traffic.mean)} × the model {for_each}" if traffic else "in all"
    in_all = format_duration(total.mean if total else None)
    return [
        *result,
        Tile("Traffic", format_bytes(sent.mean if sent else None), times),
        Tile(
            "Training",
            format_duration(seconds.mean if seconds else None),
            f"{for_each}; {in_all} in all",
        ),
    ]


def common_settings(methods: Sequence[MethodResults]) -> list[Fact]:
    """Return the settings that all runs share."""
    facts = [Fact(name, value) for name, value in _shared_settings(methods).items()]
    target = methods[0].record.target
    if target is not None:
        score = methods[0].record.score
        value = format_score(target, score, 1, has_unit=True)
        facts.append(Fact(f"target {score.label}", value))
    return facts


def _shared_settings(methods: Sequence[MethodResults]) -> dict[str, str]:
    """Return the settings that have one value in all methods, by name."""
    first, *others = [main_settings(method.record) for method in methods]
    return {
        name: value
        for name, value in first.items()
        if value != MISSING and all(other.get(name) == value for other in others)
    }


def data_facts(methods: Sequence[MethodResults]) -> list[Fact]:
    """Return what the record says of data and model."""
    record = methods[0].record
    return [*_flat_facts(to_json(record.data)), *_flat_facts(to_json(record.model), "model ")]


def environment_facts(methods: Sequence[MethodResults]) -> list[Fact]:
    """Return versions, machine and engine; several values where the runs differ."""
    values: dict[str, dict[str, None]] = {}
    for run in (run for method in methods for run in method.runs):
        environment, engine = to_json(run.record.environment), to_json(run.record.engine)
        for fact in [*_flat_facts(environment), *_flat_facts(engine, "engine ")]:
            values.setdefault(fact.name, {})[fact.value] = None
    return [Fact(name, join_values(list(options), 3)) for name, options in values.items()]


def method_facts(record: RunRecord) -> list[Fact]:
    """Return a method's parts with their roles, its weights, and estimates of traffic and state."""
    parts = [part for part in record.parts if part.name]
    facts = [Fact(part.name, ", ".join(part.roles) or MISSING) for part in parts]
    facts.append(Fact("clients are weighted by", format_setting(record.weights)))
    estimate = record.estimate
    for by_part, name in (
        (estimate.down, "sent to a client each round"),
        (estimate.up, "sent by a client"),
    ):
        if by_part:
            sizes = (f"{part} {format_bytes(size)}" for part, size in by_part.items())
            facts.append(Fact(name, ", ".join(sizes)))
    for size, name in (
        (estimate.client_state, "stored for each client"),
        (estimate.table, "stored by the server for each client"),
        (estimate.server_state, "stored by the server"),
    ):
        if size:
            facts.append(Fact(name, format_bytes(size)))
    return facts


def lost_clients(method: MethodResults) -> list[str]:
    """Return sentences on clients that did not report or whose update was excluded."""
    rows = [row for run in method.runs for row in run.rows]
    selections = sum(run.summary.selections for run in method.runs)
    dropped = Counter(client for row in rows for client in row.dropped)
    excluded = Counter(client for row in rows for client in row.excluded)
    sentences = []
    for event, counts in (
        ("did not report", dropped),
        ("sent an update that was not finite and was excluded", excluded),
    ):
        if total := counts.total():
            share = format_percent(total / selections)
            clients = ", ".join(f"{client} ({n} ×)" for client, n in counts.most_common(5))
            times = f"{total:,} of {selections:,} times ({share} %)"
            sentences.append(f"{times} a selected client {event}; most often: {clients}.")
    return sentences


def diagnostics(method: MethodResults) -> list[Diagnostic]:
    """Return a method's diagnostics: mean, last value and course over rounds."""
    rows = [row for run in method.runs for row in run.rows]
    rounds = sorted({row.round for row in rows if row.round > 0})
    result = []
    for name in sorted({name for row in rows for name in row.diagnostics}):
        by_round: dict[int, list[float]] = {}
        for row in rows:
            if (value := finite_or_none(row.diagnostics.get(name))) is not None:
                by_round.setdefault(row.round, []).append(value)
        stat = Stat.of(value for values in by_round.values() for value in values)
        if stat is not None:
            means = {number: statistics.fmean(values) for number, values in by_round.items()}
            lines = sparkline([means.get(number) for number in rounds])
            result.append(Diagnostic(name, stat, means[max(means)], lines))
    return result


def commands(methods: Sequence[MethodResults]) -> list[str]:
    """Return the commands that repeat these runs, in a new folder."""
    runs = [run for method in methods for run in method.runs]
    on_nodes = [run for run in runs if run.record.partition.kind == "nodes"]
    if on_nodes:
        lines = [_on_nodes(run, is_only=len(runs) == 1) for run in on_nodes[:_MAX_COMMANDS]]
        return ["# DATA_0, DATA_1, ...: the file of each client, in their order", *lines]
    if len(runs) == 1:
        return [f"fedkeel run {_config_path(runs[0])} --out runs/again"]
    first = min(methods[0].runs, key=lambda run: run.record.seed)
    seeds = len(methods[0].runs)
    # compare counts seeds from the one in the settings
    expected_seeds = list(range(first.record.seed, first.record.seed + seeds))
    names = list(dict.fromkeys(method.record.method for method in methods))
    is_one_comparison = (
        len({run.comparison_key for run in runs}) == 1
        and len(names) == len(methods)
        and all(sorted(method.summary.seeds) == expected_seeds for method in methods)
    )
    if is_one_comparison:
        return [
            f"fedkeel compare {_config_path(first)} --methods {shlex.quote(', '.join(names))} "
            f"--seeds {seeds} --out runs/again"
        ]
    return [
        f"fedkeel run {_config_path(run)} --out {shlex.quote(f'runs/again/{run.folder}')}"
        for run in runs[:_MAX_COMMANDS]
    ]


def _on_nodes(run: RunResults, is_only: bool) -> str:
    """Return the command that repeats a run whose data are on nodes: it needs the nodes' data."""
    data = "".join(f" --data DATA_{client}" for client in range(run.record.partition.clients))
    out = "runs/again" if is_only else shlex.quote(f"runs/again/{run.folder}")
    return f"fedkeel flower up {_config_path(run)}{data} --out {out}"


def _config_path(run: RunResults) -> str:
    return shlex.quote(f"{run.path}/config.toml")


def reference_method(methods: Sequence[MethodResults]) -> MethodResults:
    """Return FedAvg if it is among the methods, else the first of them."""
    return next((method for method in methods if method.record.method == "fedavg"), methods[0])


def rounds_to_shares(methods: Sequence[MethodResults]) -> list[list[Stat | None]]:
    """Return the rounds until each method reaches `SHARES` of the reference's best score.

    Nothing where the reference has not been evaluated, or the score is not a share that grows.
    """
    best = reference_method(methods).summary.stat("best")
    score = shared_score([method.summary for method in methods])
    if best is None or score is None or not (score.is_share and score.higher_is_better):
        return []
    return [
        [
            Stat.of(rounds_to(run.rows, share * best.mean, run.record.score) for run in method.runs)
            for share in SHARES
        ]
        for method in methods
    ]


def metric_columns(methods: Sequence[MethodResults]) -> list[MetricColumn]:
    """Return all metrics at the last evaluation of the trained models, by method.

    Nothing where there is no metric but the score, which has its own columns, or no evaluation.
    """
    last = [
        [next((r.test for r in reversed(run.rows) if r.test and r.round), None) for run in m.runs]
        for m in methods
    ]
    columns = []
    for metric in all_metrics(methods):
        values = [[finite_or_none(t[metric.name]) if t else None for t in tests] for tests in last]
        columns.append(MetricColumn(metric, tuple(Stat.of(of_method) for of_method in values)))
    has_any = any(any(column.stats) for column in columns)
    return columns if has_any and len(columns) > 1 else []


def undefined(columns: Sequence[MetricColumn]) -> str:
    """Return a sentence on the metrics of which some method has no number, "" where there is none.

    >>> undefined([MetricColumn(MetricInfo("mae", False), (None,))])
    'MAE has no number where the table has –: it is not defined there, or was not measured.'
    """
    names = [column.metric.label for column in columns if not all(column.stats)]
    if not names:
        return ""
    has, it = ("has", "it is") if len(names) == 1 else ("have", "they are")
    was = "was" if len(names) == 1 else "were"
    return (
        f"{enumeration(names, 9)} {has} no number where the table has {MISSING}: {it} not defined "
        f"there, or {was} not measured."
    )


def directions(metrics: Sequence[MetricInfo]) -> str:
    """Return a sentence on which values of some metrics are better.

    >>> directions([MetricInfo("mae", False), MetricInfo("r2")])
    'Higher is better for R², lower for MAE.'
    """
    high = [metric.label for metric in metrics if metric.higher_is_better]
    low = [metric.label for metric in metrics if not metric.higher_is_better]
    if not high or not low:
        return f"{'Higher' if high else 'Lower'} is better."
    return f"Higher is better for {enumeration(high, 9)}, lower for {enumeration(low, 9)}."


def source_rows(methods: Sequence[MethodResults]) -> list[SourceRow]:
    """Return the last value of the first method's score on each source of the test data."""
    score = methods[0].record.score.name
    by_method = [[_source_scores(run, score) for run in method.runs] for method in methods]
    names = dict.fromkeys(name for runs in by_method for scores in runs for name in scores)
    return [
        SourceRow(
            without_folders(name),
            tuple(Stat.of(scores.get(name) for scores in runs) for runs in by_method),
        )
        for name in names
    ]


def _source_scores(run: RunResults, score: str) -> dict[str, float | None]:
    """Return the last score on each source, None where none of its examples was measured."""
    row = next((row for row in reversed(run.rows) if row.sources), None)
    sources = row.sources if row else {}
    return {name: finite_or_none(s[score]) if s.examples else None for name, s in sources.items()}


def _flat_facts(values: Mapping[str, Any], prefix: str = "") -> list[Fact]:
    """Return nested values as facts whose names are joined."""
    facts: list[Fact] = []
    for key, value in values.items():
        if key in _HIDDEN or value in (None, "", [], {}):
            continue
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            facts += _flat_facts(value, f"{name} ")
        else:
            facts.append(Fact(name, format_setting(value)))
    return facts
