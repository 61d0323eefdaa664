"""Mini-batches that a model or the memory cannot take are refused before a run."""

from __future__ import annotations

import numpy as np
import torch

from fedkeel import config
from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.base.user_code import one_line
from fedkeel.base.values import rows_of
from fedkeel.data import batches
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.evaluation import count_examples
from fedkeel.errors import ConfigError, ModelError, counted
from fedkeel.method.local_training import ClientTraining
from fedkeel.task.losses import (
    cox,
)
from fedkeel.task.network import Network

_STEP_BYTES = 200
"""Bytes that a mini-batch takes beside the positions of its examples."""


def check_accumulation(local: config.Local, federation: Federation) -> None:
    """Refuse steps of more mini-batches than any client has in a pass."""
    largest = int(federation.sizes.max(initial=1))
    most = max(1, -(-largest // local.piece_size)) if local.piece_size else local.accumulate
    if local.accumulate > most:
        raise ConfigError(
            "local.accumulate is more than the mini-batches of any client.",
            got=f"{local.accumulate}; a pass of the largest client, of "
            f"{counted(largest, 'example')}, has {most} of {local.batch_size}",
            expected=f"1..{most}",
            do="lower local.accumulate or local.batch_size",
        )


def check_round_length(local: config.Local, federation: Federation) -> None:
    """Refuse a round whose mini-batches, as positions of examples, do not fit into memory."""
    n = max(1, int(federation.sizes.max(initial=1)))
    steps = batches.count_steps(local, n)
    needed = _STEP_BYTES * steps + 8 * batches.count_examples(local, n)
    free = free_memory()
    if free is not None and needed > free // 2:
        raise ConfigError(
            "A client's round is too long.",
            got=f"{counted(steps, 'step')} for {counted(n, 'example')}, whose list takes "
            f"{format_bytes(needed)}",
            expected=f"at most {format_bytes(free // 2)}, half of what is free",
            do=f"lower local.{'epochs' if local.steps is None else 'steps'}, and raise rounds",
        )


def check_batches_of_one(training: ClientTraining, federation: Federation, rounds: int) -> None:
    """Refuse batches of one example where batch normalisation cannot take them."""
    network, local = training.network, training.local
    if not network.mixes_examples and network.task_loss is not cox:
        return
    sizes = [n for n in np.unique(federation.sizes) if n and has_batch_of(local, int(n), rounds, 1)]
    error = error_on_one_example(network, federation.data) if sizes else ""
    if not error:
        return
    is_concerned, has_one = np.isin(federation.sizes, sizes), federation.sizes == 1
    client = int(np.flatnonzero(is_concerned)[0])
    remedies = []
    if local.batch_size == 1:
        remedies.append("raise local.batch_size")
    elif (is_concerned & ~has_one).any():
        remedies.append("set local.drop_last = 'single'")
    if has_one.any():
        remedies.append("give every client more examples (min_size = 2 of kind 'dirichlet')")
    count = is_concerned.sum()
    raise ModelError(
        f"{count} of {len(federation)} clients {'has' if count == 1 else 'have'} a mini-batch of "
        "one example, which this network cannot be trained on.",
        got=f"e.g. client {client} of size {federation.sizes[client]}, "
        f"local.batch_size = {local.batch_size!r}",
        why=f"batch normalisation: {error}",
        do=f"{', and '.join(remedies)}; or use fedkeel.replace_batch_norm(module)",
    )


def check_evaluation_of_one(setup: TrainingSetup) -> None:
    """Refuse evaluations that end with one example where statistics of the batch are used."""
    if not setup.training.network.batch_statistics:
        return
    counts = {
        "test set": count_examples(setup, "test"),
        "clients' own examples": count_examples(setup, "clients"),
    }
    size = setup.shard
    with_one = [name for name, n in counts.items() if n and (size == 1 or n % size == 1)]
    error = (
        error_on_one_example(setup.training.network, setup.federation.data, False)
        if with_one
        else ""
    )
    if not error:
        return
    larger = range(size + 1, max(counts.values()) + 2)
    fitting = (s for s in larger if all(n % s != 1 for n in counts.values()))
    raise ModelError(
        "The last batch of an evaluation has one example, which this network cannot score.",
        got=f"{counts[with_one[0]]} in the {with_one[0]}, in batches of {size}",
        why=f"batch normalisation, by the batch at hand: {error}",
        do=f"set evaluation.batch_size = {next(fitting)}"
        if 1 not in counts.values()
        else "give more examples, or use fedkeel.replace_batch_norm(module)",
    )


def has_batch_of(local: config.Local, n: int, rounds: int, size: int) -> bool:
    """Return whether a client of `n` examples has a batch of `size` in so many rounds."""
    if local.sampling == "poisson":
        return size <= n
    if size not in batches.batch_sizes(local, n):
        return False
    if n == size or local.batch_size == size or local.steps is None:
        return True
    return local.sampling == "continue" and local.steps * rounds >= batches.batches_per_pass(
        local, n
    )


def error_on_one_example(network: Network, data: Dataset, train: bool = True) -> str:
    """Return the error that the network raises on one example, "" where it raises none."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            one = rows_of(data.x, slice(1))
            network.logits(network.params, network.copy_buffers(network.buffers), one, train)
    except Exception as error:  # whatever a user's module may raise
        return one_line(error)
    return ""
