"""The doctor's pilot: short runs of FedAvg and the baselines, for what goes wrong with FedAvg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedkeel import config
from fedkeel.config import Run as RunSettings
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import TrainingError
from fedkeel.features.diagnose.settings import Diagnose, Kind
from fedkeel.records.doctor import PilotRun
from fedkeel.records.fairness import mean_over_clients
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.study.doctor.measurements import best_rate
from fedkeel.study.doctor.runs import (
    ShortRun,
    ShortRuns,
    final_score,
    for_rounds,
    scores,
    with_rate,
)

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Factors on the learning rate that are tried."""

DIAGNOSED = "fedavg, diagnosed"

KINDS: tuple[Kind, ...] = ("drift", "conflict", "forgetting")

MOST_CLIENTS = 10
"""Most times as many clients as in a round, for which rounds of all clients are tried."""


@dataclass(frozen=True)
class PilotResults:
    """The runs of the pilot.

    Args:
        score: the metric by which models are judged.
        runs: each by its name in words.
        rates: name of FedAvg's run by learning rate.
        diagnostics: of FedAvg, mean over the diagnosed rounds, by ``kind.name``.
        local_own: of clients that train alone, on their own examples.
    """

    score: MetricInfo
    runs: dict[str, PilotRun] = field(default_factory=dict)
    rates: dict[float, str] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    local_own: float | None = None

    def value(self, name: str) -> float | None:
        """Return a run's score; None where it was not made or diverged."""
        return self.runs[name].score if name in self.runs else None

    @property
    def scores_by_lr(self) -> dict[float, float | None]:
        """FedAvg's score by learning rate; None where it diverged."""
        return {rate: self.value(name) for rate, name in self.rates.items()}


class Pilot:
    """The runs of a pilot.

    Args:
        settings: as `short_settings` returns them.
        rounds: rounds of each run.
        prepared: FedAvg.
    """

    def __init__(self, settings: RunSettings, rounds: int, prepared: Prepared) -> None:
        self._settings = for_rounds(settings, rounds, "global")
        self.rounds = rounds
        self._more = self._other_runs(prepared)
        self._score = prepared.setup.metrics.score
        self.count = len(FACTORS) + len(self._more)

    def make(self, runs: ShortRuns) -> PilotResults:
        """Make all runs: FedAvg at several learning rates, then the others at the best of these.

        Raises:
            TrainingError: FedAvg diverged at every learning rate.
            KeyboardInterrupt: after the round at hand.
        """
        results = PilotResults(self._score)
        lr = self._settings.local.lr
        for factor in FACTORS:
            rate = float(f"{lr * factor:.3g}") if factor != 1.0 else lr
            results.rates[rate] = f"fedavg, lr {rate:g}"
        by_rate = [
            ShortRun(name, with_rate(self._settings, rate)) for rate, name in results.rates.items()
        ]
        self._make(runs, by_rate, results)
        rate = _best_rate(results, lr)
        others = [
            ShortRun(name, with_rate(settings, rate)) for name, settings in self._more.items()
        ]
        rows = self._make(runs, others, results)
        local = rows["local"]
        return PilotResults(
            self._score,
            results.runs,
            results.rates,
            mean_diagnostics(rows[DIAGNOSED]),
            mean_over_clients(local[-1].per_client, self._score) if local else None,
        )

    def _make(
        self, runs: ShortRuns, wanted: Sequence[ShortRun], results: PilotResults
    ) -> dict[str, list[RoundRecord] | None]:
        """Make runs and add them to the results; return their rows by name."""
        rows_by_name = dict(zip([run.name for run in wanted], runs.make(wanted), strict=True))
        for run in wanted:
            rows = rows_by_name[run.name]
            results.runs[run.name] = PilotRun(
                run.name,
                run.settings.method,
                run.settings.local.lr,
                final_score(rows, self._score),
                tuple(value for _, value in scores(rows, self._score)),
            )
        return rows_by_name

    def _other_runs(self, prepared: Prepared) -> dict[str, RunSettings]:
        """Return the settings of the runs after the learning rates, by name."""
        population, sizes = prepared.population, prepared.clients.sizes
        changes: dict[str, dict[str, object]] = {
            DIAGNOSED: {"diagnose": Diagnose(kinds=KINDS, every=max(1, self.rounds // 3))},
            "centralised": {"method": "centralised"},
            "local": {
                "method": "local",
                "evaluation": self._settings.evaluation.model_copy(update={"every": self.rounds}),
            },
        }
        if population.per_round < population.clients <= MOST_CLIENTS * population.per_round:
            changes["fedavg, all clients"] = {"cohort": config.Cohort()}
        if sizes.max() > 2 * max(sizes.min(), 1):
            changes["fedavg, equal weights"] = {"weights": "uniform"}
        settings = {
            name: self._settings.model_copy(update=update) for name, update in changes.items()
        }
        if prepared.setup.training.network.mixes_examples:
            judged = for_rounds(self._settings, self.rounds, "personal")
            settings["fedbn"] = judged.model_copy(update={"method": "fedbn"})
        return settings


def _best_rate(results: PilotResults, lr: float) -> float:
    """Return FedAvg's best learning rate.

    Raises:
        TrainingError: it diverged at all of them.
    """
    scores = results.scores_by_lr
    if all(score is None for score in scores.values()):
        raise TrainingError(
            "FedAvg diverged at every learning rate of the pilot.",
            got=", ".join(f"{rate:g}" for rate in scores),
            do="check the loss and the scale of the inputs, or set a smaller local.lr",
        )
    return best_rate(scores, lr, results.score)


def mean_diagnostics(rows: Sequence[RoundRecord] | None) -> dict[str, float]:
    """Return the mean of each diagnosed number over the rounds that have it."""
    columns: dict[str, list[float]] = {}
    for row in rows or ():
        for name, value in row.diagnostics.items():
            if value is not None and np.isfinite(value):
                columns.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in columns.items()}
