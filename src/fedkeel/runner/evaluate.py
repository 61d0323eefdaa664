"""Evaluation of the global model: on the test set, and on each client's own examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedkeel.engine.base import PersonalScores, ServerModel, Split, TrainingEngine, TrainingSetup
from fedkeel.engine.evaluation import EXAMPLES, columns_by_group, evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.task.metrics.metric_set import Measured
from fedkeel.tree import Tree


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


def with_client_scores(
    row: RoundRecord, engine: TrainingEngine, prepared: Prepared, server: Server
) -> RoundRecord:
    """Return the row with the scores on each client's own examples, as columns [C].

    A client without examples to measure on has 0 of them, and None for its scores.
    """
    setup = prepared.setup
    if prepared.engine_has_clients:
        measured = evaluate_model(engine, setup, server, "clients")
    else:
        setup = replace(setup, federation=prepared.clients)
        measured = evaluate_pooled(prepared, server)
    columns = columns_by_group(setup, "clients", measured)
    counts = columns.pop(EXAMPLES)
    scores = {
        name: [value if n else None for value, n in zip(column, counts, strict=True)]
        for name, column in columns.items()
    }
    return replace(row, per_client={EXAMPLES: list(map(float, counts)), **scores})


def with_personal_scores(
    row: RoundRecord, engine: TrainingEngine, prepared: Prepared, server: Server, *, judged: bool
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
    if prepared.engine_has_clients:
        model = ServerModel(server.params, server.buffers, server.round)
        scores = engine.measure_personal(setup, model)
    else:
        setup = replace(setup, federation=prepared.clients)
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


def evaluate_pooled(prepared: Prepared, server: Server, of_pictures: bool = False) -> Measured:
    """Return what is measured of the model on the examples of clients that train in one place.

    Args:
        prepared: the run.
        server: has the model.
        of_pictures: whether to count for the pictures of a report in place of the metrics.
    """
    setup = replace(prepared.setup, federation=prepared.clients)
    if of_pictures:
        setup = replace(setup, metrics=setup.metrics.of_pictures())
    return _measured_here(setup, server.params, server.buffers or setup.training.network.buffers)


def evaluate_model(
    engine: TrainingEngine, setup: TrainingSetup, server: Server, split: Split
) -> Measured:
    """Return what an engine measures of the global model on the examples of a split."""
    training = setup.training
    params = {**server.params, **training.personal_params}
    return engine.evaluate(params, server.buffers or training.network.buffers, split)
