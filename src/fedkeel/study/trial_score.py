"""The score of a trial: on held-out training data, or on the test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedkeel import config
from fedkeel.config import Metric, Space
from fedkeel.config import Run as RunSettings
from fedkeel.data.federation import Federation
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import DataError
from fedkeel.records.fairness import mean_over_clients
from fedkeel.records.rows import RoundRecord
from fedkeel.records.score import MetricInfo
from fedkeel.records.statistics import mean_of_last


@dataclass(frozen=True)
class TrialScore:
    """How the runs of trials are set up, and how they are scored.

    Args:
        settings: settings of a run that can be scored, before any searched value.
        ingredients: data and model; examples held out for validation are not trained on.
        metric: how the scores of a run's rounds make one.
        validation_examples: number of held-out examples; None where the test set is used.
    """

    settings: RunSettings
    ingredients: Ingredients
    metric: Metric
    validation_examples: int | None = None

    @classmethod
    def prepare(cls, settings: RunSettings, ingredients: Ingredients, space: Space) -> TrialScore:
        """Return the score that a search asks for.

        For validation a share of each client's examples is held out. The test set is then
        evaluated only before and after a run, for the record.

        Raises:
            DataError: no client has enough examples to hold any out.
        """
        if space.split == "test":
            cached = replace(ingredients, clients=cache(ingredients.clients))
            return cls(settings, cached, space.metric)
        partition = settings.partition if isinstance(settings, config.Experiment) else None

        @cache
        def clients(seed: int) -> Federation:
            fixed_seed = None if partition is None else partition.seed
            holdout_seed = seed if fixed_seed is None else fixed_seed
            return _hold_out(ingredients.clients(seed), space.holdout, holdout_seed)

        holdout_rows = clients(settings.seed if space.seed is None else space.seed).holdout_rows
        return cls(
            _validated(settings, space.holdout),
            replace(ingredients, clients=clients),
            space.metric,
            0 if holdout_rows is None else len(holdout_rows),
        )

    def of(self, rows: Sequence[RoundRecord], score: MetricInfo) -> float:
        """Return the score of a finished run.

        Args:
            rows: its rounds.
            score: the metric by which models are judged.
        """
        values = [
            value
            for row in rows
            if row.round > 0 and (value := self._value(row, score)) is not None
        ]
        if self.metric == "best":
            return score.best(values)
        return values[-1] if self.metric == "last" else mean_of_last(values) or 0.0

    def _value(self, row: RoundRecord, score: MetricInfo) -> float | None:
        """Return the score after a round, of the model that is judged; None where not measured.

        A row has no `per_client` where clients keep parameters, so that no global model is whole.
        """
        if self.validation_examples is None:
            return None if row.test is None else row.test[score.name]
        is_personal = self.settings.evaluation.model == "personal" or row.per_client is None
        columns = row.personal if is_personal and row.personal is not None else row.per_client
        return mean_over_clients(columns, score)


def _hold_out(federation: Federation, share: float, seed: int) -> Federation:
    divided = federation.hold_out(share, seed, bool(federation.how.get("stratify")))
    count = 0 if divided.holdout_rows is None else len(divided.holdout_rows)
    if count == 0:
        raise DataError(
            "No client has enough examples to hold any out for validation.",
            got=f"at most {federation.sizes.max()} examples, of which {share:g} are held out",
            do="raise tune.holdout, or set tune.split = 'test' and say that you chose on the test "
            "set",
        )
    return replace(divided, how={**divided.how, "holdout": share, "held_out": count})


def _validated(settings: RunSettings, share: float) -> RunSettings:
    """Return settings that evaluate held-out examples as often as they evaluated the test set.

    An experiment records the holdout, so that the file in a trial's folder repeats the trial. One
    whose clients already hold out examples cannot record a second holdout; its record then leaves
    out data, partition and model.
    """
    schedule = {"every": settings.rounds, "clients_every": settings.evaluation.every}
    evaluation = settings.evaluation.model_copy(update=schedule)
    settings = settings.model_copy(update={"evaluation": evaluation})
    if not isinstance(settings, config.Experiment):
        return settings
    if settings.partition.holdout == 0:
        partition = settings.partition.model_copy(update={"holdout": share})
        return settings.model_copy(update={"partition": partition})
    return config.Run(**{name: getattr(settings, name) for name in config.Run.model_fields})
