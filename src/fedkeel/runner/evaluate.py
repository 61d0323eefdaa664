"""Evaluation of the global model: on the test set, and on each client's own examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedkeel.data.values import only_tensor
from fedkeel.engine.base import Engine, PersonalScores, ServerModel, Split, TrainingSetup
from fedkeel.engine.evaluation import EXAMPLES, columns_by_group, evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.round_values import Server
from fedkeel.records.pictures import BINS, CONFUSION, PROBABILITIES, QUANTITIES, Pictures
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree


def with_test_scores(
    row: RoundRecord, engine: Engine, setup: TrainingSetup, server: Server
) -> RoundRecord:
    """Return the row with the scores on the test set, and by source where there are several.

    It is returned as it is where nobody measured any: a federation may have its test data on nodes.
    """
    measured = _measure(engine, setup, server, "test")
    total = scores_by_group(setup, "test", measured, of_all=True)[0]
    if not total.examples:
        return row
    row = replace(row, test=total)
    if len(setup.test.sources) == 1:
        return row
    scores = scores_by_group(setup, "test", measured)
    return replace(row, sources=dict(zip(setup.test.sources, scores, strict=True)))


def measure_pictures(engine: Engine, setup: TrainingSetup, server: Server) -> Pictures | None:
    """Return the counts for the pictures of a report, None where the task has none."""
    metrics = setup.metrics.of_pictures()
    if not metrics.summed:
        return None
    states = _measure(engine, setup, server, "pictures").states
    counts = states[~states.isnan().any(dim=1)].sum(dim=0).long().numpy()
    tables = dict(zip(metrics.order, np.split(counts, np.cumsum(metrics.sizes)[:-1]), strict=True))
    classes = setup.federation.data.classes
    shapes = {CONFUSION: (classes, classes), PROBABILITIES: (-1, 2), QUANTITIES: (BINS, BINS)}
    shaped = {name: table.reshape(shapes[name]) for name, table in tables.items()}
    low, high = 0.0, 0.0
    if QUANTITIES in shaped:
        targets = only_tensor(setup.federation.data.y, "a picture")
        low, high = float(targets.min()), float(targets.max())
    return Pictures(
        confusion=shaped.get(CONFUSION),
        probabilities=shaped.get(PROBABILITIES),
        quantities=shaped.get(QUANTITIES),
        low=low,
        high=high,
    )


def with_client_scores(
    row: RoundRecord, engine: Engine, prepared: Prepared, server: Server
) -> RoundRecord:
    """Return the row with the scores on each client's own examples, as columns [C].

    A client without examples to measure on has 0 of them, and None for its scores.
    """
    setup = prepared.setup
    if prepared.pooled is None:
        measured = _measure(engine, setup, server, "clients")
    else:  # the engine knows no clients
        setup = replace(setup, federation=prepared.pooled)
        buffers = server.buffers or setup.training.network.buffers
        measured = _measured_here(setup, server.params, buffers)
    columns = columns_by_group(setup, "clients", measured)
    counts = columns.pop(EXAMPLES)
    scores = {
        name: [value if n else None for value, n in zip(column, counts, strict=True)]
        for name, column in columns.items()
    }
    return replace(row, per_client={EXAMPLES: list(map(float, counts)), **scores})


def with_personal_scores(
    row: RoundRecord, engine: Engine, prepared: Prepared, server: Server, *, judged: bool
) -> RoundRecord:
    """Return the row with the scores of the clients' personal models, as columns [C].

    Args:
        row: of the round.
        engine: keeps what clients keep.
        prepared: the run.
        server: after the round.
        judged: whether the model is judged by them: all clients' examples together are `row.test`.
    """
    setup = prepared.setup
    if prepared.pooled is None:
        model = ServerModel(server.params, server.buffers, server.round)
        scores = engine.measure_personal(setup, model)
    else:  # the engine knows no clients
        setup = replace(setup, federation=prepared.pooled)
        scores = scores_of_clients(
            setup, server.params, server.buffers or setup.training.network.buffers
        )
    if judged:
        row = replace(row, test=scores.total if scores.total.examples else None)
    if setup.training.plan.has_personal_models:
        row = replace(row, personal=score_columns(scores.per_client, setup))
    return row


def scores_of_clients(setup: TrainingSetup, params: Tree, buffers: Tree) -> PersonalScores:
    """Return a model's scores on each client's own examples, measured in this process."""
    measured = _measured_here(setup, params, buffers)
    total = scores_by_group(setup, "clients", measured, of_all=True)[0]
    return PersonalScores(total, scores_by_group(setup, "clients", measured))


def _measured_here(setup: TrainingSetup, params: Tree, buffers: Tree) -> Measured:
    with use_numerics(setup.precision):
        return evaluate(setup, params, buffers, "clients")


def score_columns(scores: Sequence[Scores], setup: TrainingSetup) -> dict[str, list[float | None]]:
    """Return scores by client as columns [C], see `with_client_scores`."""
    columns: dict[str, list[float | None]] = {EXAMPLES: [float(s.examples) for s in scores]}
    for info in setup.metrics.infos:
        columns[info.name] = [s.values[info.name] if s.examples else None for s in scores]
    return columns


def _measure(engine: Engine, setup: TrainingSetup, server: Server, split: Split) -> Measured:
    training = setup.training
    params = {**server.params, **training.personal_params}
    return engine.evaluate(params, server.buffers or training.network.buffers, split)
