"""The counts for the pictures of a report, of the models that the last scores of a run are of."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fedkeel.data.values import only_tensor
from fedkeel.engine.base import ServerModel, TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.method.round_values import Server
from fedkeel.records.pictures import (
    BINS,
    CONFUSION,
    PROBABILITIES,
    QUANTITIES,
    UNANSWERED,
    Ints,
    MeanCurve,
    Pictures,
)
from fedkeel.runner.client_models import ClientModels
from fedkeel.runner.evaluate import evaluate_model, evaluate_pooled


def measure_pictures(
    engine: TrainingEngine, prepared: Prepared, server: Server, models: ClientModels | None
) -> Pictures | None:
    """Return the counts for the pictures of a report, None where the task has none.

    Args:
        engine: keeps what clients keep.
        prepared: the run.
        server: after the last round.
        models: the clients' models, where each client trains alone.
    """
    metrics = prepared.setup.metrics.of_pictures()
    if not metrics.summed:
        return None
    states = _counts(engine, prepared, server, models)
    states = states[~states.isnan().any(dim=1)]
    classes = prepared.setup.federation.data.classes
    shapes = {CONFUSION: (classes, classes), PROBABILITIES: (-1, 2), QUANTITIES: (BINS, BINS)}
    ends = np.cumsum(metrics.sizes)[:-1]

    def tables(counts: Tensor) -> dict[str, Ints]:
        by_name: dict[str, Ints] = {}
        for name, cells in zip(metrics.order, np.split(counts.long().numpy(), ends), strict=True):
            shape = shapes[name]
            if name != PROBABILITIES:
                cells, by_name[UNANSWERED] = np.split(cells, [shape[0] * shape[1]])
            by_name[name] = cells.reshape(shape)
        return by_name

    total, low, high, curve = tables(states.sum(dim=0)), 0.0, 0.0, None
    unanswered = total.get(UNANSWERED)
    if QUANTITIES in total:
        targets = only_tensor(prepared.setup.federation.data.y, "a picture")
        low, high = float(targets.min()), float(targets.max())
    is_mean = models is not None and not prepared.judges_personal_models
    if is_mean and PROBABILITIES in total:
        curve = MeanCurve.of([tables(counts)[PROBABILITIES] for counts in states])
    return Pictures(
        confusion=total.get(CONFUSION),
        probabilities=total.get(PROBABILITIES),
        quantities=total.get(QUANTITIES),
        low=low,
        high=high,
        curve=curve,
        unanswered=unanswered if unanswered is not None and unanswered.any() else None,
    )


def _counts(
    engine: TrainingEngine, prepared: Prepared, server: Server, models: ClientModels | None
) -> Tensor:
    """Return [R, S] counts, whose sum is that of all answers; NaN of a client that gave none."""
    if models is not None:
        return models.counts(server.round)
    if not prepared.judges_personal_models:
        return evaluate_model(engine, prepared.setup, server, "pictures").states
    if prepared.pooled is not None:  # the engine knows no clients
        return evaluate_pooled(prepared, server, of_pictures=True).states
    model = ServerModel(server.params, server.buffers, server.round)
    return engine.count_personal(prepared.setup, model)
