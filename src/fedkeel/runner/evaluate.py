"""Evaluation of the models by which a run is judged, mostly of the global one on the test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedkeel.engine.base import Split, TrainingEngine, TrainingSetup
from fedkeel.engine.evaluation import scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.feature_hooks import Hooks, scored
from fedkeel.task.metrics.metric_set import Measured


def judged(
    hooks: Sequence[Hooks],
    row: RoundRecord,
    engine: TrainingEngine,
    prepared: Prepared,
    server: Server,
) -> RoundRecord:
    """Return the row with the scores by which the run is judged: as a feature says, else tested."""
    for each in hooks:
        if (other := each.judged(row, engine, server)) is not None:
            return other
    row = with_test_scores(row, engine, prepared.setup, server)
    return scored(hooks, row, server)


def with_test_scores(
    row: RoundRecord, engine: TrainingEngine, setup: TrainingSetup, server: Server
) -> RoundRecord:
    """Return the row with the scores on the test set, and by source where there are several.

    It is returned as it is where nobody measured any: a federation may have its test data on nodes.
    """
    measured = evaluate_model(engine, setup, server, "test")
    total = scores_by_group(setup, "test", measured, of_all=True)[0]
    if not total.examples:
        return row
    row = replace(row, test=total)
    if len(setup.test.sources) == 1:
        return row
    scores = scores_by_group(setup, "test", measured)
    return replace(row, sources=dict(zip(setup.test.sources, scores, strict=True)))


def evaluate_model(
    engine: TrainingEngine, setup: TrainingSetup, server: Server, split: Split
) -> Measured:
    """Return what an engine measures of the global model on the examples of a split."""
    training = setup.training
    params = {**server.params, **training.personal_params}
    return engine.evaluate(params, server.buffers or training.network.buffers, split)
