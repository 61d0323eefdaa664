"""What a search chooses by: a validation part of the training data, or the test set."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedkeel import config
from fedkeel.config import Metric, Space
from fedkeel.config import Run as RunSettings
from fedkeel.data.dataset import Federation
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import DataError
from fedkeel.records.rows import RoundRecord

LAST = 10
"""Evaluations whose mean ``last_mean`` is."""


@dataclass(frozen=True)
class Measure:
    """How trials are run, and what counts of their rows.

    Args:
        settings: of a run that can be measured, before anything is searched.
        ingredients: data and model; what is held out for validation is not trained on.
        validation: whether clients' held-out examples are what counts, or the test set.
        metric: what counts of a run.
        held: number of examples that accuracy is measured on; None for the test set.
    """

    settings: RunSettings
    ingredients: Ingredients
    validation: bool
    metric: Metric
    held: int | None = None

    @classmethod
    def of(cls, settings: RunSettings, ingredients: Ingredients, space: Space) -> Measure:
        """Return the measure that a search asks for.

        For validation a share of each client's examples is held out; the test set is looked at
        before and after a run alone, for the record, and does not count.

        Raises:
            DataError: no client has enough examples to hold any out.
        """
        if space.on == "test":
            ready = replace(ingredients, clients=cache(ingredients.clients))
            return cls(settings, ready, False, space.metric)
        share, seed = space.holdout, settings.seed if space.seed is None else space.seed
        asked = settings.partition if isinstance(settings, config.Experiment) else None

        @cache
        def clients(seed: int) -> Federation:
            own = seed if asked is None or asked.seed is None else asked.seed
            return _held_out(ingredients.clients(seed), share, own)

        held = clients(seed).holdout_rows
        count = 0 if held is None else len(held)
        ready = replace(ingredients, clients=clients)
        return cls(_watched(settings, share), ready, True, space.metric, count)

    def check(self, seed: int) -> None:
        """Refuse a seed whose clients cannot be made.

        Raises:
            DataError: the partition cannot be made.
        """
        self.ingredients.clients(seed)

    def value(self, rows: Sequence[RoundRecord]) -> float:
        """Return the accuracy that counts of a finished run, in [0, 1]."""
        found = [a for row in rows if row.round > 0 and (a := self._accuracy(row)) is not None]
        if self.metric == "best":
            return max(found)
        return found[-1] if self.metric == "last" else statistics.fmean(found[-LAST:])

    def _accuracy(self, row: RoundRecord) -> float | None:
        """Return the accuracy after a round, None where it was not measured."""
        if not self.validation:
            return None if row.test is None else row.test.top1
        if row.per_client is None:
            return None
        pairs = zip(row.per_client["examples"], row.per_client["top1"], strict=True)
        known = [(n, top1) for n, top1 in pairs if n and top1 is not None]
        return sum(n * top1 for n, top1 in known) / sum(n for n, _ in known) if known else None


def _held_out(federation: Federation, share: float, seed: int) -> Federation:
    made = federation.hold_out(share, seed)
    count = 0 if made.holdout_rows is None else len(made.holdout_rows)
    if count == 0:
        raise DataError(
            "No client has enough examples to hold any out for validation.",
            got=f"at most {federation.sizes.max()} examples, of which {share:g} are held out",
            do="raise tune.holdout, or set tune.on = 'test' and say that you chose on the test set",
        )
    return replace(made, how={**made.how, "holdout": share, "held_out": count})


def _watched(settings: RunSettings, share: float) -> RunSettings:
    """Return settings with which clients' held-out examples are evaluated as the test set was.

    An experiment says what is held out, so that the file in a trial's folder repeats the trial.
    One whose clients hold out examples already could not say it twice: what is recorded then leaves
    data, partition and model out.
    """
    every = {"every": settings.rounds, "clients_every": settings.evaluation.every}
    settings = settings.model_copy(
        update={"evaluation": settings.evaluation.model_copy(update=every)}
    )
    if not isinstance(settings, config.Experiment):
        return settings
    if settings.partition.holdout == 0:
        partition = settings.partition.model_copy(update={"holdout": share})
        return settings.model_copy(update={"partition": partition})
    return config.Run(**{name: getattr(settings, name) for name in config.Run.model_fields})
