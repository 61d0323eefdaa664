"""Metrics of single examples, and their sums and means by group."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.records.rows import Scores
from fedkeel.task.network import Network
from fedkeel.tree import Tree

COLUMNS = ("top1", "top3", "loss")
"""What is measured of each example: hit at rank 1, hit within rank 3, loss."""


@torch.no_grad()
def measure(network: Network, params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate examples.

    A loss that is a mean, [], cannot be put together from batches: class weights or labels that it
    ignores decide how much an example counts. So the outputs are returned, for `by_group`.

    Args:
        network: the model.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] inputs.
        y: [B] labels.

    Returns:
        [B, 3] in float64: top-1 hit, top-3 hit, loss. Scores with a NaN among them hit nothing.
        Where the loss is a mean, [B, 3 + Y]: its column is 0, and the outputs come after it.
    """
    logits = network.test_logits(params, buffers, x)
    best = logits.topk(min(3, logits.shape[1]), dim=1).indices == y[:, None]
    best &= ~logits.isnan().any(dim=1, keepdim=True)
    hits = torch.stack([best[:, 0], best.any(dim=1)], dim=1).double()
    losses = network.task_losses(logits, y)
    if losses.ndim:
        return torch.cat([hits, losses.double()[:, None]], dim=1)
    return torch.cat([hits, hits.new_zeros(len(hits), 1), logits.double()], dim=1)


@torch.no_grad()
def by_group(
    network: Network,
    measured: Tensor,
    y: Tensor,
    group: Tensor,
    groups: int,
    counts: Tensor | None = None,
) -> list[Scores]:
    """Return the scores of each group of examples.

    Each is the mean over the examples of the group; a loss that is a mean is that of all of them
    at once.

    Args:
        network: the model, on the processor.
        measured: [N, 3] or [N, 3 + Y] from `measure`.
        y: [N] labels.
        group: [N] index of the group that each example counts for.
        groups: G, the number of groups.
        counts: [N] number of examples that each row is the sum of; None for one each.

    >>> rows = torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 1.5]]).double()
    >>> network = Network(torch.nn.Linear(4, 2))
    >>> by_group(network, rows, torch.tensor([0, 1]), torch.tensor([0, 0]), 1)
    [Scores(examples=2, top1=0.5, top3=1.0, loss=1.0)]
    """
    rows, outputs = measured[:, : len(COLUMNS)], measured[:, len(COLUMNS) :]
    sums = torch.zeros(groups, len(COLUMNS), dtype=torch.float64).index_add_(0, group, rows)
    rows_of_group = torch.bincount(group, minlength=groups)
    examples_of_group = rows_of_group
    if counts is not None:
        examples_of_group = torch.zeros_like(rows_of_group).index_add_(0, group, counts)
    means = sums / examples_of_group.clamp(min=1)[:, None]
    if outputs.shape[1]:
        order = torch.split(torch.argsort(group, stable=True), rows_of_group.tolist())
        for index, examples in enumerate(order):
            if len(examples):
                scores = outputs[examples].to(network.dtype)
                means[index, 2] = network.task_losses(scores, y[examples])
    numbers = zip(examples_of_group.tolist(), means.tolist(), strict=True)
    return [Scores(int(n), *row) for n, row in numbers]
