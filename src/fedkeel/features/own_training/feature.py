"""Local training by the user's own function, as a feature of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from fedkeel import config
from fedkeel.engine.prepared import Draft
from fedkeel.features.own_training.legality import check_parts
from fedkeel.features.own_training.training import named_training
from fedkeel.method.compose import compose
from fedkeel.method.part import Capability
from fedkeel.runner.feature import Feature


class UserTraining(Feature):
    """The user's function trains clients: the method has no local steps to act in."""

    settings: config.Run

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self:
        """Return the feature: a function may also be given in Python, which no setting tells."""
        return cls(settings)

    def wrap(self, draft: Draft) -> Draft:
        """Return the run without local steps, or refuse a method that acts in them."""
        own = draft.own
        if self.settings.local.train is not None:
            own = named_training(self.settings.local.train, own)
        if own is None:
            return draft
        check_parts(draft.training.plan.parts)
        provides = draft.provides - {Capability.LOCAL_STEPS}
        plan = compose(draft.training.plan.parts, provides, self.settings.weights)
        training = replace(draft.training, plan=plan)
        return replace(draft, training=training, provides=provides, own=own).with_feature(self)

    def identity(self, values: object) -> None:
        """Return nothing: the key has what the function does, and no settings of its own."""
