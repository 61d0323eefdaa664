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
from fedkeel.engine.loop import noise, passes, plan
from fedkeel.engine.world import Job, World
from fedkeel.method.context import Ints, Message
from fedkeel.rng import generator
from fedkeel.tree import State, Tree


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
    def of(cls, world: World, message: Message, job: Job) -> Group:
        """Return a client by itself, with its round planned."""
        planned = plan(world, message, job)
        prepares = bool(world.bench.plan.preparations)
        return cls([job], [planned], [np.unique(np.concatenate(planned))] if prepares else None)

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

    def take(self, rows: Ints, weight: Ints | None, single: bool) -> State:
        """Return ``x``, ``y`` and where given ``weight`` of rows [n, B]."""
        index = torch.from_numpy(rows.reshape(-1)).to(self._flat.device)
        lead = rows.shape[1:] if single else rows.shape
        x = self._flat.index_select(0, index).view(*lead, *self._data.x.shape[1:])
        if single and x.ndim == 4 and self.channels_last:
            x = channels_last(x)
        out: State = {"x": x, "y": self._data.y.index_select(0, index).view(lead)}
        if weight is not None:
            real = torch.from_numpy(weight).to(x.device, self._dtype)
            out["weight"] = real[0] if single else real
        return out


class Feed:
    """The batches of a group, step by step.

    Args:
        world: method, model, data and seed.
        examples: the training set.
        message: what the server sent.
        group: the clients.
    """

    def __init__(self, world: World, examples: Examples, message: Message, group: Group) -> None:
        self._world, self._examples, self._group = world, examples, group
        self._single = len(group.jobs) == 1
        self._full = max(len(p) for one in group.planned for p in one)
        pairs = zip(group.jobs, group.planned, strict=True)
        self._passes = [passes(world, job, planned) for job, planned in pairs]
        clients = [job.client for job in group.jobs]
        own = clients if world.augment else []
        self._crops = [generator(world.seed, "augment", message.round, k) for k in own]
        self._noise = [noise(world, message, k) for k in clients]

    def batch(self, step: int, live: int, going: int, pads: bool) -> State:
        """Return what the first `live` lanes see in a step; the first `going` of them train.

        Beside the examples, where they are wanted: ``active`` [n], ``rows`` and ``first`` [n, B] as
        `client_step` means them, and ``noise``. Where the model must see no padding (`pads` is
        false), lanes have to agree in the size of their batches.
        """
        group = self._group
        positions = [one[min(step, len(one) - 1)] for one in group.planned[:live]]
        width = self._width([len(one) for one in positions[:going]], pads)
        rows, weight = self.rows(positions, width)
        out = self._examples.take(rows, weight, self._single)
        x = tree.leaf(out, "x")
        if going < live:
            out["active"] = torch.arange(live, device=x.device) < going
        if self._world.augment:
            out["x"] = self._augmented(x, positions[:going], rows.shape)
        if group.used is not None:
            places = self._places(step, positions, width)
            out.update({name: t.to(x.device) for name, t in places.items()})
        drawn = [one for draw in self._noise[:live] if (one := draw()) is not None]
        if drawn:
            normal: State = dict(drawn[0]) if self._single else tree.stack(drawn)
            out["noise"] = tree.map_tensors(lambda t: t.to(x.device), normal)
        return out

    def prepared(self) -> State:
        """Return the distinct examples of each lane's round, for parts that prepare them."""
        used = self._group.used or ()
        rows, weight = self.rows(used, max(map(len, used)))
        return self._examples.take(rows, weight, self._single)

    def rows(self, positions: Sequence[Ints], width: int) -> tuple[Ints, Ints | None]:
        """Return rows of the training set, [n, width], and 1 for those that are no padding.

        Padding repeats a lane's first row; without any, the second is None.
        """
        federation = self._world.federation
        jobs = self._group.jobs[: len(positions)]
        own = [federation.client(j.client)[p] for j, p in zip(jobs, positions, strict=True)]
        if all(len(one) == width for one in own):
            return np.stack(own), None
        rows = np.empty((len(own), width), dtype=np.int64)
        weight = np.zeros((len(own), width), dtype=np.int64)
        for lane, one in enumerate(own):
            real = one[:width]  # lanes that have ended may have had wider batches
            rows[lane, : len(real)], rows[lane, len(real) :] = real, real[0]
            weight[lane, : len(real)] = 1
        return rows, weight

    def _width(self, sizes: Sequence[int], pads: bool) -> int:
        """Return how wide the batch is: one of a few widths, so that few steps are recorded."""
        most, width = max(sizes), self._full
        if not pads or min(sizes) == width:
            return most
        while width // 2 >= most:
            width //= 2
        return width

    def _augmented(self, x: Tensor, positions: Sequence[Ints], shape: tuple[int, ...]) -> Tensor:
        offsets = np.zeros((2, *shape), dtype=np.int64)
        mirrored = np.zeros(shape, dtype=np.bool_)
        for lane, own in enumerate(positions):
            drawn = crops(self._crops[lane], len(own))
            offsets[:, lane, : len(own)] = drawn.offsets
            mirrored[lane, : len(own)] = drawn.mirrored
        where = Crops(offsets.reshape(2, -1), mirrored.reshape(-1))
        images = x if self._single else x.flatten(0, 1)
        changed = crop_flip(images, where).reshape(x.shape)
        return channels_last(changed) if self._single and self._examples.channels_last else changed

    def _places(self, step: int, positions: Sequence[Ints], width: int) -> Tree:
        """Return where the examples of a step stand among those that parts have prepared."""
        used = self._group.used or ()
        turns = [step % count for count in self._passes]
        begun = [self._group.planned[lane][turns[lane]] for lane in range(len(positions))]
        if self._single:
            found = (np.searchsorted(used[0], one) for one in (positions[0], begun[0]))
            return {k: torch.from_numpy(v) for k, v in zip(("rows", "first"), found, strict=True)}
        rows = np.zeros((2, len(positions), width), dtype=np.int64)
        for lane, pair in enumerate(zip(positions, begun, strict=True)):
            for which, one in enumerate(pair):
                real = one[:width]
                rows[which, lane, : len(real)] = np.searchsorted(used[lane], real)
        return {"rows": torch.from_numpy(rows[0]), "first": torch.from_numpy(rows[1])}


def channels_last(x: Tensor) -> Tensor:
    """Return images [B, C, H, W] with the channels of a pixel side by side in memory.

    Convolutions and poolings on a processor are faster so, and what they return is laid out alike.
    """
    _, channels, height, width = x.shape
    if channels == 1:  # the same memory, but torch has to be told
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
