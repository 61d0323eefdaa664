"""Batches of several clients as one tensor for each step, padded where clients differ.

Letters: n clients, B examples of a batch, S steps. A single client has no client axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.rng import generator
from fedkeel.base.values import Values, as_state, map_values, rows_of, tensors_of
from fedkeel.data.augment import Crops, Transform, crop_flip, crops, transformed
from fedkeel.data.batches import batch_sizes
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.client_inputs import batch_plans, first_pass_length, noise_source
from fedkeel.engine.vectorized.run_inputs import RunInputs
from fedkeel.engine.vectorized.transfers import to_device
from fedkeel.method.context import Ints
from fedkeel.tree import State


@dataclass(frozen=True)
class PaddedSizes:
    """What clients of several runs are padded to, whoever trains beside them.

    Args:
        batch: examples of a batch.
        distinct: distinct examples of a client's round.
    """

    batch: int
    distinct: int

    @classmethod
    def of(cls, setup: TrainingSetup) -> PaddedSizes:
        """Return the sizes for a run: powers of two, but for a full batch."""
        counts = np.unique(setup.federation.sizes)
        sizes = [batch_sizes(setup.training.local, int(n)) for n in counts if n]
        batch, distinct = max(map(max, sizes)), int(counts.max())
        full = setup.training.local.batch_size
        rounded = 1 << (batch - 1).bit_length()
        batch = min(rounded, full) if isinstance(full, int) and batch <= full else rounded
        return cls(batch, 1 << (distinct - 1).bit_length())


@dataclass(frozen=True)
class ClientGroup:
    """Clients that are trained side by side, those with the most steps first.

    Args:
        jobs: the n clients.
        runs: of each client, its run.
        batches: of each client, positions of each mini-batch among its examples.
        distinct: of each client, the distinct positions in its round; None where no part prepares
            examples.
    """

    jobs: Sequence[ClientJob]
    runs: Sequence[RunInputs]
    batches: Sequence[list[Ints]]
    distinct: Sequence[Ints] | None

    @classmethod
    def single_clients(cls, run: RunInputs, jobs: Sequence[ClientJob]) -> list[ClientGroup]:
        """Return a group for each client, with the batches of its round."""
        prepares = bool(run.training.plan.preparations)
        return [
            cls([job], [run], [batches], [np.unique(np.concatenate(batches))] if prepares else None)
            for job, batches in zip(jobs, batch_plans(run.setup, run.message, jobs), strict=True)
        ]

    @classmethod
    def join(cls, groups: Sequence[ClientGroup]) -> ClientGroup:
        """Return the clients of several groups as one group."""
        distinct = [positions for group in groups for positions in group.distinct or ()]
        return cls(
            [job for group in groups for job in group.jobs],
            [run for group in groups for run in group.runs],
            [batches for group in groups for batches in group.batches],
            distinct or None,
        )

    def __len__(self) -> int:
        """Return n."""
        return len(self.jobs)

    def __getitem__(self, clients: slice) -> ClientGroup:
        """Return some of the clients."""
        distinct = None if self.distinct is None else self.distinct[clients]
        return ClientGroup(self.jobs[clients], self.runs[clients], self.batches[clients], distinct)

    @property
    def members(self) -> Iterator[tuple[ClientJob, RunInputs]]:
        """Each client with its run."""
        return zip(self.jobs, self.runs, strict=True)

    @property
    def distinct_runs(self) -> list[RunInputs]:
        """The runs, each once, in the order of their first clients."""
        return list(dict.fromkeys(self.runs))

    @property
    def is_single(self) -> bool:
        """Whether it is one client, which has no client axis."""
        return len(self.jobs) == 1

    @property
    def steps(self) -> list[int]:
        """[n] steps of each client."""
        return [len(batches) for batches in self.batches]

    @property
    def processed(self) -> list[int]:
        """[n] examples that each client processes."""
        return [sum(map(len, batches)) for batches in self.batches]

    @property
    def batch_sizes(self) -> list[tuple[int, ...]]:
        """[n] sizes of each client's batches."""
        return [tuple(map(len, batches)) for batches in self.batches]

    @property
    def shape(self) -> tuple[object, ...]:
        """Sizes of all batches, and of each client's distinct examples where parts prepare them."""
        return (*self.batch_sizes, *map(len, self.distinct or ()))


class TrainingExamples:
    """The training set, from which batches are taken by row.

    Args:
        data: the training set, where clients train.
        dtype: type of the examples' weights.
    """

    def __init__(self, data: Dataset, dtype: torch.dtype) -> None:
        self._data = data
        # rows of one axis are taken faster
        self._flat_x, self._flat_y = map_values(_flat, data.x), map_values(_flat, data.y)
        self._device = tensors_of(data.x)[0].device
        self._dtype = dtype

    def on_device(self, table: np.ndarray) -> Tensor:
        """Return an array as a tensor where the training set lies."""
        return to_device(torch.from_numpy(table), self._device)

    def take(
        self, rows: Tensor, is_real: Tensor | None, single: bool, channels_last: bool = False
    ) -> State:
        """Return ``x``, ``y`` and, where some are padding, ``weight`` of examples.

        Args:
            rows: [n, B] rows of the training set; several clients may have more leading axes.
            is_real: [n, B] which of them are not padding; None where all are real.
            single: whether there is one client, whose examples get no client axis.
            channels_last: whether images of a single client are laid out with channels last.
        """
        index = rows.reshape(-1)
        shape = rows.shape[1:] if single else rows.shape
        x = _taken(self._flat_x, self._data.x, index, shape)
        if single and channels_last and isinstance(x, Tensor) and x.ndim == 4:
            x = with_channels_last(x)
        y = _taken(self._flat_y, self._data.y, index, shape)
        examples: State = {"x": as_state(x), "y": as_state(y)}
        if is_real is not None:
            weight = is_real.to(self._dtype)
            examples["weight"] = weight[0] if single else weight
        return examples


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.ndim != 1 else tensor


def _taken(flat: Values, whole: Values, index: Tensor, shape: Sequence[int]) -> Values:
    """Return rows of values whose further axes are one in `flat`, as [*shape, ...]."""
    if isinstance(flat, Tensor):
        sizes = tensors_of(whole)[0].shape[1:]
        return flat.index_select(0, index).view(*shape, *sizes)
    return {
        name: tensor.index_select(0, index).view(*shape, *whole[name].shape[1:])  # type: ignore[index]
        for name, tensor in flat.items()
    }


class GroupBatches:
    """The batches of a group of clients, step by step.

    Args:
        examples: the training set, which is that of all runs.
        group: the clients; their runs differ in nothing that has a say in the form of a batch.
        pads: whether batches may be padded; otherwise clients agree in the sizes of their batches.
        channels_last: whether images of a single client are laid out with channels last.
        fixed: where clients may be of several runs, what all of them are padded to; each client
            then comes with a learning rate of its own.
    """

    def __init__(
        self,
        examples: TrainingExamples,
        group: ClientGroup,
        pads: bool,
        channels_last: bool,
        fixed: PaddedSizes | None = None,
    ) -> None:
        setup = self._setup = group.runs[0].setup
        self._examples, self._group = examples, group
        self._pads, self._channels_last = pads, channels_last
        self._fixed = fixed if pads else None
        rows, self._sizes = _row_table(
            [
                (run.setup.federation.client(job.client), batches)
                for (job, run), batches in zip(group.members, group.batches, strict=True)
            ],
            0 if self._fixed is None else self._fixed.batch,
        )
        # all tables of a round go to the device at once, so that no step waits for one
        self._rows, self._sizes_there = examples.on_device(rows), examples.on_device(self._sizes)
        if setup.augment is True:
            streams = [
                generator(run.setup.seed, "augment", run.message.round, job.client)
                for job, run in group.members
            ]
            tables = _crop_tables(group, streams, rows.shape)
            self._offsets, self._mirrored = map(examples.on_device, tables)
        if group.distinct is not None:
            first_passes = [
                first_pass_length(run.setup, job, batches)
                for (job, run), batches in zip(group.members, group.batches, strict=True)
            ]
            table = _prepared_rows(group, first_passes, rows.shape)
            self._prepared_rows = examples.on_device(table)
        self._noise = [
            noise_source(run.setup, run.message, job.client) for job, run in group.members
        ]
        self._rates = examples.on_device(_rate_table(group, own_rates=fixed is not None))
        self._phases = examples.on_device(_phase_table(group))
        self._taken: list[State] = []

    def all_steps(self, steps: int) -> State:
        """Return the batches of each of the first steps, by its number. See `batch`.

        Where nothing is padded their examples are taken at once.
        """
        n = len(self._group)
        if (
            not (self._fixed or self._group.is_single)
            and (self._sizes[:steps] == self._rows.shape[2]).all()
        ):
            taken = tree.tensors(self._examples.take(self._rows[:steps], None, False))
            self._taken = [{k: t[step] for k, t in taken.items()} for step in range(steps)]
        return {str(step): self.batch(step, n, n) for step in range(steps)}

    def batch(self, step: int, n: int, active: int) -> State:
        """Return what the first n clients see in a step; the first `active` of them train.

        Beside the examples, where they are wanted: ``active`` [n], ``rows`` and ``first`` [n, B] as
        `client_step` means them, ``noise``, ``phase`` [n], and ``rate`` [n], where it changes from
        step to step.
        """
        single, sizes = self._group.is_single, self._sizes[step, :n]
        width = self._padded_size(sizes[:active])
        rows, is_real = self._rows[step, :n, :width], None
        if self._fixed or (sizes < width).any():
            is_real = torch.arange(width, device=rows.device) < self._sizes_there[step, :n, None]
        if self._taken:
            batch = self._taken[step]
        else:
            batch = self._examples.take(rows, is_real, single, self._channels_last)
        device = rows.device
        if active < n:
            batch["active"] = torch.arange(n, device=device) < active
        if self._rates.numel():
            rates = self._rates[step, :n].to(self._setup.training.network.dtype)
            batch["rate"] = rates[0] if single else rates
        if self._phases.numel():
            phases = self._phases[step, :n]
            batch["phase"] = phases[0] if single else phases
        if callable(self._setup.augment):
            self._transform(self._setup.augment, batch, step, active)
        elif self._setup.augment:
            batch["x"] = self._augmented(tree.leaf(batch, "x"), step, n, width)
        if self._group.distinct is not None:
            clients = 0 if single else slice(n)
            prepared_rows = self._prepared_rows[step, :, clients, ..., :width]
            batch["rows"], batch["first"] = prepared_rows.contiguous()
        normal = [noise_ for draw in self._noise[:n] if (noise_ := draw()) is not None]
        if normal:
            stacked: State = dict(normal[0]) if single else tree.stack(normal)
            batch["noise"] = tree.map_tensors(lambda t: t.to(device), stacked)
        return batch

    def real_examples(self, step: int, batch: State, active: int) -> Ints | None:
        """Return [n] how many of each client's examples are not padding; None: all are real.

        A client that has ended has none: what it draws at the end follows its own last step.
        """
        n = 1 if self._group.is_single else len(next(t for _, t in tree.walk(batch)))
        if "weight" not in batch and active == n:
            return None
        return np.where(np.arange(n) < active, self._sizes[step, :n], 0)

    def distinct_examples(self) -> State:
        """Return the distinct examples of each client's round; none where no part prepares them.

        Where batches may be padded, there are 2^k of them, so that clients of many sizes share a
        few compiled functions.
        """
        if self._group.distinct is None:
            return {}
        pairs = zip(self._group.members, self._group.distinct, strict=True)
        table, sizes = _row_table(
            [(run.setup.federation.client(job.client), [rows]) for (job, run), rows in pairs]
        )
        rows, largest = table[0], table.shape[2]
        width = 1 << (largest - 1).bit_length() if self._pads else largest
        width = width if self._fixed is None else self._fixed.distinct
        rows = np.concatenate([rows, np.repeat(rows[:, :1], width - largest, axis=1)], axis=1)
        is_real = None
        if self._fixed or (sizes[0] < width).any():
            is_real = self._examples.on_device(np.arange(width) < sizes[0][:, None])
        on_device = self._examples.on_device(rows)
        return self._examples.take(on_device, is_real, self._group.is_single, self._channels_last)

    def _padded_size(self, sizes: Ints) -> int:
        """Return the size of a padded batch: one of a few, so that few steps are compiled."""
        largest, width = int(sizes.max()), self._rows.shape[2]
        if self._fixed:
            return self._fixed.batch
        if not self._pads or int(sizes.min()) == width:
            return largest
        while width // 2 >= largest:
            width //= 2
        return width

    def _transform(self, function: Transform, batch: State, step: int, active: int) -> None:
        """Put the batches of clients after a user's transform in their place, one after the other.

        Padding stays as it is, and so does what a client sees that has ended.
        """
        single = self._group.is_single
        x, y = (
            map_values(lambda t: t.clone(memory_format=torch.contiguous_format), values)
            for values in (cast(Values, batch["x"]), cast(Values, batch["y"]))
        )
        for i, (job, run) in enumerate(islice(self._group.members, active)):
            size = int(self._sizes[step, i])
            at = slice(size) if single else (i, slice(size))
            place = run.setup.seed, run.message.round, job.client, step + 1
            result = transformed(function, rows_of(x, at), rows_of(y, at), *place)
            for values, changed in zip((x, y), result, strict=True):
                for tensor, new in zip(tensors_of(values), tensors_of(changed), strict=True):
                    tensor[at] = new
        if single and self._channels_last and isinstance(x, Tensor) and x.ndim == 4:
            x = with_channels_last(x)
        batch["x"], batch["y"] = as_state(x), as_state(y)

    def _augmented(self, x: Tensor, step: int, n: int, width: int) -> Tensor:
        offsets = self._offsets[step, :, :n, :width].reshape(2, -1)
        places = Crops(offsets, self._mirrored[step, :n, :width].reshape(-1))
        single = self._group.is_single
        augmented = crop_flip(x if single else x.flatten(0, 1), places).reshape(x.shape)
        return with_channels_last(augmented) if single and self._channels_last else augmented


def _rate_table(group: ClientGroup, own_rates: bool) -> np.ndarray:
    """Return the learning rates of all steps of clients, [S, n].

    It is empty where all have the rate of the round, unless each has to have its own.
    """
    steps = group.steps
    factors = {
        (run, count): run.training.step_factors(run.message.round, count)
        for run, count in dict.fromkeys(zip(group.runs, steps, strict=True))
    }
    if not own_rates and not any(factors.values()):
        return np.zeros((0, len(steps)))
    table = np.ones((max(steps), len(steps)))
    for i, (run, count) in enumerate(zip(group.runs, steps, strict=True)):
        table[:count, i] = factors[run, count] or 1.0
        table[:, i] *= run.message.lr
    return table


def _phase_table(group: ClientGroup) -> Ints:
    """Return the phases of all steps of clients, [S, n], empty where the method has none."""
    steps = group.steps
    if group.runs[0].training.plan.phases is None:
        return np.zeros((0, len(steps)), dtype=np.int64)
    table = np.zeros((max(steps), len(steps)), dtype=np.int64)
    for i, (run, count) in enumerate(zip(group.runs, steps, strict=True)):
        table[:count, i] = run.training.phases_of_steps(count, run.message.round)
    return table


def _crop_tables(
    group: ClientGroup, streams: Sequence[np.random.Generator], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw where images are cropped, [S, 2, n, B] as in `Crops`, and which are mirrored, [S, n, B].

    Padding is neither.
    """
    steps, n, width = shape
    offsets = np.zeros((steps, 2, n, width), dtype=np.int64)
    mirrored = np.zeros(shape, dtype=np.bool_)
    for i, (stream, sizes) in enumerate(zip(streams, group.batch_sizes, strict=True)):
        for step, size in enumerate(sizes):
            drawn = crops(stream, size)
            offsets[step, :, i, :size] = drawn.offsets
            mirrored[step, i, :size] = drawn.mirrored
    return offsets, mirrored


def _prepared_rows(
    group: ClientGroup, first_passes: Sequence[int], shape: tuple[int, ...]
) -> np.ndarray:
    """Return the rows of examples among those that parts have prepared, [S, 2, n, B].

    They are those of each step's own examples, and of the same step of the first pass.
    """
    steps, n, width = shape
    table = np.zeros((steps, 2, n, width), dtype=np.int64)
    for i, (batches, first_pass) in enumerate(zip(group.batches, first_passes, strict=True)):
        distinct = (group.distinct or ())[i]
        rows = [np.searchsorted(distinct, positions) for positions in batches]
        for step in range(steps):
            now, first = rows[min(step, len(rows) - 1)], rows[step % first_pass]
            table[step, 0, i, : len(now)] = now
            table[step, 1, i, : len(first)] = first
    return table


def _row_table(clients: Sequence[tuple[Ints, Sequence[Ints]]], least: int = 0) -> tuple[Ints, Ints]:
    """Return the rows of all batches of all clients, [S, n, B], and the batches' sizes, [S, n].

    A short batch is filled up with its first row; after its last batch a client repeats that.

    Args:
        clients: of each, the rows of its examples, and the positions of each batch among these.
        least: B is at least this.
    """
    all_sizes = [tuple(map(len, batches)) for _, batches in clients]
    is_alike = len({*all_sizes}) == len({*all_sizes[0]}) == 1
    if is_alike and all_sizes[0][0] >= least:
        steps, width = len(all_sizes[0]), all_sizes[0][0]
        positions = np.concatenate([batch for _, batches in clients for batch in batches])
        by_client = positions.reshape(len(clients), -1)
        rows = np.stack([examples[p] for (examples, _), p in zip(clients, by_client, strict=True)])
        table = rows.reshape(len(clients), steps, width).transpose(1, 0, 2)
        return table, np.full((steps, len(clients)), width)
    steps, width = max(map(len, all_sizes)), max(least, *map(max, all_sizes))
    table = np.empty((steps, len(clients), width), dtype=np.int64)
    size_table = np.empty((steps, len(clients)), dtype=np.int64)
    for i, ((examples, batches), counts) in enumerate(zip(clients, all_sizes, strict=True)):
        sizes, rows, last = np.array(counts), examples[np.concatenate(batches)], len(counts)
        is_real = np.arange(width) < sizes[:, None]
        if is_real.all():
            table[:last, i] = rows.reshape(last, width)
        else:
            first_rows = rows[np.cumsum(sizes) - sizes, None]
            filled = np.broadcast_to(first_rows, is_real.shape).copy()
            filled[is_real] = rows
            table[:last, i] = filled
        table[last:, i], size_table[:last, i] = table[last - 1, i], sizes
        size_table[last:, i] = sizes[-1]
    return table, size_table


def with_channels_last(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] with the channels of a pixel side by side in memory.

    Convolutions and poolings on a processor are faster so, and their results are laid out alike.
    """
    _, channels, height, width = x.shape
    if channels == 1:  # the memory is the same, but torch has to be told
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
