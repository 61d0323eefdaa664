"""Scores by client: of the global model on each one's own examples, and of personal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedkeel.engine.base import PersonalScores, ServerModel, TrainingEngine, TrainingSetup
from fedkeel.engine.evaluation import EXAMPLES, columns_by_group, evaluate, scores_by_group
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.runner.evaluate import evaluate_model
from fedkeel.task.metrics.metric_set import Measured, MetricSet


def with_client_scores(
    row: RoundRecord, engine: TrainingEngine, prepared: Prepared, server: Server
) -> RoundRecord:
    """Return the row with the scores on each client's own examples, as columns [C].

    A client without examples to measure on has 0 of them, and None for its scores.
    """
    if prepared.engine_has_clients:
        measured = evaluate_model(engine, prepared.setup, server, "clients")
    else:
        measured = evaluate_here(prepared, server)
    columns = columns_by_group(of_clients(prepared), "clients", measured)
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
    setup = of_clients(prepared)
    if prepared.engine_has_clients:
        model = ServerModel.of(prepared.plan, server)
        scores = engine.measure_personal(setup, model)
    else:
        measured = evaluate_here(prepared, server)
        total = scores_by_group(setup, "clients", measured, of_all=True)[0]
        scores = PersonalScores(total, scores_by_group(setup, "clients", measured))
    if judged:
        row = replace(row, test=scores.total if scores.total.examples else None)
    if setup.training.plan.has_personal_models:
        row = replace(row, personal=score_columns(scores.per_client, setup))
    return row


def score_columns(scores: Sequence[Scores], setup: TrainingSetup) -> dict[str, list[float | None]]:
    """Return scores by client as columns [C], see `with_client_scores`."""
    columns: dict[str, list[float | None]] = {EXAMPLES: [float(s.examples) for s in scores]}
    for info in setup.metrics.infos:
        columns[info.name] = [s.values[info.name] if s.examples else None for s in scores]
    return columns


def of_clients(prepared: Prepared) -> TrainingSetup:
    """Return the setup of a run with the clients as the data are divided."""
    if prepared.engine_has_clients:
        return prepared.setup
    return replace(prepared.setup, federation=prepared.clients)


def evaluate_here(prepared: Prepared, server: Server, metrics: MetricSet | None = None) -> Measured:
    """Return what this process measures of the model on the clients' own examples.

    It is for runs whose engine does not know the clients.

    Args:
        prepared: the run.
        server: has the model.
        metrics: what to measure; None for the metrics of the run.
    """
    setup = of_clients(prepared)
    setup = setup if metrics is None else replace(setup, metrics=metrics)
    buffers = server.buffers or setup.training.network.buffers
    with use_numerics(setup.precision):
        return evaluate(setup, server.params, buffers, "clients")
