"""The doctor's pilot: short runs of FedAvg and the baselines, scored on held-out training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.config.diagnose import Kind
from fedkeel.cost.engine_rule import EngineRule
from fedkeel.data.federation import Federation
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.engine.process.interrupts import interrupts
from fedkeel.errors import DataError, TrainingError
from fedkeel.records.doctor import PilotRun
from fedkeel.records.run_record import EngineChoice
from fedkeel.records.score import MetricInfo
from fedkeel.runner.best_model import score_on_clients
from fedkeel.runner.prepare import prepare
from fedkeel.runner.progress import ProgressDisplay
from fedkeel.runner.result import Result
from fedkeel.runner.start import start
from fedkeel.study.compare import create_folder, run_folder_name, with_one_weighting

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Factors on the learning rate that are tried."""

HOLDOUT = 0.2
"""Share of each client's training examples on which the pilot is scored."""

KINDS: tuple[Kind, ...] = ("drift", "conflict", "forgetting")

LAST = 3
"""Last rounds over which a score is averaged, since it goes up and down from round to round."""

MOST_CLIENTS = 10
"""Most times as many clients as in a round, for which rounds of all clients are tried."""


@dataclass(frozen=True)
class PilotResults:
    """The runs of the pilot.

    Args:
        runs: each by its name in words.
        results: of the runs that could be finished, by name.
        rates: name of FedAvg's run by learning rate.
        score: the metric by which models are judged.
        client_scores: scores on the clients' own examples, by name of the run.
    """

    runs: dict[str, PilotRun]
    results: dict[str, Result]
    rates: dict[float, str]
    score: MetricInfo
    client_scores: dict[str, float | None] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Return a run's score; None where it was not made or diverged."""
        return self.runs[name].score if name in self.runs else None


def held_out(settings: RunSettings, ingredients: Ingredients) -> Ingredients:
    """Return ingredients whose test set is a share of each client's training examples.

    So nothing that the doctor says rests on the test set.

    Raises:
        DataError: the examples are on nodes, or no client has enough.
    """
    if ingredients.clients(settings.seed).how["kind"] == "nodes":
        raise DataError(
            "The doctor needs the examples, and these are on nodes.",
            why="a node sends sums alone, and the pilot holds out examples of each client",
            do="run it where the data are, or on one node's data; `fedkeel run` of the federation "
            "with [diagnose] measures drift and conflict",
        )

    @cache
    def clients(seed: int) -> Federation:
        federation = ingredients.clients(seed)
        if federation.holdout_rows is not None and len(federation.holdout_rows):
            federation = replace(federation, holdout_rows=None, holdout_offsets=None)
        return replace(federation.hold_out(HOLDOUT, seed), test=None)

    rows = clients(settings.seed).holdout_rows
    if rows is None or not len(rows):
        raise DataError(
            "No client has enough examples to hold any out for the pilot.",
            got=f"at most {clients(settings.seed).sizes.max()} examples",
            expected=f"{round(1 / HOLDOUT)} of a client at least",
        )
    test = clients(settings.seed).data.take(np.sort(rows))
    return replace(ingredients, clients=clients, test=test)


class Pilot:
    """Makes the runs of a pilot, and keeps them in a folder.

    Args:
        settings: of the experiment.
        ingredients: data and model, as `held_out` returns them.
        rounds: rounds of each run.
        out: the folder; None keeps the runs in memory.
        display: shows the progress.
    """

    def __init__(
        self,
        settings: RunSettings,
        ingredients: Ingredients,
        rounds: int,
        out: Path | None,
        display: ProgressDisplay,
    ) -> None:
        self._settings = _pilot_settings(settings, rounds)
        self._ingredients, self._rounds = ingredients, rounds
        self._out, self._display = out, display
        self.first: Prepared = prepare(self._settings, ingredients)
        rule = EngineRule()
        rule.add(self.first)
        self._engine: EngineChoice = rule.choose()

    def make(self) -> PilotResults:
        """Make all runs; those that are there are read.

        Raises:
            TrainingError: FedAvg diverged at every learning rate.
            KeyboardInterrupt: after the round at hand; the same call goes on there.
        """
        if self._out is not None:
            create_folder(self._out)
        prepared = self.first
        lr, sizes = self._settings.local.lr, prepared.clients.sizes
        results = PilotResults({}, {}, {}, prepared.setup.metrics.score)
        more = self._more(prepared, sizes)
        count = len(FACTORS) + len(more)
        self._display.plan(count, count * self._rounds)
        with interrupts(self._display.stopping) as stop:
            for factor in FACTORS:
                rate = float(f"{lr * factor:.3g}") if factor != 1.0 else lr
                results.rates[rate] = f"fedavg, lr {rate:g}"
                self._run(results, results.rates[rate], "fedavg", {"lr": rate}, stop.is_set())
            rate = best_rate(results, lr)
            for name, (method, changes) in more.items():
                self._run(results, name, method, {"lr": rate}, stop.is_set(), changes)
        return results

    def _more(
        self, prepared: Prepared, sizes: np.ndarray[Any, Any]
    ) -> dict[str, tuple[str, dict[str, Any]]]:
        """Return the runs after the learning rates: method and changed settings, by name."""
        population, every = prepared.population, self._settings.evaluation
        rarely = every.model_copy(update={"every": self._rounds, "clients_every": self._rounds})
        runs: dict[str, tuple[str, dict[str, Any]]] = {
            "fedavg, diagnosed": ("fedavg", {"diagnose": self._diagnose()}),
            "centralised": ("centralised", {}),
            "local": ("local", {"evaluation": rarely}),
        }
        if population.per_round < population.clients <= MOST_CLIENTS * population.per_round:
            runs["fedavg, all clients"] = ("fedavg", {"cohort": config.Cohort()})
        if sizes.max() > 2 * max(sizes.min(), 1):
            runs["fedavg, equal weights"] = ("fedavg", {"weights": "uniform"})
        if prepared.setup.training.network.mixes_examples:
            runs["fedbn"] = ("fedbn", {})
        return runs

    def _diagnose(self) -> config.Diagnose:
        return config.Diagnose(kinds=KINDS, every=max(1, self._rounds // 3))

    def _run(
        self,
        results: PilotResults,
        name: str,
        method: str,
        local: Mapping[str, float],
        is_stopping: bool,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        if is_stopping:
            raise KeyboardInterrupt
        of_local = self._settings.local.model_copy(update=dict(local))
        update = {"method": method, "local": of_local, **(changes or {})}
        settings = self._settings.model_copy(update=update)
        prepared = prepare(settings, self._ingredients)
        folder = None
        if self._out is not None:  # a diagnosed run has the key of one that is not
            suffix = "-diagnosed" if settings.diagnose.kinds else ""
            folder = self._out / (run_folder_name(prepared) + suffix)
        follow = [self._display.follow(name)]
        lr = local["lr"]
        try:
            result = start(prepared, folder, resume=True, callbacks=follow, choice=self._engine)
        except TrainingError as error:
            self._display.end(name, error.what)
            results.runs[name] = PilotRun(name, method, lr, None)
            return
        if result.record.status == "interrupted":
            raise KeyboardInterrupt
        curve = tuple(_scores(result, results.score, is_own=name == "fedbn"))
        score = float(np.mean(curve[-LAST:])) if curve else None
        results.runs[name] = PilotRun(name, method, lr, score, curve)
        results.results[name] = result
        results.client_scores[name] = score_on_clients(result.rows[-1], results.score)


def best_rate(results: PilotResults, lr: float) -> float:
    """Return FedAvg's learning rate with the best score, the nearest to the given of equals.

    Raises:
        TrainingError: it diverged at all of them.
    """
    known = {rate: results.value(name) for rate, name in results.rates.items()}
    scored = {rate: value for rate, value in known.items() if value is not None}
    if not scored:
        raise TrainingError(
            "FedAvg diverged at every learning rate of the pilot.",
            got=", ".join(f"{rate:g}" for rate in known),
            do="check the loss and the scale of the inputs, or set a smaller local.lr",
        )
    by_distance = sorted(scored, key=lambda rate: abs(np.log(rate / lr)))
    return max(by_distance, key=lambda rate: results.score.sign * scored[rate])


def _pilot_settings(settings: RunSettings, rounds: int) -> RunSettings:
    """Return settings of FedAvg for a few rounds, judged by its global model after each."""
    values = {name: getattr(settings, name) for name in RunSettings.model_fields}
    every = settings.evaluation.model_copy(
        update={"every": 1, "clients_every": 1, "model": "global", "target": None}
    )
    changes = {
        "name": settings.name,
        "method": "fedavg",
        "rounds": rounds,
        "evaluation": every,
        "stop": config.Stop(),
        "diagnose": config.Diagnose(),
        "privacy": None,
    }
    return with_one_weighting(RunSettings(**{**values, **changes}))


def _scores(result: Result, score: MetricInfo, is_own: bool) -> Sequence[float]:
    """Return the score of each round: of the global model, or of clients' on their own examples."""
    values = [
        score_on_clients(row, score) if is_own else row.test[score.name] if row.test else None
        for row in result.rows
        if row.round > 0
    ]
    return [value for value in values if value is not None]


def mean_diagnostics(result: Result | None) -> dict[str, float]:
    """Return the mean of each diagnosed number over the rounds that have it."""
    columns: dict[str, list[float]] = {}
    for row in result.rows if result is not None else ():
        for name, value in row.diagnostics.items():
            if value is not None and np.isfinite(value):
                columns.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in columns.items()}
