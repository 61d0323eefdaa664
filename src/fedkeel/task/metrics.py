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
def measure(network: Network, params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> Tensor:
    """Evaluate examples.

    Args:
        network: the model.
        params: its parameters.
        buffers: its buffers.
        x: [B, ...] inputs.
        y: [B] labels.

    Returns:
        [B, 3] in float64: top-1 hit, top-3 hit, loss.
    """
    logits = network.test_logits(params, buffers, x)
    best = logits.topk(min(3, logits.shape[1]), dim=1).indices == y[:, None]
    hits = torch.stack([best[:, 0], best.any(dim=1)], dim=1).double()
    return torch.cat([hits, network.example_losses(logits, y).double()[:, None]], dim=1)


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
