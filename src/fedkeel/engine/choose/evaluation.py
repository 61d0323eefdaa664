"""Bytes that an evaluation keeps: sums of each group of examples, or values of each example."""

from __future__ import annotations

import torch

from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.evaluation import count_examples, most_states
from fedkeel.errors import ModelError, counted
from fedkeel.records.score import LOSS
from fedkeel.task.metrics.metric_set import LARGEST_EVALUATION


def evaluation_memory(setup: TrainingSetup) -> dict[str, int]:
    """Return the bytes that each metric keeps in an evaluation, of the test set or of all clients.

    They are counted once. Where shards are joined, and groups added up, they lie in memory up to
    three times.
    """
    on_nodes = setup.test.counts is not None  # a server has a row for each client, and no example
    metrics = setup.metrics.on_nodes() if on_nodes else setup.metrics
    rows, examples = (len(setup.federation), 0) if on_nodes else most_states(setup)
    numbers = {
        metric.name: size * rows for metric, size in zip(metrics.summed, metrics.sizes, strict=True)
    } | {
        metric.name: width * examples
        for metric, width in zip(metrics.pooled, metrics.widths, strict=True)
    }
    return {name: count * torch.float64.itemsize for name, count in numbers.items()}


def check_evaluation(setup: TrainingSetup) -> None:
    """Refuse metrics that keep too much, before anything is trained.

    Raises:
        ModelError: it is more than `LARGEST_EVALUATION`, or than a third of what is free.
    """
    needed, free = evaluation_memory(setup), free_memory()
    most = LARGEST_EVALUATION if free is None else min(LARGEST_EVALUATION, free // 3)
    if sum(needed.values()) <= most:
        return
    largest = max(needed, key=lambda name: needed[name])
    is_mean_loss = largest == LOSS and setup.training.network.has_mean_loss
    keeps_examples = any(metric.name == largest for metric in setup.metrics.pooled)
    of_all = max(count_examples(setup, "test"), count_examples(setup, "clients"))
    raise ModelError(
        "The loss is a mean over the batch, and the outputs of an evaluation are too many."
        if is_mean_loss
        else f"The metric {largest!r} keeps too much.",
        got=f"{format_bytes(needed[largest])} for "
        + (
            counted(of_all, "example")
            if keeps_examples
            else counted(len(setup.federation), "client")
        ),
        expected=f"at most {format_bytes(most)}",
        why="the mean of the batches' values would depend on evaluation.batch_size"
        if is_mean_loss
        else None,
        do="return one loss for each example, e.g. with reduction='none', or evaluate fewer "
        "examples"
        if is_mean_loss
        else "evaluate fewer examples or clients, or take a metric that keeps less, such as "
        "'accuracy' or 'macro_f1'",
    )
