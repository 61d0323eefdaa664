"""A baseline as a feature of a run: plain training of each client alone, or in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from fedkeel import config
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.features.baselines.client_models import ClientModels
from fedkeel.features.baselines.declaration import CENTRALISED, BaselinesDeclaration
from fedkeel.features.baselines.training import described, goes_on, pooled_work, shares_nothing
from fedkeel.records.baselines import LOCAL
from fedkeel.runner.feature import Feature


class Baseline(Feature):
    """Plain training under the name of a baseline, whose optimiser goes on from round to round."""

    settings: config.Run
    method = "fedavg"

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self | None:
        """Return the baseline where the method is the name of one."""
        return cls(settings) if settings.method in BaselinesDeclaration.baselines else None

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with each client alone, or with all examples in one place."""
        name, training = self.settings.method, goes_on(draft.training)
        training = replace(training, plan=replace(training.plan, expression=name))
        draft = replace(draft, training=training, is_baseline=True)
        if name == LOCAL:
            draft = replace(draft, training=shares_nothing(training))
        if name == CENTRALISED:
            local = pooled_work(training.local, draft.settings, draft.clients.sizes)
            draft = replace(
                draft,
                training=replace(training, local=local),
                federation=draft.federation.in_one_place(),
                cohort=config.Cohort(),
            )
        return draft.with_feature(self)

    def description(self, prepared: Prepared) -> str:
        """Return the baseline in words."""
        return described(self.settings.method, prepared.setup.training.local)

    def hooks(self, prepared: Prepared) -> ClientModels | None:
        """Return what scores the models of all clients, where each client trains alone."""
        if self.settings.method != LOCAL:
            return None
        return ClientModels(prepared)
