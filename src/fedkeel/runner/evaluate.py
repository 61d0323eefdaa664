"""What the global model comes to: on the test set, and on each client's own examples."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.engine.base import Engine, Split, TrainingSetup
from fedkeel.engine.evaluation import split_examples
from fedkeel.method.round_values import Server
from fedkeel.records.rows import Scores
from fedkeel.task.metrics import by_group


def on_test(
    engine: Engine, setup: TrainingSetup, server: Server
) -> tuple[Scores | None, dict[str, Scores]]:
    """Return the scores on the test set, and by source where there are several.

    None where nobody was there to measure any: a federation may have its test data on its nodes.
    """
    measured, group, groups = _measure(engine, setup, server, "test")
    if not len(measured):
        return None, {}
    everything = by_group(measured, torch.zeros_like(group), 1)[0]
    if groups == 1:
        return everything, {}
    return everything, dict(zip(setup.test.sources, by_group(measured, group, groups), strict=True))


def on_clients(
    engine: Engine, setup: TrainingSetup, server: Server
) -> dict[str, list[float | None]]:
    """Return the scores on each client's own examples, as columns of one entry for each client.

    A client without examples to measure on has 0 of them, and None for its scores.
    """
    found = by_group(*_measure(engine, setup, server, "clients"))
    columns: dict[str, list[float | None]] = {"examples": [float(s.examples) for s in found]}
    for name in ("top1", "top3", "loss"):
        columns[name] = [getattr(s, name) if s.examples else None for s in found]
    return columns


def _measure(
    engine: Engine, setup: TrainingSetup, server: Server, split: Split
) -> tuple[Tensor, Tensor, int]:
    examples = split_examples(setup, split)
    buffers = server.buffers or setup.training.network.buffers
    measured = engine.evaluate(server.params, buffers, split)
    there = ~measured[:, 0].isnan()  # a node that does not answer measures nothing
    groups = torch.from_numpy(examples.groups)
    return measured[there], groups[there], examples.group_count
