"""Whether batches may be filled up with examples of weight 0: tried, not looked up.

torch's batch normalisation leaves padding out. What a module or a loss of one's own makes of a
batch as a whole forbids it: a mean over it, a sum of its weights, a count of what it has seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeel.engine.recording.draws import Drawn, Masks
from fedkeel.task.network import Batch, Network
from fedkeel.tree import Tree

_MORE = 2
"""Examples by which the batch is filled up."""

_GRADIENT = "gradient "


def bears_padding(network: Network, batch: Batch, masks: Masks | None) -> bool:
    """Return whether padding changes nothing: neither loss and gradients nor buffers.

    Args:
        network: the model.
        batch: a few examples, all real.
        masks: what the network draws in training; None where that is nothing.
    """
    if (masks is not None and not masks.by_example) or network.batch_statistics:
        return False
    b, more = len(batch.x), torch.arange(_MORE) % len(batch.x)
    weight = torch.ones(b + _MORE, dtype=network.dtype, device=batch.x.device)
    weight[b:] = 0.0
    filled = Batch(_longer(batch.x, more), _longer(batch.y, more), weight)
    drawn = Drawn(None, orders=masks.orders if masks else ())
    try:
        with torch.random.fork_rng(devices=[]):
            with drawn.fresh():
                plain = _learned(network, batch)
            with drawn.again([_longer(mask, more) for mask in drawn.masks]):
                padded = _learned(network, filled)
    except Exception:  # a loss that is a mean already, for one
        return False
    most = max((_size(t) for name, t in plain.items() if name.startswith(_GRADIENT)), default=0.0)
    return all(_same(one, padded[name], most) for name, one in plain.items())


def _longer(t: Tensor, more: Tensor) -> Tensor:
    return torch.cat([t, t[more.to(t.device)]])


def _learned(network: Network, batch: Batch) -> Tree:
    buffers = network.throwaway(network.buffers)
    loss, grads = network.value_and_grad(network.params, buffers, batch, "eager")
    dense = {f"{_GRADIENT}{k}": g.to_dense() if g.is_sparse else g for k, g in grads.items()}
    return {"loss": loss, **dense, **buffers}


def _same(one: Tensor, other: Tensor, most: float) -> bool:
    """Return whether two tensors are the same up to rounding.

    The gradient of a bias before a normalisation is zero but for rounding of what is as large as
    the largest gradient, `most`.
    """
    if not one.is_floating_point():
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    allowed = eps**0.5 * _size(one) + 64.0 * eps * most
    return torch.allclose(one, other, rtol=eps**0.5, atol=allowed, equal_nan=True)


def _size(t: Tensor) -> float:
    """Return the largest entry, without its sign."""
    if not t.numel() or not t.is_floating_point():
        return 0.0
    return float(t.nan_to_num(0.0, 0.0, 0.0).abs().max())
