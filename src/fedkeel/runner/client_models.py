"""The scores of the clients' own models, where each client has one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.engine.base import PersonalScores, ServerModel, TrainingEngine, TrainingSetup
from fedkeel.engine.evaluation import scores_by_group
from fedkeel.method.local_training import BUFFERS, PERSONAL
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.runner.evaluate import score_columns
from fedkeel.tree import Tree, tensors


class ClientModels:
    """Scores the model of each client, where each has its own; a score is the mean over them.

    Clients without training examples have no model. A client that has not trained yet has the
    initial one. A model is scored on the test set again only after it has trained.

    Args:
        setup: method, model, data and seed.
        engine: keeps the clients' models.
        judged_on_own: whether the models are judged on their clients' own examples, all clients
            together, in place of the test set.
    """

    def __init__(
        self, setup: TrainingSetup, engine: TrainingEngine, judged_on_own: bool = False
    ) -> None:
        self._setup, self._engine, self._judged_on_own = setup, engine, judged_on_own
        self._test: dict[int, tuple[int, list[Scores]]] = {}  # steps done, scores, by client
        self._initial: list[Scores] | None = None

    def with_test_scores(self, row: RoundRecord) -> RoundRecord:
        """Return the row with the scores by which the models are judged.

        These are the mean scores on the test set, and by source if several; or those on the
        clients' own examples.
        """
        if self._judged_on_own:
            total = self._own_scores(row.round).total
            return replace(row, test=total if total.examples else None)
        clients = [int(k) for k in np.flatnonzero(self._setup.federation.sizes)]
        by_client = self._scores(clients, self._test, self._test_scores)
        total, *by_source = (_mean(scores) for scores in zip(*by_client, strict=True))
        names = self._setup.test.sources
        sources = dict(zip(names, by_source, strict=True)) if len(names) > 1 else {}
        return replace(row, test=total, sources=sources or row.sources)

    def with_client_scores(self, row: RoundRecord) -> RoundRecord:
        """Return the row with the scores of each client's model on its own examples, [C]."""
        scores = self._own_scores(row.round).per_client
        return replace(row, per_client=score_columns(scores, self._setup))

    def counts(self, round: int) -> Tensor:
        """Return [R, S] what the models answer, on the examples that they are judged on.

        The counts are those of `MetricSet.of_pictures`: a row for each model on the test set, or
        for each client's own examples.
        """
        if self._judged_on_own:
            return self._engine.count_personal(self._setup, self._initial_model(round))
        clients = np.flatnonzero(self._setup.federation.sizes).tolist()
        measured = [self._engine.evaluate(*self._model(k), "pictures") for k in clients]
        return torch.stack([one.states.sum(dim=0) for one in measured])

    def _scores(
        self,
        clients: Sequence[int],
        known: dict[int, tuple[int, list[Scores]]],
        measure: Callable[[int], list[Scores]],
    ) -> list[list[Scores]]:
        steps = self._engine.done(np.array(clients, dtype=np.int64))
        for k, done in zip(clients, steps.tolist(), strict=True):
            if k not in known or known[k][0] != done:
                known[k] = done, measure(k)
        return [known[k][1] for k in clients]

    def _test_scores(self, client: int) -> list[Scores]:
        """Return a model's scores on the test set, then on each of its sources."""
        state = self._engine.client_state(client)
        if state is None and self._initial is not None:
            return self._initial
        measured = self._engine.evaluate(*self._model(client), "test")
        scores = scores_by_group(self._setup, "test", measured, of_all=True)
        if len(self._setup.test.sources) > 1:
            scores += scores_by_group(self._setup, "test", measured)
        if state is None:
            self._initial = scores
        return scores

    def _own_scores(self, round: int) -> PersonalScores:
        """Return the scores of the clients' models on their own examples."""
        return self._engine.measure_personal(self._setup, self._initial_model(round))

    def _initial_model(self, round: int) -> ServerModel:
        network = self._setup.training.network
        return ServerModel(network.params, network.buffers, round)

    def _model(self, client: int) -> tuple[Tree, Tree]:
        """Return the parameters and the buffers of a client's model."""
        network, state = self._setup.training.network, self._engine.client_state(client)
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
