"""Metrics of examples, and their sums and means by group."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.records.rows import Scores
from fedkeel.task.network import Network
from fedkeel.tree import Tree

COLUMNS = ("top1", "top3", "loss")
"""What is measured of each example: hit at rank 1, hit within rank 3, loss."""


@torch.no_grad()
def measure(
    network: Network,
    params: Tree,
    buffers: Tree,
    x: Tensor,
    y: Tensor,
    group: Tensor | None = None,
) -> Tensor:
    """Evaluate examples.

    A loss that is a mean, [], is taken of each group by itself, and counts for all in it.

    Args:
        network: the model.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] inputs.
        y: [B] labels.
        group: [B] group that each example counts for, on the processor; None where all are one.

    Returns:
        [B, 3] in float64: top-1 hit, top-3 hit, loss. Scores with a NaN among them hit nothing.
    """
    logits = network.test_logits(params, buffers, x)
    best = logits.topk(min(3, logits.shape[1]), dim=1).indices == y[:, None]
    best &= ~logits.isnan().any(dim=1, keepdim=True)
    hits = torch.stack([best[:, 0], best.any(dim=1)], dim=1).double()
    return torch.cat([hits, _losses(network, logits, y, group).double()[:, None]], dim=1)


def _losses(network: Network, logits: Tensor, y: Tensor, group: Tensor | None) -> Tensor:
    """Return the loss of each example, [B]; where the loss is a mean, that of its group."""
    losses = network.task_losses(logits, y)
    if losses.ndim:
        return losses
    if group is None or bool((group == group[0]).all()):
        return losses.expand(len(logits))
    out = losses.new_empty(len(logits))
    for one in sorted(set(group.tolist())):
        rows = torch.nonzero(group == one).flatten().to(logits.device)
        out[rows] = network.task_losses(logits[rows], y[rows])
    return out


def by_group(measured: Tensor, group: Tensor, groups: int) -> list[Scores]:
    """Return the means of each group of examples.

    Args:
        measured: [N, 3] from `measure`.
        group: [N] index of the group that each example counts for.
        groups: G, the number of groups.

    >>> rows = torch.tensor([[1.0, 1.0, 0.5], [0.0, 1.0, 1.5]]).double()
    >>> by_group(rows, torch.tensor([0, 0]), 1)
    [Scores(examples=2, top1=0.5, top3=1.0, loss=1.0)]
    """
    sums = torch.zeros(groups, len(COLUMNS), dtype=torch.float64).index_add_(0, group, measured)
    counts = torch.bincount(group, minlength=groups)
    means = sums / counts.clamp(min=1)[:, None]
    return [Scores(int(n), *row) for n, row in zip(counts.tolist(), means.tolist(), strict=True)]
