"""The scores of the clients' own models, where each client has one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedkeel.engine.base import PersonalScores, ServerModel, TrainingEngine
from fedkeel.engine.evaluation import scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.features.personal.scores import score_columns
from fedkeel.method.local_training import BUFFERS, PERSONAL
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.runner.feature_hooks import Answers, Hooks
from fedkeel.tree import Tree, tensors


class ClientModels(Hooks):
    """Scores the model of each client, where each has its own; a score is the mean over them.

    Clients without training examples have no model. A client that has not trained yet has the
    initial one. A model is scored on the test set again only after it has trained.

    Where personal models are judged, they are judged on their clients' own examples, all clients
    together, in place of the test set.

    Args:
        prepared: the run.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._setup, self._judged_on_own = prepared.setup, prepared.judges == "personal"
        self._evaluation = prepared.settings.evaluation
        self._test: dict[int, tuple[int, list[Scores]]] = {}  # steps done, scores, by client
        self._initial: list[Scores] | None = None

    def judged(self, row: RoundRecord, engine: TrainingEngine, server: Server) -> RoundRecord:
        """Return the row with the scores by which the models are judged.

        These are the mean scores on the test set, and by source if several; or those on the
        clients' own examples.
        """
        if self._judged_on_own:
            total = self._own_scores(engine, row.round).total
            return replace(row, test=total if total.examples else None)
        clients = [int(k) for k in np.flatnonzero(self._setup.federation.sizes)]
        by_client = self._scores(engine, clients)
        total, *by_source = (_mean(scores) for scores in zip(*by_client, strict=True))
        names = self._setup.test.sources
        sources = dict(zip(names, by_source, strict=True)) if len(names) > 1 else {}
        return replace(row, test=total, sources=sources or row.sources)

    def concluded(
        self, row: RoundRecord, engine: TrainingEngine, server: Server, is_end: bool
    ) -> RoundRecord:
        """Return the row with the scores of each client's model on its own examples, if due."""
        if not self._evaluation.clients_are_due(row.round, is_end):
            return row
        scores = self._own_scores(engine, row.round).per_client
        return replace(row, per_client=score_columns(scores, self._setup))

    def answers(self, engine: TrainingEngine, server: Server) -> Answers:
        """Return what the models answer, on the examples that they are judged on.

        There is a row for each model on the test set, or for each client's own examples.
        """
        if self._judged_on_own:
            return Answers(engine.count_personal(self._setup, self._initial_model(server.round)))
        clients = np.flatnonzero(self._setup.federation.sizes).tolist()
        measured = [engine.evaluate(*self._model(engine, k), "pictures") for k in clients]
        return Answers(torch.stack([one.states.sum(dim=0) for one in measured]), of_models=True)

    def _scores(self, engine: TrainingEngine, clients: Sequence[int]) -> list[list[Scores]]:
        known, steps = self._test, engine.done(np.array(clients, dtype=np.int64))
        for k, done in zip(clients, steps.tolist(), strict=True):
            if k not in known or known[k][0] != done:
                known[k] = done, self._test_scores(engine, k)
        return [known[k][1] for k in clients]

    def _test_scores(self, engine: TrainingEngine, client: int) -> list[Scores]:
        """Return a model's scores on the test set, then on each of its sources."""
        state = engine.client_state(client)
        if state is None and self._initial is not None:
            return self._initial
        measured = engine.evaluate(*self._model(engine, client), "test")
        scores = scores_by_group(self._setup, "test", measured, of_all=True)
        if len(self._setup.test.sources) > 1:
            scores += scores_by_group(self._setup, "test", measured)
        if state is None:
            self._initial = scores
        return scores

    def _own_scores(self, engine: TrainingEngine, round: int) -> PersonalScores:
        """Return the scores of the clients' models on their own examples."""
        return engine.measure_personal(self._setup, self._initial_model(round))

    def _initial_model(self, round: int) -> ServerModel:
        return ServerModel({}, {}, round)  # nothing of a client's model is the server's

    def _model(self, engine: TrainingEngine, client: int) -> tuple[Tree, Tree]:
        """Return the parameters and the buffers of a client's model."""
        network, state = self._setup.training.network, engine.client_state(client)
        if state is None:
            return network.params, network.buffers
        return tensors(state[PERSONAL]), tensors(state[BUFFERS]) if BUFFERS in state else {}


def _mean(scores: Sequence[Scores]) -> Scores:
    """Return the mean of each metric over models that were scored on the same examples."""
    names = scores[0].values
    return Scores(
        scores[0].examples,
        {name: statistics.fmean(score.values[name] for score in scores) for name in names},
    )
