"""Whether batches may be filled up with examples of weight 0: tried, not looked up.

torch's batch normalisation leaves padding out. What a module, a loss or a part of one's own makes
of a batch as a whole forbids it: a mean over it, a sum of its weights, a count of what it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.engine.compiler.dropout_masks import Drawn, Masks
from fedkeel.method.context import ByPart, ClientInfo, Message, Population
from fedkeel.method.local_loop import LocalTraining, client_start, client_step, client_survey, kept
from fedkeel.method.server_round import server_message, server_start, surveyed
from fedkeel.task.network import Batch, Network
from fedkeel.tree import State, Tree

_MORE = 2
"""Examples by which the batch is filled up."""

_GRADIENT = "gradient "

Learn = Callable[[Batch], Tree]
"""Batch -> what is learnt from it: gradients under names that begin so, and other numbers."""


def network_bears_padding(network: Network, batch: Batch, masks: Masks | None) -> bool:
    """Return whether padding changes nothing: neither loss and gradients nor buffers.

    Args:
        network: the model.
        batch: a few examples, all real.
        masks: what the network draws in training; None where that is nothing.
    """
    if network.batch_statistics:
        return False

    def learn(batch: Batch) -> Tree:
        buffers = network.copy_buffers(network.buffers)
        loss, grads = network.value_and_grad(network.params, buffers, batch, "eager")
        return {"loss": loss, **_gradients(grads), **buffers}

    return _bears(learn, batch, masks, network)


def method_bears_padding(
    training: LocalTraining, population: Population, classes: int, batch: Batch, masks: Masks | None
) -> bool:
    """Return whether padding changes nothing in a client's first step, by any of the parts.

    It is tried twice: from what parts send and keep at first, which may be zeros that hide what
    they are multiplied with, and from random numbers in their place.

    Args:
        training: method, model and local training.
        population: how many clients there are.
        classes: Y.
        batch: a few examples, all real.
        masks: what the network draws in training; None where that is nothing.
    """
    client_info = ClientInfo(0, len(batch.x), torch.bincount(batch.y, minlength=classes))
    try:
        server = server_start(
            training.plan, training.network, population, training.buffers == "average"
        )
        message = server_message(training.plan, server, lr=1.0)
        client_state, _ = kept(training, message, None)
        if training.plan.surveys:
            answers = client_survey(training, message, client_state, client_info, lambda: batch)
            alone = tree.map_tensors(lambda t: t[None], dict(answers))
            message = surveyed(message, tree.substates(alone), np.ones(1))
    except Exception:  # the rehearsal of a run says what is wrong
        return False
    other = replace(message, broadcast=_random(message.broadcast))
    scale = max(map(_size, message.params.values()))
    return all(
        _bears(_step(training, client_info, *states), batch, masks, training.network, scale)
        for states in ((message, client_state, False), (other, _random(client_state), True))
    )


def _step(
    training: LocalTraining,
    client_info: ClientInfo,
    message: Message,
    client_state: ByPart,
    random: bool,
) -> Learn:
    """Return what makes a first step on a batch, from random numbers carried where so wanted."""
    noise = _random({"": dict(message.params)})[""]

    def learn(batch: Batch) -> Tree:
        client, progress = client_start(training, message, client_state, client_info, lambda: batch)
        if random:
            progress = replace(progress, carry=_random(progress.carry))
        rows = torch.arange(len(batch.x), device=batch.x.device)
        after = client_step(client, progress, batch, rows, rows, noise=tree.tensors(noise))
        moved = _gradients(tree.sub(after.params, client.start))
        carried = dict(tree.walk({"carry": dict(after.carry)}))
        return {"loss": after.loss, **moved, **after.buffers, **carried}

    return learn


def _random(states: Mapping[str, State]) -> ByPart:
    """Return states with normal numbers, the same each time, in place of their real ones."""
    source = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return torch.randn(t.shape, generator=source, dtype=t.dtype).to(t.device)

    return cast(ByPart, tree.map_tensors(drawn, dict(states)))


def _gradients(grads: Tree) -> Tree:
    return {f"{_GRADIENT}{k}": g.to_dense() if g.is_sparse else g for k, g in grads.items()}


def _bears(
    learn: Learn, batch: Batch, masks: Masks | None, network: Network, scale: float = 0.0
) -> bool:
    """Return whether the same is learnt from a batch whatever it is filled up with.

    Between two fillings there is not even rounding; without any, products may be added up in
    another order, of numbers as large as `scale` or the largest gradient.
    """
    if masks is not None and not masks.by_example:
        return False
    count = len(batch.x)
    fillings = [torch.arange(first, first + _MORE) % count for first in (0, 1)]
    weight = torch.ones(count + _MORE, dtype=network.dtype, device=batch.x.device)
    weight[count:] = 0.0
    drawn = Drawn(None, orders=masks.orders if masks else ())
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with drawn.fresh():
                plain = learn(batch)
            filled = []
            for more in fillings:
                longer = Batch(_longer(batch.x, more), _longer(batch.y, more), weight)
                with drawn.again([_longer(mask, more) for mask in drawn.masks]):
                    filled.append(learn(longer))
    except Exception:  # a loss that is a mean already, for one
        return False
    one, other = filled
    most = max([scale, *(_size(t) for name, t in plain.items() if name.startswith(_GRADIENT))])
    return all(
        _same(t, one[name], most) and torch.equal(one[name].nan_to_num(), other[name].nan_to_num())
        for name, t in plain.items()
    )


def _longer(t: Tensor, more: Tensor) -> Tensor:
    return torch.cat([t, t[more.to(t.device)]])


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
