"""What a reader must know before the numbers: unfair comparisons, unfinished runs, failures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from fedkeel.errors import counted
from fedkeel.records.rows import NOT_NEEDED
from fedkeel.records.statistics import finite_or_none
from fedkeel.report.formatting import (
    MISSING,
    format_percent,
    format_setting,
    join_names,
    join_values,
    without_folders,
)
from fedkeel.report.runs import MethodResults, RunResults, code_digest, distinguishing_facts

DIVERGED = 10.0
"""A run has diverged when its last loss is this many times that of the untrained model."""

MIN_ROUNDS, MIN_GAIN = 5, 0.02
"""A run has learnt nothing when accuracy rose by less than this share after so many rounds."""

_WEIGHTINGS = {
    "examples": "by size",
    "processed": "by the examples that they processed",
    "uniform": "equally",
}

_COVERED = re.compile(
    r"method|seed|rounds|weights|data\.(?!augment).*|model\..*|cohort\..*|evaluation\.target"
    r"|local\.(?!drop_last|schedule\.(?!kind)).*|partition\.(?!seed|sizes).*|engine\.dtype"
)
"""Settings that `distinguishing_facts` already covers."""


def alerts(methods: Sequence[MethodResults]) -> list[str]:
    """Return what a reader must know before the numbers, one item for each fact."""
    states = [
        f"{method.label}, seed {run.record.seed}: {run.state}."
        + (f" {without_folders(run.record.message)}" if run.record.message else "")
        for method in methods
        for run in method.runs
        if run.has_stopped_early or not run.is_finished
    ]
    warnings = dict.fromkeys(
        warning for method in methods for run in method.runs for warning in run.record.warnings
    )
    return [
        *states,
        *differences(methods),
        *problems(methods),
        *(f"{warning[0].upper()}{warning[1:]}." for warning in warnings),
    ]


def differences(methods: Sequence[MethodResults]) -> list[str]:
    """Return what differs between methods besides the method, one sentence each."""
    if len(methods) < 2:
        return []
    facts = [distinguishing_facts(method.record) for method in methods]
    sentences = []
    differing = set()
    for name in dict.fromkeys(name for values in facts for name in values):
        by_value = _labels_by_value(methods, [values.get(name, MISSING) for values in facts])
        if len(by_value) > 1:
            differing.add(name)
            is_weights = name == "weights"
            sentences.append(_weighting(by_value) if is_weights else _difference(name, by_value))
    settings = [method.runs[0].settings for method in methods]
    for key in dict.fromkeys(key for s in settings for key in s) if all(settings) else ():
        by_value = _labels_by_value(methods, [format_setting(s.get(key)) for s in settings])
        if len(by_value) > 1 and not _COVERED.fullmatch(key):
            sentences.append(_difference(key, by_value))
    seeds = {m.label: ", ".join(map(str, sorted(m.summary.seeds))) for m in methods}
    if len(set(seeds.values())) > 1:
        values = [f"{label} ran {text}" for label, text in seeds.items()]
        sentences.append(f"The methods ran different seeds: {join_values(values, 4)}.")
    if "data" not in differing and _has_different_data(methods):
        sentences.append(
            "The methods ran on different data: the fingerprint of the data differs for one seed."
        )
    sentences += _code_changes(methods)
    targets = _labels_by_value(methods, [format_setting(m.record.target) for m in methods])
    if len(targets) > 1:
        sentences.append(_difference("target", targets))
    return sentences


def _labels_by_value(
    methods: Sequence[MethodResults], values: Sequence[str]
) -> dict[str, list[str]]:
    """Return the labels of the methods that have each value."""
    labels: dict[str, list[str]] = {}
    for method, value in zip(methods, values, strict=True):
        labels.setdefault(value, []).append(method.label)
    return labels


def _difference(name: str, by_value: Mapping[str, Sequence[str]]) -> str:
    values = [f"{value} ({''.join(join_names(labels))})" for value, labels in by_value.items()]
    return f"The methods differ in {name}: {join_values(values, 4)}."


def _weighting(by_value: Mapping[str, Sequence[str]]) -> str:
    clauses: list[str] = []
    for value, labels in by_value.items():
        verb = "weights" if len(labels) == 1 else "weight"
        clients = "them" if clauses else "clients"
        how = _WEIGHTINGS.get(value, f"by {value}")
        clauses.append(f"{''.join(join_names(labels))} {verb} {clients} {how}")
    return f"{'; '.join(clauses)}. Set `weights` to compare fairly."


def _has_different_data(methods: Sequence[MethodResults]) -> bool:
    """Return whether the data of one seed have several fingerprints."""
    fingerprints: dict[int, set[str]] = {}
    for run in (run for method in methods for run in method.runs):
        fingerprint = run.record.data.fingerprint
        fingerprints.setdefault(run.record.seed, set()).add(fingerprint)
    return any(len(values) > 1 for values in fingerprints.values())


def _code_changes(methods: Sequence[MethodResults]) -> list[str]:
    """Return which of the user's own methods ran with more than one version of their code."""
    dates: dict[str, dict[str, str]] = {}
    for record in (method.record for method in methods):
        date = record.environment.date[:16].replace("T", " ")
        dates.setdefault(record.method, {}).setdefault(code_digest(record), date)
    return [
        f"The code of {method} changed between runs: "
        + ", ".join(f"version {code} ran on {date}" for code, date in versions.items())
        + "."
        for method, versions in dates.items()
        if len(versions) > 1
    ]


def problems(methods: Sequence[MethodResults]) -> list[str]:
    """Return what went wrong in runs that continued all the same, one item for each fact."""
    sentences = []
    for method in methods:
        sentences += [*_losses_not_finite(method), *_faults(method)]
        for run in method.runs:
            for sentence in (_divergence(run), _no_learning(run), _partial_scores(run)):
                if sentence is not None:
                    sentences.append(f"{method.label}, seed {run.record.seed}: {sentence}")
    return sentences


def _losses_not_finite(method: MethodResults) -> list[str]:
    count = sum(run.summary.losses_not_finite for run in method.runs)
    rounds = sum(len(run.rows) for run in method.runs)
    text = f"{method.label}: a loss was not finite in {count:,} of {rounds:,} rounds."
    return [text] if count else []


def _divergence(run: RunResults) -> str | None:
    """Return a sentence if the run ended far above the loss that it began with."""
    losses = [finite_or_none(row.test.loss) for row in run.rows if row.test is not None]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    if not first or not last or not last > DIVERGED * first > 0:
        return None
    return (
        f"training diverged. The last test loss is {last:,.4g}; that of the untrained model was "
        f"{first:,.4g}. Try a lower local.lr."
    )


def _no_learning(run: RunResults) -> str | None:
    """Return a sentence if no accuracy is above that of the untrained model."""
    rounds = [row.round for row in run.rows if row.test is not None]
    tests = [row.test for row in run.rows if row.test is not None]
    scores = [score for test in tests if (score := finite_or_none(test.top1)) is not None]
    if len(scores) < 2 or rounds[0] > 0 or rounds[-1] < MIN_ROUNDS:
        return None
    if not max(scores[1:]) < scores[0] + MIN_GAIN < 1:
        return None
    return (
        f"the model learnt nothing in {rounds[-1]:,} rounds. Its best accuracy is "
        f"{format_percent(max(scores[1:]))} %; that of the untrained model is "
        f"{format_percent(scores[0])} %. Check whether local.lr is too high or too low."
    )


def _faults(method: MethodResults) -> list[str]:
    """Return what went wrong in a federation of nodes, the most frequent first."""
    rounds, clients = Counter[str](), dict[str, set[int]]()
    rows = [row for run in method.runs for row in run.rows]
    for row in rows:
        for fault, affected in row.faults.items():
            if not fault.endswith(NOT_NEEDED):
                rounds[fault] += 1
                clients.setdefault(fault, set()).update(affected)
    sentences = []
    for fault, count in rounds.most_common(3):
        numbers = sorted(clients[fault])
        listed = ", ".join(map(str, numbers[:8])) + (" and others" if len(numbers) > 8 else "")
        who = f" ({'client' if len(numbers) == 1 else 'clients'} {listed})" if numbers else ""
        of_rounds = counted(len(rows), "round")
        sentences.append(f"{method.label}: {fault}, in {count:,} of {of_rounds}{who}.")
    if len(rounds) > 3:
        others = counted(len(rounds) - 3, "other fault")
        sentences.append(f"{method.label}: rounds.jsonl lists {others}.")
    return sentences


def _partial_scores(run: RunResults) -> str | None:
    """Return a sentence if some scores lack the examples of a client that was not connected."""
    counts = [row.test.examples for row in run.rows if row.test is not None]
    full = max(counts, default=0)
    partial = [count for count in counts if count < full]
    if not partial:
        return None
    return (
        f"{len(partial):,} of {len(counts):,} scores were measured on fewer examples than the "
        f"others, at the least {min(partial):,} of {full:,}, and so not on the same clients."
    )
