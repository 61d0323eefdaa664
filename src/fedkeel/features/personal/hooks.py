"""Scores of clients in a run: when they are due, and of which models."""

from __future__ import annotations

from fedkeel.engine.base import ServerModel, TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.features.personal.scores import (
    evaluate_here,
    with_client_scores,
    with_personal_scores,
)
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.feature_hooks import Answers, Hooks


class ClientScorer(Hooks):
    """Scores the global model on each client's examples, and the clients' personal models.

    Args:
        prepared: the run.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def judged(
        self, row: RoundRecord, engine: TrainingEngine, server: Server
    ) -> RoundRecord | None:
        """Return the row with the scores of personal models, where the run is judged by them."""
        if self._prepared.judges == "global":
            return None
        return with_personal_scores(row, engine, self._prepared, server, judged=True)

    def concluded(
        self, row: RoundRecord, engine: TrainingEngine, server: Server, is_end: bool
    ) -> RoundRecord:
        """Return the row with the scores of each client, where they are due."""
        prepared = self._prepared
        if not prepared.settings.evaluation.clients_are_due(row.round, is_end):
            return row
        if prepared.plan.has_personal_models and row.personal is None:
            row = with_personal_scores(row, engine, prepared, server, judged=False)
        if prepared.setup.training.personal or prepared.plan.receiver is not None:  # none is whole
            return row
        return with_client_scores(row, engine, prepared, server)

    def answers(self, engine: TrainingEngine, server: Server) -> Answers | None:
        """Return what the personal models answer, where the run is judged by them."""
        prepared = self._prepared
        if prepared.judges == "global":
            return None
        if not prepared.engine_has_clients:
            setup = prepared.setup
            return Answers(evaluate_here(prepared, server, setup.metrics.of_pictures()).states)
        model = ServerModel.of(prepared.plan, server)
        return Answers(engine.count_personal(prepared.setup, model))
