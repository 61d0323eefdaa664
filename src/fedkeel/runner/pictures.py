"""The counts for the pictures of a report, of the models that the last scores of a run are of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedkeel.base.values import only_tensor
from fedkeel.engine.base import TrainingEngine
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
from fedkeel.runner.evaluate import evaluate_model
from fedkeel.runner.feature_hooks import Answers, Hooks


def measure_pictures(
    engine: TrainingEngine, prepared: Prepared, server: Server, hooks: Sequence[Hooks]
) -> Pictures | None:
    """Return the counts for the pictures of a report, None where the task has none.

    Args:
        engine: keeps what clients keep.
        prepared: the run.
        server: after the last round.
        hooks: of the run's features; some may judge other models than the global one.
    """
    metrics = prepared.setup.metrics.of_pictures()
    if not metrics.summed:
        return None
    answers = _answers(engine, prepared, server, hooks)
    states = answers.counts
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
    if answers.of_models and PROBABILITIES in total:
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


def _answers(
    engine: TrainingEngine, prepared: Prepared, server: Server, hooks: Sequence[Hooks]
) -> Answers:
    for each in hooks:
        if (answers := each.answers(engine, server)) is not None:
            return answers
    return Answers(evaluate_model(engine, prepared.setup, server, "pictures").states)
