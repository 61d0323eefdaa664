"""Finds out by trial whether batches may be filled up with examples of weight 0.

torch's batch normalisation leaves padding out. A module, a loss or a part of a user's own may look
at a batch as a whole: take a mean over it, add up its weights, count what it has seen. Then padding
would change the results.

Each function returns why batches may not be padded, "" where they may. The rehearsal of a run has
trained the same model before, so an error in a trial is not an error of the run: it only leaves
open whether padding is safe, and the error is the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.values import map_values, tensors_of
from fedkeel.engine.client_inputs import label_counts
from fedkeel.engine.compiler.dropout_masks import DrawnMasks, RandomDraws
from fedkeel.errors import first_line
from fedkeel.method.context import ByPart, ClientInfo, Message, Population
from fedkeel.method.local_loop import client_start, client_step
from fedkeel.method.local_training import ClientTraining, start_client_state
from fedkeel.method.server_memory import server_start
from fedkeel.method.server_round import server_message
from fedkeel.method.survey import add_mean_answers, client_survey
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import State, Tree

_PADDING = 2
"""Examples by which the batch is filled up."""

_GRADIENT = "gradient "

Learn = Callable[[Batch], Tree]
"""Batch -> what is learnt from it: gradients under names that begin so, and other numbers."""


def network_obstacle(network: Network, batch: Batch, draws: RandomDraws | None) -> str:
    """Return why padding would change the network's loss, gradients or buffers, "" if it does not.

    Args:
        network: the model.
        batch: a few examples, all real.
        draws: what the network draws in training; None where it draws nothing.
    """
    if network.batch_statistics:
        return "batch normalisation uses the statistics of the batch in evaluation"

    def learn(batch: Batch) -> Tree:
        buffers = network.copy_buffers(network.buffers)
        loss, grads = network.value_and_grad(network.params, buffers, batch, "eager")
        return {"loss": loss, **_as_gradients(grads), **buffers}

    return _obstacle(learn, batch, draws, network)


def method_obstacle(
    training: ClientTraining,
    population: Population,
    classes: int,
    batch: Batch,
    draws: RandomDraws | None,
) -> str:
    """Return why padding would change a client's first step by any of the parts, "" if it does not.

    It is tried twice: from the first broadcasts and client states, which may be zeros that hide
    what they are multiplied with, and from random numbers in their place.

    Args:
        training: method, model and local training.
        population: how many clients there are.
        classes: Y.
        batch: a few examples, all real.
        draws: what the network draws in training; None where it draws nothing.
    """
    dtype = training.network.dtype
    examples, counts = torch.tensor(len(batch)), label_counts(batch.y, classes)
    client_info = ClientInfo(torch.tensor(0), examples.to(dtype), counts.to(dtype))
    plan, network = training.plan, training.network
    try:
        server = server_start(training, population)
        message = server_message(plan, server, lr=1.0)
        client_state, _ = start_client_state(training, message, None)
        if plan.surveys:
            answers = client_survey(training, message, client_state, client_info, lambda: batch)
            stacked = tree.map_tensors(lambda t: t[None], dict(answers))
            message = add_mean_answers(message, tree.substates(stacked), np.ones(1))
    except Exception as error:
        return f"a trial of the method raises {first_line(error)}"
    random_message = replace(message, broadcast=_random_like(message.broadcast))
    scale = max(map(_largest_entry, (message.params or network.params).values()))
    first_step = _first_step(training, client_info, message, client_state, False)
    random_step = _first_step(
        training, client_info, random_message, _random_like(client_state), True
    )
    return _obstacle(first_step, batch, draws, network, scale) or _obstacle(
        random_step, batch, draws, network, scale
    )


def _first_step(
    training: ClientTraining,
    client_info: ClientInfo,
    message: Message,
    client_state: ByPart,
    random_carry: bool,
) -> Learn:
    """Return a function that makes a first step on a batch."""
    noise = _random_like({"": dict(message.params)})[""]

    def learn(batch: Batch) -> Tree:
        client, progress = client_start(training, message, client_state, client_info, lambda: batch)
        if random_carry:
            progress = replace(progress, carry=_random_like(progress.carry))
        rows = torch.arange(len(batch), device=tensors_of(batch.x)[0].device)
        after = client_step(client, progress, batch, rows, rows, noise=tree.tensors(noise))
        moves = _as_gradients(tree.sub(after.params, client.start))
        carry = dict(tree.walk({"carry": dict(after.carry)}))
        return {"loss": after.loss, **moves, **after.buffers, **carry}

    return learn


def _random_like(states: Mapping[str, State]) -> ByPart:
    """Return states with normal numbers, the same each time, in place of their real numbers."""
    generator = torch.Generator().manual_seed(0)

    def random(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)

    return cast(ByPart, tree.map_tensors(random, dict(states)))


def _as_gradients(grads: Tree) -> Tree:
    return {f"{_GRADIENT}{k}": g.to_dense() if g.is_sparse else g for k, g in grads.items()}


def _obstacle(
    learn: Learn, batch: Batch, draws: RandomDraws | None, network: Network, scale: float = 0.0
) -> str:
    """Return why not the same is learnt from a batch whatever it is filled up with, "" if it is.

    Between two paddings not even rounding may differ. Without padding, products may be added up in
    another order, of numbers as large as `scale` or the largest gradient.
    """
    if draws is not None and not draws.masks_by_example:
        return draws.reason or "the model draws other random numbers than masks by example"
    count = len(batch)
    paddings = [torch.arange(first, first + _PADDING) % count for first in (0, 1)]
    weight = torch.ones(count + _PADDING, dtype=network.dtype, device=tensors_of(batch.x)[0].device)
    weight[count:] = 0.0
    masks = DrawnMasks(None, orders=draws.orders if draws else ())
    learnt = []
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            with masks.drawing():
                plain = learn(batch)
            for rows in paddings:
                padded = Batch(
                    map_values(partial(_extended, rows=rows), batch.x),
                    map_values(partial(_extended, rows=rows), batch.y),
                    weight,
                )
                with masks.replaying([_extended(mask, rows) for mask in masks.masks]):
                    learnt.append(learn(padded))
    except Exception as error:  # e.g. a loss that is a mean already
        return f"a padded batch raises {type(error).__name__}: {first_line(error)}"
    gradients = (t for name, t in plain.items() if name.startswith(_GRADIENT))
    largest = max([scale, *map(_largest_entry, gradients)])
    first, second = learnt
    for name, t in plain.items():
        if (t.dtype, t.shape) != (first[name].dtype, first[name].shape):
            return f"padding changes the form of {name}"  # as of bfloat16 scores, by weights
        same = torch.equal(first[name].nan_to_num(), second[name].nan_to_num())
        if not (same and _are_close(t, first[name], largest)):
            return f"padding changes {name}"
    return ""


def _extended(t: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([t, t[rows.to(t.device)]])


def _are_close(first: Tensor, second: Tensor, largest: float) -> bool:
    """Return whether two tensors are the same up to rounding.

    The gradient of a bias before a normalisation is zero but for the rounding of numbers as large
    as the largest gradient, `largest`.
    """
    if not first.is_floating_point():
        return torch.equal(first, second)
    eps = torch.finfo(first.dtype).eps
    allowed = eps**0.5 * _largest_entry(first) + 64.0 * eps * largest
    return torch.allclose(first, second, rtol=eps**0.5, atol=allowed, equal_nan=True)


def _largest_entry(t: Tensor) -> float:
    """Return the largest absolute entry, 0 of what is not a floating-point tensor."""
    if not t.numel() or not t.is_floating_point():
        return 0.0
    return float(t.nan_to_num(0.0, 0.0, 0.0).abs().max())
