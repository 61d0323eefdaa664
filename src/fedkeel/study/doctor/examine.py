"""The doctor: how clients differ, what goes wrong with FedAvg, and what to tune."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.config import Space
from fedkeel.data.batches import count_steps
from fedkeel.data.federation import Federation
from fedkeel.engine.choose.parallel_runs import DifferingNumbers
from fedkeel.engine.choose.work import run_work
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import ConfigError, FedkeelError, TrainingError
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.doctor import Advice, DoctorRecord
from fedkeel.records.score import MetricInfo
from fedkeel.report.formatting import format_duration
from fedkeel.runner.prepare import prepare
from fedkeel.study.compare import create_folder
from fedkeel.study.doctor.candidates import (
    Candidate,
    candidates,
    reason_against,
    search_space,
)
from fedkeel.study.doctor.data import histogram_of, measure_data
from fedkeel.study.doctor.findings import findings
from fedkeel.study.doctor.measurements import Measurements
from fedkeel.study.doctor.pilot import DIAGNOSED, Pilot, PilotResults
from fedkeel.study.doctor.runs import ShortRuns, for_rounds, held_out, short_settings
from fedkeel.study.doctor.trials import REFERENCE, Trials, TrialStage, stages
from fedkeel.study.search_space import points_of_numbers, search_axes, settings_at

ROUNDS = 20
"""Rounds of a trial of the second stage, at most those of the experiment. The pilot has half."""

ADVISED = 3
"""Methods that are worth tuning."""

START_SECONDS = 1.0
"""Seconds of a run beside its rounds: preparing, compiling and writing it."""


def examine(
    settings: RunSettings,
    ingredients: Ingredients,
    rounds: int | None = None,
    out: Path | None = None,
    display: ProgressDisplay | None = None,
    jobs: int = 1,
    methods: Sequence[str] | None = None,
) -> DoctorRecord:
    """Examine a federation, try the methods that can run, and say which three are worth tuning.

    Args:
        settings: of the experiment. Its method does not matter.
        ingredients: data and model. The test set is not looked at.
        rounds: rounds of a trial of the second stage; None takes `ROUNDS`.
        out: folder of the runs, from which finished ones are read; None keeps none.
        display: shows the progress.
        jobs: runs at a time, each in a process of one thread; a single job runs in this process.
        methods: expressions that are tried in place of the usual ones.

    Raises:
        DataError: the examples are on nodes, or too few to hold any out.
        ConfigError: none of the methods can run.
        TrainingError: FedAvg diverged at every learning rate, or all methods in all trials.
        KeyboardInterrupt: after the round at hand; the same call goes on there.
    """
    display = display or ProgressDisplay()
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return _examine(settings, ingredients, rounds, Path(folder), display, jobs, methods)
    create_folder(out)
    return _examine(settings, ingredients, rounds, out, display, jobs, methods)


def _examine(
    settings: RunSettings,
    ingredients: Ingredients,
    rounds: int | None,
    out: Path,
    display: ProgressDisplay,
    jobs: int,
    methods: Sequence[str] | None,
) -> DoctorRecord:
    display.prepare()
    federation = ingredients.clients(settings.seed)
    parts, length = held_out(settings, ingredients), min(rounds or ROUNDS, settings.rounds)
    short = for_rounds(short_settings(settings), length, settings.evaluation.model)
    first = prepare(short.model_copy(update={"method": REFERENCE}), parts)
    data, is_personal = first.clients, settings.evaluation.model == "personal"
    measured = replace(
        measure_data(replace(federation, test=None), settings.seed),
        per_round=first.population.per_round,
        judges_personal=is_personal,
        has_batch_norm=first.setup.training.network.mixes_examples,
        lr=settings.local.lr,
        steps=_steps(settings, data),
    )
    offered = candidates(is_personal, methods)
    tried, excluded, prepared, numbers = _candidates(offered, short, parts, measured)
    pilot = Pilot(short, max(1, math.ceil(length / 2)), first)
    runs = ShortRuns(parts, out, jobs, display, [first, *prepared], numbers)
    _plan(display, pilot, stages(tried, length), first, jobs)
    results = pilot.make(runs)
    measured = replace(measured, **_of_pilot(results, settings.local.lr, len(parts.test)))
    trials = Trials(short, tried, measured.best_lr, length, results.score).make(runs)
    by_method = {candidate.method: candidate for candidate in tried}
    advice = [Advice(t.method, by_method[t.method].aim(measured), t) for t in trials]
    scored = [item for item in advice if item.trial is not None and item.trial.score is not None]
    if not scored:
        raise TrainingError(
            "Every method that was tried diverged in each of its trials.",
            got=", ".join(item.method for item in advice),
            do="name other methods, or set a smaller local.lr",
        )
    advised = scored[:ADVISED]
    chosen = [item.method for item in advised]
    return DoctorRecord(
        name=settings.name,
        clients=first.population.clients,
        per_round=first.population.per_round,
        rounds=pilot.rounds,
        trial_rounds=length,
        validation_examples=len(parts.test),
        judges_personal=is_personal,
        held_out_by=federation.data.grouped_by,
        score=results.score,
        findings=findings(measured),
        advised=tuple(advised),
        not_advised=tuple(item for item in advice if item.method not in chosen),
        excluded=excluded,
        reference=next((trial for trial in trials if trial.method == REFERENCE), None),
        pilot=tuple(results.runs.values()),
        client_names=tuple(map(str, federation.names)),
        label_names=federation.data.label_names,
        sizes=tuple(federation.sizes.tolist()),
        histogram=tuple(map(tuple, histogram_of(federation).tolist())),
        input_distances=() if measured.inputs is None else measured.inputs.of_clients,
        experiment=_experiment(settings, measured, [by_method[method] for method in chosen]),
    )


def _candidates(
    offered: Sequence[Candidate], short: RunSettings, parts: Ingredients, measured: Measurements
) -> tuple[list[Candidate], tuple[Advice, ...], list[Prepared], DifferingNumbers]:
    """Return what is tried, what is not and why, the runs of the former as prepared, their numbers.

    The numbers are those in which trials of a method differ.
    """
    tried, excluded, prepared, numbers = [], [], [], DifferingNumbers()
    for candidate in offered:
        reason = reason_against(candidate.method, measured)
        if not reason:
            try:
                settings = short.model_copy(update={"method": candidate.method})
                prepared.append(prepare(settings, parts))
                for run in _with_other_numbers(candidate, short):
                    numbers.add(prepare(run, parts))
            except FedkeelError as error:  # FedAvg is prepared, so it is the method
                reason = error.what.rstrip(".")
        if reason:
            excluded.append(Advice(candidate.method, reason))
        else:
            tried.append(candidate)
    if not tried:
        reasons = "; ".join(f"{advice.method}: {advice.reason}" for advice in excluded)
        raise ConfigError("None of the methods can run here.", got=reasons)
    return tried, tuple(excluded), prepared, numbers


def _with_other_numbers(candidate: Candidate, short: RunSettings) -> list[RunSettings]:
    """Return two of a method's trials, with other numbers of the method; none where all agree."""
    axes = search_axes(candidate.method, search_space([candidate], short.local.lr, Space()))
    points = points_of_numbers(axes)
    if points[0] == points[1]:
        return []
    return [settings_at(point, axes, candidate.method, short) for point in points]


def _plan(
    display: ProgressDisplay, pilot: Pilot, of_trials: list[TrialStage], first: Prepared, jobs: int
) -> None:
    """Say how much there is to do, and how long that takes only by the arithmetic."""
    runs = pilot.count + sum(stage.runs for stage in of_trials)
    rounds = pilot.count * pilot.rounds + sum(stage.runs * stage.rounds for stage in of_trials)
    seconds = runs * START_SECONDS + rounds * run_work(first).round_seconds
    expected = format_duration(max(seconds / jobs, 1.0))
    display.plan(runs, rounds, f"about {expected}; --rounds bounds it")


def _steps(settings: RunSettings, federation: Federation) -> tuple[int, int]:
    """Return the smallest and the largest number of local steps of a client in a round."""
    counts = [count_steps(settings.local, int(n)) for n in federation.sizes if n]
    return min(counts), max(counts)


def _of_pilot(results: PilotResults, lr: float, examples: int) -> dict[str, Any]:
    diagnosed = results.runs.get(DIAGNOSED)
    fedavg = None if diagnosed is None else diagnosed.score
    return {
        "score": results.score,
        "noise": _noise(results.score, fedavg, examples),
        "scores_by_lr": results.scores_by_lr,
        "centralised": results.value("centralised"),
        "local": results.value("local"),
        "local_own": results.local_own,
        "all_clients": results.value("fedavg, all clients"),
        "equal_weights": results.value("fedavg, equal weights"),
        "kept_norm": results.value("fedbn"),
        "diagnostics": results.diagnostics,
    }


def _noise(score: MetricInfo, value: float | None, examples: int) -> float:
    """Return the standard error of a share of so many examples; of others, 2 % of the value."""
    if value is None:
        return 0.0
    if score.unit == "%" and 0.0 <= value <= 1.0:
        return math.sqrt(max(value * (1.0 - value), 1e-4) / max(examples, 1))
    return 0.02 * abs(value)


def _experiment(settings: RunSettings, measured: Measurements, advised: list[Candidate]) -> str:
    """Return an experiment file that searches the methods, "" where data are given in Python."""
    if not isinstance(settings, config.Experiment):
        return ""
    methods = [candidate.method for candidate in advised]
    reference = [] if REFERENCE in methods else [REFERENCE]
    best = settings.model_copy(
        update={
            "name": f"{settings.name}-advised",
            "method": methods[0],
            "local": settings.local.model_copy(update={"lr": measured.best_lr}),
            "compare": settings.compare.model_copy(update={"methods": (*reference, *methods)}),
            "tune": search_space(advised, measured.best_lr, settings.tune),
        }
    )
    beside = f", and of {REFERENCE} as the reference" if reference else ""
    head = (
        f"# Written by `fedkeel doctor`. It searches the learning rate and the most important\n"
        f"# hyper-parameter of {', '.join(methods)}{beside}:\n"
        f"#     fedkeel tune FILE\n"
    )
    return head + config.to_toml(best)
