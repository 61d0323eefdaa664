"""What lanes see in each step: batches of several clients as one tensor, padded where they differ.

n is the number of lanes, B the width of a batch. A single lane has no leading axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.data.augment import Crops, crop_flip, crops
from fedkeel.data.dataset import Dataset
from fedkeel.engine.base import Job, TrainingSetup
from fedkeel.engine.local import noise, passes, plans
from fedkeel.method.context import Ints, Message
from fedkeel.rng import generator
from fedkeel.tree import State


@dataclass(frozen=True)
class Group:
    """Clients that are trained side by side, those with the most steps first.

    Args:
        jobs: the n clients.
        planned: positions, within each client's examples, of each of its mini-batches.
        used: distinct positions of each, where a part prepares examples.
    """

    jobs: Sequence[Job]
    planned: Sequence[list[Ints]]
    used: Sequence[Ints] | None

    @classmethod
    def each(cls, setup: TrainingSetup, message: Message, jobs: Sequence[Job]) -> list[Group]:
        """Return every client by itself, with its round planned."""
        prepares = bool(setup.training.plan.preparations)
        return [
            cls([job], [planned], [np.unique(np.concatenate(planned))] if prepares else None)
            for job, planned in zip(jobs, plans(setup, message, jobs), strict=True)
        ]

    @classmethod
    def join(cls, groups: Sequence[Group]) -> Group:
        """Return the clients of several groups as one."""
        used = [own for group in groups for own in group.used or ()]
        return cls(
            [job for group in groups for job in group.jobs],
            [planned for group in groups for planned in group.planned],
            used or None,
        )

    def part(self, lanes: slice) -> Group:
        """Return some of the clients."""
        used = None if self.used is None else self.used[lanes]
        return Group(self.jobs[lanes], self.planned[lanes], used)

    @property
    def steps(self) -> list[int]:
        """[n] steps of each client."""
        return [len(one) for one in self.planned]

    @property
    def seen(self) -> list[int]:
        """[n] examples that each client processes."""
        return [sum(map(len, one)) for one in self.planned]

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """[n] size of each of a client's batches."""
        return [tuple(map(len, one)) for one in self.planned]

    @property
    def form(self) -> tuple[object, ...]:
        """Sizes of all batches, and how many distinct examples parts prepare for each client."""
        return (*self.widths, *map(len, self.used or ()))


class Examples:
    """The training set, from which batches are taken by row.

    Args:
        data: the training set.
        dtype: type of the weights.
    """

    def __init__(self, data: Dataset, dtype: torch.dtype) -> None:
        self._data = data
        self._flat = data.x.reshape(len(data), -1)  # rows of one axis are taken faster
        self._dtype = dtype
        self.channels_last = True

    def placed(self, table: np.ndarray) -> Tensor:
        """Return a table as a tensor where the training set lies."""
        return torch.from_numpy(table).to(self._flat.device)

    def take(self, rows: Tensor, weight: Tensor | None, single: bool) -> State:
        """Return ``x``, ``y`` and where given ``weight`` of rows [n, B], on the device.

        Rows may have more axes before these, unless it is for a single lane.
        """
        index = rows.reshape(-1)
        lead = rows.shape[1:] if single else rows.shape
        x = self._flat.index_select(0, index).view(*lead, *self._data.x.shape[1:])
        if single and x.ndim == 4 and self.channels_last:
            x = channels_last(x)
        out: State = {"x": x, "y": self._data.y.index_select(0, index).view(lead)}
        if weight is not None:
            real = weight.to(self._dtype)
            out["weight"] = real[0] if single else real
        return out


class Feed:
    """The batches of a group, step by step.

    Args:
        setup: method, model, data and seed.
        examples: the training set.
        message: what the server sent.
        group: the clients.
    """

    def __init__(
        self, setup: TrainingSetup, examples: Examples, message: Message, group: Group
    ) -> None:
        self._setup, self._examples, self._group = setup, examples, group
        self._single = len(group.jobs) == 1
        pairs = list(zip(group.jobs, group.planned, strict=True))
        rows, self._sizes = _table([(setup.federation.client(j.client), p) for j, p in pairs])
        # all tables of a round go to the device at once: it would be waited for in each step
        self._rows, self._real = examples.placed(rows), examples.placed(self._sizes)
        clients = [job.client for job in group.jobs]
        if setup.augment:
            draws = [generator(setup.seed, "augment", message.round, k) for k in clients]
            self._offsets, self._mirrored = map(examples.placed, _crops(group, draws, rows.shape))
        if group.used is not None:
            turns = [passes(setup, job, planned) for job, planned in pairs]
            self._places = examples.placed(_places(group, turns, rows.shape))
        self._noise = [noise(setup, message, k) for k in clients]
        self._taken: list[State] = []

    def batches(self, steps: int, pads: bool) -> State:
        """Return what all lanes see in each of the first steps, by its number. See `batch`.

        Where nothing is padded their examples are taken at once.
        """
        live = len(self._group.jobs)
        if not self._single and (self._sizes[:steps] == self._rows.shape[2]).all():
            taken = tree.tensors(self._examples.take(self._rows[:steps], None, False))
            self._taken = [{k: t[step] for k, t in taken.items()} for step in range(steps)]
        return {str(step): self.batch(step, live, live, pads) for step in range(steps)}

    def batch(self, step: int, live: int, going: int, pads: bool) -> State:
        """Return what the first `live` lanes see in a step; the first `going` of them train.

        Beside the examples, where they are wanted: ``active`` [n], ``rows`` and ``first`` [n, B] as
        `client_step` means them, and ``noise``. Where the model must see no padding (`pads` is
        false), lanes have to agree in the size of their batches.
        """
        sizes = self._sizes[step, :live]
        width = self._width(sizes[:going], pads)
        rows, weight = self._rows[step, :live, :width], None
        if (sizes < width).any():
            weight = torch.arange(width, device=rows.device) < self._real[step, :live, None]
        taken = self._taken[step : step + 1]
        out = taken[0] if taken else self._examples.take(rows, weight, self._single)
        x = tree.leaf(out, "x")
        if going < live:
            out["active"] = torch.arange(live, device=x.device) < going
        if self._setup.augment:
            out["x"] = self._augmented(x, step, live, width)
        if self._group.used is not None:
            places = self._places[step, :, 0 if self._single else slice(live), ..., :width]
            out["rows"], out["first"] = places.contiguous()
        drawn = [one for draw in self._noise[:live] if (one := draw()) is not None]
        if drawn:
            normal: State = dict(drawn[0]) if self._single else tree.stack(drawn)
            out["noise"] = tree.map_tensors(lambda t: t.to(x.device), normal)
        return out

    def real(self, step: int, batch: State, going: int) -> Ints | None:
        """Return [n] examples of each lane that are no padding in a batch; None: all are real.

        A lane that has ended has none: what it draws at the end follows its own last step.
        """
        live = 1 if self._single else len(tree.leaf(batch, "y"))
        if "weight" not in batch and going == live:
            return None
        return np.where(np.arange(live) < going, self._sizes[step, :live], 0)

    def prepared(self, pads: bool) -> State:
        """Return the distinct examples of each lane's round, for parts that prepare them.

        With `pads` there are 2^n of them, so that clients of many sizes share a few recordings.
        """
        pairs = zip(self._group.jobs, self._group.used or (), strict=True)
        rows, sizes = _table([(self._setup.federation.client(j.client), [p]) for j, p in pairs])
        rows, most = rows[0], rows.shape[2]
        width = 1 << (most - 1).bit_length() if pads else most
        rows = np.concatenate([rows, np.repeat(rows[:, :1], width - most, axis=1)], axis=1)
        weight = None if (sizes[0] == width).all() else np.arange(width) < sizes[0][:, None]
        placed = self._examples.placed
        real = None if weight is None else placed(weight)
        return self._examples.take(placed(rows), real, self._single)

    def _width(self, sizes: Ints, pads: bool) -> int:
        """Return how wide the batch is: one of a few widths, so that few steps are recorded."""
        most, width = int(sizes.max()), self._rows.shape[2]
        if not pads or int(sizes.min()) == width:
            return most
        while width // 2 >= most:
            width //= 2
        return width

    def _augmented(self, x: Tensor, step: int, live: int, width: int) -> Tensor:
        offsets = self._offsets[step, :, :live, :width].reshape(2, -1)
        where = Crops(offsets, self._mirrored[step, :live, :width].reshape(-1))
        images = x if self._single else x.flatten(0, 1)
        changed = crop_flip(images, where).reshape(x.shape)
        return channels_last(changed) if self._single and self._examples.channels_last else changed


def _crops(
    group: Group, draws: Sequence[np.random.Generator], shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw where all images of all steps are cropped, and which are mirrored.

    Returns:
        [S, 2, n, B], as `Crops` has them, and [S, n, B]; of padding 0 and false.
    """
    steps, lanes, width = shape
    offsets = np.zeros((steps, 2, lanes, width), dtype=np.int64)
    mirrored = np.zeros(shape, dtype=np.bool_)
    for lane, (source, planned) in enumerate(zip(draws, group.planned, strict=True)):
        for step, size in enumerate(map(len, planned)):
            drawn = crops(source, size)
            offsets[step, :, lane, :size] = drawn.offsets
            mirrored[step, lane, :size] = drawn.mirrored
    return offsets, mirrored


def _places(group: Group, turns: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return where examples stand among those that parts have prepared.

    Args:
        group: the clients.
        turns: [n] mini-batches in the first pass of each.
        shape: S, n, B.

    Returns:
        [S, 2, n, B] of each step's own examples, and of those of the same step of the first pass.
    """
    steps, lanes, width = shape
    found = np.zeros((steps, 2, lanes, width), dtype=np.int64)
    for lane, (planned, turn) in enumerate(zip(group.planned, turns, strict=True)):
        used = (group.used or ())[lane]
        places = [np.searchsorted(used, positions) for positions in planned]
        for step in range(steps):
            for which, one in enumerate((places[min(step, len(places) - 1)], places[step % turn])):
                found[step, which, lane, : len(one)] = one
    return found


def _table(lanes: Sequence[tuple[Ints, Sequence[Ints]]]) -> tuple[Ints, Ints]:
    """Return the rows of all batches of all lanes, [S, n, B], and the batches' sizes, [S, n].

    A short batch is filled up with its first row; after its last one, a lane repeats it.

    Args:
        lanes: of each, the rows of its examples, and the positions of each batch among these.
    """
    lengths = [tuple(map(len, planned)) for _, planned in lanes]
    if len({*lengths}) == len({*lengths[0]}) == 1:  # all alike
        steps, width = len(lengths[0]), lengths[0][0]
        positions = np.concatenate([batch for _, planned in lanes for batch in planned])
        order = positions.reshape(len(lanes), -1)
        rows = np.stack([own[one] for (own, _), one in zip(lanes, order, strict=True)])
        table = rows.reshape(len(lanes), steps, width).transpose(1, 0, 2)
        return table, np.full((steps, len(lanes)), width)
    sizes = [np.array(one) for one in lengths]
    steps, width = max(map(len, sizes)), max(map(max, lengths))
    table = np.empty((steps, len(lanes), width), dtype=np.int64)
    counts = np.empty((steps, len(lanes)), dtype=np.int64)
    for lane, ((own, planned), size) in enumerate(zip(lanes, sizes, strict=True)):
        rows, last = own[np.concatenate(planned)], len(size)
        real = np.arange(width) < size[:, None]
        if real.all():
            table[:last, lane] = rows.reshape(last, width)
        else:
            filled = np.broadcast_to(rows[np.cumsum(size) - size, None], real.shape).copy()
            filled[real] = rows
            table[:last, lane] = filled
        table[last:, lane], counts[:last, lane] = table[last - 1, lane], size
        counts[last:, lane] = size[-1]
    return table, counts


def channels_last(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] with the channels of a pixel side by side in memory.

    Convolutions and poolings on a processor are faster so, and what they return is laid out alike.
    """
    _, channels, height, width = x.shape
    if channels == 1:  # the same memory, but torch has to be told
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
