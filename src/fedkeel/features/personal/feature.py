"""Scores of clients as a feature of a run: every run has it, at the least after its last round."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from fedkeel import config
from fedkeel.engine.prepared import Draft, Prepared
from fedkeel.errors import CompositionError
from fedkeel.features.personal.hooks import ClientScorer
from fedkeel.method.grammar import parse
from fedkeel.runner.feature import Feature


class ScoresOfClients(Feature):
    """Scores of each client, by which a run may be judged in place of those of the test set."""

    settings: config.Evaluation

    @classmethod
    def of(cls, settings: config.Run, table: str) -> Self:
        """Return the feature."""
        return cls(settings.evaluation)

    def wrap(self, draft: Draft) -> Draft:
        """Return the run with the model by which it is judged."""
        several = draft.training.plan.receiver is not None
        is_default = (bool(draft.training.personal) or several) and not draft.is_baseline
        judges = self.settings.model
        if judges == "auto":
            judges = "personal" if is_default else "global"
        return replace(draft, judges=judges).with_feature(self)

    def check_nodes(self, settings: config.Run) -> None:
        """Refuse a method that sends each client a model of its own: all nodes are sent the same.

        Raises:
            CompositionError: names the part.
        """
        plan = parse(settings.method, weights=settings.weights)
        for name in sorted(plan.row_senders):
            raise CompositionError(
                f"{name} cannot be run in a Flower federation.",
                got=plan.expression,
                why="it sends each client a model of its own, and all nodes are sent one message",
                do="simulate the federation: fedkeel run; or choose ifca, whose clients choose "
                "among models that all are sent",
            )

    @classmethod
    def warnings(cls, prepared: Prepared) -> list[str]:
        """Return a warning where personal models are scored on what they are trained on."""
        is_scored = prepared.judges == "personal" or prepared.plan.has_personal_models
        federation = prepared.setup.federation
        on_nodes = federation.how["kind"] == "nodes"
        if not is_scored or on_nodes or federation.holdout_rows is not None:
            return []
        return [
            "personal models are scored on the examples that they are trained on, as clients hold "
            "none out: a model that has memorised them looks best. Set partition.holdout, such as "
            "0.25, in Python holdout=0.25 of fedkeel.from_clients"
        ]

    def hooks(self, prepared: Prepared) -> ClientScorer:
        """Return what scores clients."""
        return ClientScorer(prepared)
