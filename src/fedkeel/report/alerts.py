"""What a reader must know before the numbers: unfair comparisons, unfinished runs, failures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from fedkeel.errors import counted, enumeration, printable
from fedkeel.records.rows import NOT_NEEDED
from fedkeel.records.score import ACCURACY
from fedkeel.records.statistics import finite_or_none
from fedkeel.report.formatting import (
    MISSING,
    format_score,
    format_setting,
    join_values,
    without_folders,
)
from fedkeel.report.runs import MethodResults, RunResults, code_digest, distinguishing_facts

DIVERGED = 10.0
"""A run has diverged when its last loss is this many times that of the untrained model."""

_NOISY = {"dpclient", "dpftrl", "dpquantile", "dpsgd"}
"""Parts that add noise."""

MIN_ROUNDS, MIN_GAIN = 5, 0.02
"""A run has learnt nothing when its score improved by less than this after so many rounds.

It is a share where that is what the score is and higher is better, else a part of the score of the
untrained model."""

_WEIGHTINGS = {
    "examples": "by size",
    "processed": "by the examples that they processed",
    "uniform": "equally",
}

_COVERED = re.compile(
    r"method|seed|rounds|weights|data\.(?!augment).*|model\..*|cohort\..*|evaluation\.target"
    r"|local\.(?!drop_last|schedule\.(?!kind)).*|partition\.(?!seed|sizes).*|engine\.dtype|task\..*"
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
    has_settings = all(method.runs[0].settings for method in methods)
    facts = [_comparable_facts(method, has_settings) for method in methods]
    sentences = []
    for name in dict.fromkeys(name for values in facts for name in values):
        labels: dict[str, list[str]] = {}
        for method, values in zip(methods, facts, strict=True):
            labels.setdefault(values.get(name, MISSING), []).append(method.label)
        if len(labels) > 1:
            describe = _weighting if name == "weights" else partial(_difference, name)
            sentences.append(describe(labels))
    has_same_sources = len({values["data"] for values in facts}) == 1
    if has_same_sources and _has_different_data(methods):
        sentences.append(
            "The methods ran on different data: the fingerprint of the data differs for one seed."
        )
    return [*sentences, *_code_changes(methods)]


def _comparable_facts(method: MethodResults, has_settings: bool) -> dict[str, str]:
    """Return the facts that should be the same for all methods, by name."""
    settings = method.runs[0].settings if has_settings else {}
    return {
        **distinguishing_facts(method.record),
        **{k: format_setting(v) for k, v in settings.items() if not _COVERED.fullmatch(k)},
        "seeds": ", ".join(map(str, sorted(method.summary.seeds))),
        "target": format_setting(method.record.target),
    }


def _difference(name: str, by_value: Mapping[str, Sequence[str]]) -> str:
    values = [f"{value} ({enumeration(labels)})" for value, labels in by_value.items()]
    return f"The methods differ in {name}: {join_values(values, 4)}."


def _weighting(by_value: Mapping[str, Sequence[str]]) -> str:
    clauses: list[str] = []
    for value, labels in by_value.items():
        verb = "weights" if len(labels) == 1 else "weight"
        clients = "them" if clauses else "clients"
        how = _WEIGHTINGS.get(value, f"by {value}")
        clauses.append(f"{enumeration(labels)} {verb} {clients} {how}")
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
        sentences += [*_losses_not_finite(method), *_faults(method), *_untrained_best(method)]
        for run in method.runs:
            sentences += [
                f"{method.label}, seed {run.record.seed}: {change_told(change)}"
                for change in run.changes
            ]
            for sentence in (_divergence(run), _no_learning(run), _partial_scores(run)):
                if sentence is not None:
                    sentences.append(f"{method.label}, seed {run.record.seed}: {sentence}")
    return sentences


def change_told(change: str) -> str:
    """Return what has changed in a run folder, with what to do: see `RunFolder.changes`."""
    if change.endswith("deleted since the run ended"):
        return f"{change}. Take the folder from a copy, or run again, where you need the file."
    return f"{change}. Its numbers may be wrong: take the folder from a copy, or run again."


def _losses_not_finite(method: MethodResults) -> list[str]:
    count = sum(run.summary.losses_not_finite for run in method.runs)
    rounds = sum(len(run.rows) for run in method.runs)
    text = f"{method.label}: a loss was not finite in {count:,} of {rounds:,} rounds."
    return [text] if count else []


def _divergence(run: RunResults) -> str | None:
    """Return a sentence if the run ended far above the loss that it began with."""
    losses = [finite_or_none(row.test["loss"]) for row in run.rows if row.test is not None]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    if not first or not last or not last > DIVERGED * first > 0:
        return None
    return (
        f"training diverged. The last test loss is {last:,.4g}; that of the untrained model was "
        f"{first:,.4g}. {_remedy(run, 'Try a lower local.lr.')}"
    )


def _no_learning(run: RunResults) -> str | None:
    """Return a sentence if no score is better than that of the untrained model."""
    info = run.record.score
    rounds = [row.round for row in run.rows if row.test is not None]
    tests = [row.test for row in run.rows if row.test is not None]
    scores = [score for test in tests if (score := finite_or_none(test[info.name])) is not None]
    if len(scores) < 2 or rounds[0] > 0 or rounds[-1] < MIN_ROUNDS:
        return None
    is_growing_share = info.unit == "%" and info.higher_is_better
    gain = MIN_GAIN if is_growing_share else MIN_GAIN * abs(scores[0])
    best = info.best(scores[1:])
    has_gained = not info.is_better(scores[0] + info.sign * gain, best)
    if has_gained or (is_growing_share and scores[0] + gain >= 1):
        return None
    after = f"in {rounds[-1]:,} rounds. Its best"
    what = f"the model learnt nothing {after} accuracy"
    if info != ACCURACY:
        what = f"the test {info.label} hardly improved {after}"
    return (
        f"{what} is {format_score(best, info, 1, has_unit=True)}; that of the untrained model is "
        f"{format_score(scores[0], info, 1, has_unit=True)}. "
        + _remedy(run, "Check whether local.lr is too high or too low.")
    )


def _untrained_best(method: MethodResults) -> list[str]:
    """Return a sentence on the seeds whose best score is that of the untrained model.

    None where `_no_learning` says it of each of them.
    """
    scored = [run for run in method.runs if run.summary.value("best") is not None]
    untrained = [run for run in scored if run.summary.best_round == 0 and _is_worse_at_end(run)]
    if all(_no_learning(run) for run in untrained):
        return []
    seeds = "" if len(scored) == 1 else f"in {len(untrained):,} of {len(scored):,} seeds "
    return [
        f"{method.label}: {seeds}the untrained model was best. The best score of such a run is "
        "that of round 0: look at the last score, too."
    ]


def _is_worse_at_end(run: RunResults) -> bool:
    """Return whether the last score is another than the best one."""
    return run.summary.value("last") != run.summary.value("best")


def _remedy(run: RunResults, usual: str) -> str:
    """Return what to do where a run has learnt nothing; no learning rate is the cause of noise."""
    if _NOISY & {part.name for part in run.record.parts}:
        return (
            "The noise may be the reason: beside the updates it is shorter with more clients in a "
            "round, a larger epsilon or a smaller model."
        )
    return usual


def _faults(method: MethodResults) -> list[str]:
    """Return what went wrong in a federation of nodes, the most frequent first."""
    rows = [row for run in method.runs for row in run.rows]
    affected: dict[str, list[list[int]]] = {}
    for row in rows:
        for fault, clients in row.faults.items():
            if not fault.endswith(NOT_NEEDED):
                affected.setdefault(fault, []).append(clients)
    by_frequency = sorted(affected.items(), key=lambda item: -len(item[1]))
    sentences = []
    for fault, rounds in by_frequency[:3]:
        numbers = sorted({client for clients in rounds for client in clients})
        listed = ", ".join(map(str, numbers[:8])) + (" and others" if len(numbers) > 8 else "")
        who = f" ({'client' if len(numbers) == 1 else 'clients'} {listed})" if numbers else ""
        of_rounds = counted(len(rows), "round")
        sentences.append(
            f"{method.label}: {printable(fault)}, in {len(rounds):,} of {of_rounds}{who}."
        )
    if len(by_frequency) > 3:
        others = counted(len(by_frequency) - 3, "other fault")
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
