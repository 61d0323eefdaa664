"""The doctor's short runs: made in a folder by the pool, and scored on held-out training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from fedkeel.base.feature import declared_tables
from fedkeel.config import Run as RunSettings
from fedkeel.data.federation import Federation
from fedkeel.engine.choose.engine_rule import EngineRule
from fedkeel.engine.choose.parallel_runs import DifferingNumbers, with_parallel_runs
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.errors import DataError
from fedkeel.features.diagnose.settings import diagnose_of
from fedkeel.features.progress.display import ProgressDisplay
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.runner.prepare import prepare
from fedkeel.study.compare import run_folder_name, with_one_weighting
from fedkeel.study.pool import (
    RunRequest,
    beside,
    can_be_scored,
    make_run,
    run_all,
    single_process,
)

HOLDOUT = 0.2
"""Share of each client's training examples on which short runs are scored."""


@dataclass(frozen=True)
class ShortRun:
    """A run that is to be made: its name, which no other has, and its settings."""

    name: str
    settings: RunSettings


class ShortRuns:
    """Makes short runs of one federation, all in one engine.

    Args:
        ingredients: data and model, as `held_out` returns them.
        out: folder of the runs, from which finished ones are read.
        jobs: runs at a time.
        display: shows the progress.
        prepared: some of the runs, for which an engine is chosen.
        numbers: of the methods, in which the runs differ.
    """

    def __init__(
        self,
        ingredients: Ingredients,
        out: Path,
        jobs: int,
        display: ProgressDisplay,
        prepared: Sequence[Prepared],
        numbers: DifferingNumbers,
    ) -> None:
        self._ingredients, self._out = ingredients, out
        self._jobs, self._display = jobs, display
        rule = EngineRule()
        for run in prepared:
            rule.add(run)
        self._engine = with_parallel_runs(rule.choose(), prepared[0], numbers)

    def make(self, runs: Sequence[ShortRun]) -> list[list[RoundRecord] | None]:
        """Return the rows of each run, None where training diverged.

        Raises:
            FedkeelError: one cannot be made.
            KeyboardInterrupt: after the round at hand; the same call goes on there.
        """
        requests = (self._request(run) for run in runs)
        outcomes = run_all(requests, self._jobs, self._display, can_be_scored)
        for outcome in outcomes:
            if outcome is not None and outcome.error is not None and not can_be_scored(outcome):
                raise outcome.error
        if None in outcomes or len(outcomes) < len(runs):
            raise KeyboardInterrupt
        ended = [outcome for outcome in outcomes if outcome is not None]
        return [None if outcome.error else outcome.rows for outcome in ended]

    def _request(self, run: ShortRun) -> RunRequest:
        settings = run.settings
        if self._jobs > 1:
            settings = settings.model_copy(update={"engine": single_process(settings.engine)})
        prepared = prepare(settings, self._ingredients)
        # a diagnosed run has the key of one that is not
        suffix = "-diagnosed" if diagnose_of(settings).kinds else ""
        folder = self._out / (run_folder_name(prepared) + suffix)
        make = partial(make_run, prepared, folder, self._engine)
        return RunRequest(run.name, folder, make, *beside(prepared, self._engine))


def held_out(settings: RunSettings, ingredients: Ingredients) -> Ingredients:
    """Return ingredients whose test set is a share of each client's training examples.

    So nothing that the doctor says rests on the test set.

    Raises:
        DataError: the examples are on nodes, or no client has enough.
    """
    if ingredients.clients(settings.seed).how["kind"] == "nodes":
        raise DataError(
            "The doctor needs the examples, and these are on nodes.",
            why="a node sends only sums, and short runs hold out examples of each client",
            do="`fedkeel doctor --federation NAME` judges the statistics that sites consent to; a "
            "run of the federation with [diagnose] measures drift and conflict",
        )

    @cache
    def clients(seed: int) -> Federation:
        federation = ingredients.clients(seed)
        if federation.holdout_rows is not None and len(federation.holdout_rows):
            federation = replace(federation, holdout_rows=None, holdout_offsets=None)
        return replace(
            federation.hold_out(HOLDOUT, seed, bool(federation.how.get("stratify"))), test=None
        )

    rows = clients(settings.seed).holdout_rows
    if rows is None or not len(rows):
        raise DataError(
            "No client has enough examples to hold any out.",
            got=f"at most {clients(settings.seed).sizes.max()} examples",
            expected=f"{round(1 / HOLDOUT)} of a client at least",
        )
    test = clients(settings.seed).data.take(np.sort(rows))
    return replace(ingredients, clients=clients, test=test)


def short_settings(settings: RunSettings) -> RunSettings:
    """Return settings that a short run begins with, judged as the experiment's models are.

    What is written by a run depends only on these: an experiment's file would name other data.
    """
    values = {name: getattr(settings, name) for name in RunSettings.model_fields}
    changes = {
        "evaluation": settings.evaluation.model_copy(update={"clients_every": 0, "target": None}),
        **{t: kind.default for t, kind in declared_tables().items() if not kind.in_short_runs},
    }
    return with_one_weighting(RunSettings(**{**values, **changes}))


def for_rounds(settings: RunSettings, rounds: int, model: str) -> RunSettings:
    """Return settings of so many rounds, in which the global or the personal model is judged.

    Personal models are measured five times, since each measurement may train them.
    """
    every = max(1, rounds // 5) if model == "personal" else 1
    evaluation = settings.evaluation.model_copy(update={"every": every, "model": model})
    return settings.model_copy(update={"rounds": rounds, "evaluation": evaluation})


def scores(rows: Sequence[RoundRecord] | None, score: MetricInfo) -> list[tuple[int, float]]:
    """Return round and score wherever a run was measured after a round."""
    return [
        (row.round, row.test[score.name])
        for row in rows or ()
        if row.round > 0 and row.test is not None
    ]


def final_score(rows: Sequence[RoundRecord] | None, score: MetricInfo) -> float | None:
    """Return the mean score over the second half of a run; None where training diverged.

    A score goes up and down from round to round, most where few clients are in one.
    """
    if not rows:
        return None
    last = rows[-1].round
    return float(np.mean([value for round, value in scores(rows, score) if round > last / 2]))


def with_rate(settings: RunSettings, lr: float) -> RunSettings:
    """Return settings with another local learning rate."""
    return settings.model_copy(update={"local": settings.local.model_copy(update={"lr": lr})})
