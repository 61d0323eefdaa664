"""What a client's round gets from data and seed: batches, facts about the client, and noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.rng import generator, generators, torch_seed
from fedkeel.base.values import Values, only_tensor, rows_of, tensors_of
from fedkeel.data import batches
from fedkeel.data.augment import Crops, crop_flip, crops, transformed
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.method.context import ClientInfo, Ints, Message
from fedkeel.method.part import Capability
from fedkeel.task.batch import Batch
from fedkeel.tree import Tree


def batch_plans(
    setup: TrainingSetup, message: Message, jobs: Sequence[ClientJob]
) -> list[list[Ints]]:
    """Return, for each client, the positions within its examples of each of its mini-batches."""
    local, sizes = setup.training.local, setup.federation.sizes
    streams: Sequence[np.random.Generator | None] = [None] * len(jobs)
    if batches.draws_each_round(local):
        clients = [job.client for job in jobs]
        streams = generators(setup.seed, "batches", message.round, clients)
    return [
        batches.plan(
            local,
            int(sizes[job.client]),
            setup.seed,
            message.round,
            job.client,
            job.steps_done,
            stream,
        )
        for job, stream in zip(jobs, streams, strict=True)
    ]


def first_pass_length(setup: TrainingSetup, job: ClientJob, batch_positions: list[Ints]) -> int:
    """Return the number of mini-batches in a client's first pass over its examples this round."""
    size = int(setup.federation.sizes[job.client])
    return max(1, min(len(batch_positions), batches.batches_per_pass(setup.training.local, size)))


def client_info(setup: TrainingSetup, client: int) -> ClientInfo:
    """Return what a client knows about itself, as far as the method needs it."""
    rows, dtype = setup.federation.client(client), setup.training.network.dtype
    index, examples = torch.tensor(client), torch.tensor(len(rows), dtype=dtype)
    return ClientInfo(index, examples, declared_class_counts(setup, client))


def declared_class_counts(setup: TrainingSetup, client: int) -> Tensor | None:
    """Return [Y] a client's examples of each class; None where the method does not need them."""
    if Capability.CLASS_COUNTS not in setup.training.plan.needs:
        return None
    data, rows = setup.federation.data, setup.federation.client(client)
    counts = label_counts(rows_of(data.y, torch.from_numpy(rows)), data.classes)
    return counts.to(setup.training.network.dtype)


def noise_source(setup: TrainingSetup, message: Message, client: int) -> Callable[[], Tree | None]:
    """Return a function that gives new standard normal numbers of the model's shapes each time.

    It gives None where the method does not need NOISE.
    """
    if Capability.NOISE not in setup.training.plan.needs:
        return lambda: None
    source = torch.Generator().manual_seed(torch_seed(setup.seed, "noise", message.round, client))
    return lambda: {
        name: torch.randn(tensor.shape, generator=source, dtype=tensor.dtype).to(tensor.device)
        for name, tensor in message.params.items()
    }


def take_examples(setup: TrainingSetup, rows: Ints) -> Batch:
    """Return some rows of the training set as a batch."""
    index, data = torch.from_numpy(rows), setup.federation.data
    return Batch(rows_of(data.x, index), rows_of(data.y, index))


def batch_maker(
    setup: TrainingSetup, message: Message, job: ClientJob, batch_positions: list[Ints]
) -> Callable[[int], Batch]:
    """Return a function: number of a local step, from 1 -> its mini-batch, augmented if asked."""
    rows, augment, place = setup.federation.client(job.client), setup.augment, message.round
    drawn: list[Crops] = []
    if augment is True:
        stream = generator(setup.seed, "augment", place, job.client)
        drawn = [crops(stream, len(positions)) for positions in batch_positions]

    def make(step: int) -> Batch:
        batch = take_examples(setup, rows[batch_positions[step - 1]])
        if callable(augment):
            changed = transformed(augment, batch.x, batch.y, setup.seed, place, job.client, step)
            batch = Batch(*changed)
        elif drawn:
            batch = Batch(crop_flip(only_tensor(batch.x, "cropping"), drawn[step - 1]), batch.y)
        return with_expected(setup, batch, len(rows))

    return make


def with_expected(setup: TrainingSetup, batch: Batch, n: int) -> Batch:
    """Return a batch of a client of `n` examples with the number that it expects, see `Batch`."""
    local = setup.training.local
    if local.sampling != "poisson":
        return batch
    (expected,) = batches.batch_sizes(local, n)
    return replace(batch, expected=expected)


def label_counts(y: Values, classes: int) -> Tensor:
    """Return [Y] how often each label occurs among targets [N]; zeros where they are not labels."""
    if isinstance(y, dict) or y.ndim != 1 or y.is_floating_point() or not classes:
        return torch.zeros(classes, dtype=torch.int64, device=tensors_of(y)[0].device)
    return torch.bincount(y, minlength=classes)
