"""Evaluation of the global model: on the test set, and on each client's own examples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedkeel.engine.base import Engine, Split, TrainingSetup
from fedkeel.engine.evaluation import split_examples
from fedkeel.method.round_values import Server
from fedkeel.records.rows import RoundRecord, Scores
from fedkeel.task.metrics import by_group


def with_test_scores(
    row: RoundRecord, engine: Engine, setup: TrainingSetup, server: Server
) -> RoundRecord:
    """Return the row with the scores on the test set, and by source where there are several.

    It is returned as it is where nobody measured any: a federation may have its test data on nodes.
    """
    measured, group, groups = _measure(engine, setup, server, "test")
    if not len(measured):
        return row
    row = replace(row, test=by_group(measured, torch.zeros_like(group), 1)[0])
    if groups == 1:
        return row
    scores = by_group(measured, group, groups)
    return replace(row, sources=dict(zip(setup.test.sources, scores, strict=True)))


def with_client_scores(
    row: RoundRecord, engine: Engine, setup: TrainingSetup, server: Server
) -> RoundRecord:
    """Return the row with the scores on each client's own examples, as columns [C].

    A client without examples to measure on has 0 of them, and None for its scores.
    """
    scores = by_group(*_measure(engine, setup, server, "clients"))
    columns: dict[str, list[float | None]] = {"examples": [float(s.examples) for s in scores]}
    for name in ("top1", "top3", "loss"):
        columns[name] = [_value(score, name) for score in scores]
    return replace(row, per_client=columns)


def _value(score: Scores, name: str) -> float | None:
    return getattr(score, name) if score.examples else None


def _measure(
    engine: Engine, setup: TrainingSetup, server: Server, split: Split
) -> tuple[Tensor, Tensor, int]:
    examples = split_examples(setup, split)
    buffers = server.buffers or setup.training.network.buffers
    measured = engine.evaluate(server.params, buffers, split)
    is_measured = ~measured[:, 0].isnan()  # a node that does not answer measures nothing
    groups = torch.from_numpy(examples.groups)
    return measured[is_measured], groups[is_measured], examples.group_count
