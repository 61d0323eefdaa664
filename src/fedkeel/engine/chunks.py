"""Clients trained side by side, by recorded steps: what the vectorised engine does with a chunk.

Clients lie on a leading axis of lanes. The longest come first, so that those which still train are
always the first lanes; when half of them have ended, the others go on in half as many lanes. In
between, steps of lanes that have ended are masked, and batches shorter than others are padded with
examples of weight 0.

One lane has no leading axis at all. It is what large models on a processor want: their arithmetic
fills the machine, and a recorded step saves the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.data.augment import Crops, crop_flip, crops
from fedkeel.engine.capture import Captured
from fedkeel.engine.loop import Done, Kept, OneByOne, facts, noise, passes, plan, seed, sent
from fedkeel.engine.world import Job, World
from fedkeel.method.client import (
    Bench,
    Client,
    Progress,
    Reply,
    client_finish,
    client_start,
    client_step,
    kept,
    path,
)
from fedkeel.method.context import ByPart, Facts, Ints, Message
from fedkeel.rng import generator, torch_seed
from fedkeel.task.network import Batch
from fedkeel.tree import State, below, branches, tensors, unwalk, walk

PROGRAMS = 128
"""Recorded steps that are kept, one for each form of their inputs."""


class _WantsAll(Exception):  # noqa: N818 - never leaves this module
    """A part asked for all examples of a client, which were not laid out."""


class _NotTheSame(Exception):  # noqa: N818 - never leaves this module
    """A recorded step gave another result than the step itself."""


@dataclass(frozen=True)
class _Group:
    """Clients that are trained side by side, those with the most steps first.

    Args:
        jobs: the n clients.
        planned: positions, within each client's examples, of each of its mini-batches.
        used: distinct positions of each, where a part prepares examples.
    """

    jobs: list[Job]
    planned: list[list[Ints]]
    used: list[Ints] | None

    @property
    def steps(self) -> list[int]:
        """Steps of each client, the most first."""
        return [len(one) for one in self.planned]


class Chunks:
    """A `Trainer` that trains clients side by side.

    What cannot be recorded, or trained side by side, is trained one by one; `reasons` says why.

    Args:
        world: method, model, data and seed.
        lanes: clients on the leading axis, at most.
    """

    def __init__(self, world: World, lanes: int) -> None:
        self.world = replace(world, bench=replace(world.bench, autograd="functional"))
        self.lanes = lanes
        self.recorded = True
        self.reasons: list[str] = []
        self._plain = OneByOne(world)
        self._programs: dict[Any, _Program] = {}
        self._apart = False  # whether lanes end their round one by one
        data = world.federation.data
        self._x = data.x.view(len(data), -1) if data.x.is_contiguous() else data.x.flatten(1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave recordings behind: another process makes its own."""
        return Chunks, (self._plain.world, self.lanes)

    @property
    def _bench(self) -> Bench:
        return self.world.bench

    def __call__(self, message: Message, jobs: Sequence[Job], kept: Kept) -> Iterator[Done]:
        """Train clients from a message."""
        left = [self._group([job], message) for job in jobs]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            while left:
                group, rest = self._next(left)
                try:
                    found = self._train(message, group, kept)
                except torch.OutOfMemoryError:
                    self._halve(group)
                    continue
                except Exception as error:
                    self._give_up(error, group)
                    if self.recorded:
                        continue
                    found = list(self._plain(message, group.jobs, kept))
                left = rest
                yield from found

    def _next(self, left: list[_Group]) -> tuple[_Group, list[_Group]]:
        """Return the clients that are trained next, side by side, and the others."""
        if not self.recorded or self.lanes == 1 or len(left) == 1:
            return left[0], left[1:]
        ordered = sorted(left, key=lambda group: -group.steps[0])  # stable
        if self._bench.network.mixes_examples:  # padding would be seen by the others
            first = _widths(ordered[0])
            alike = [group for group in ordered if _widths(group) == first][: self.lanes]
            rest = [group for group in ordered if group not in alike]
        else:
            alike, rest = ordered[: self.lanes], ordered[self.lanes :]
        used = [one.used[0] for one in alike if one.used is not None]
        return _Group(
            [one.jobs[0] for one in alike], [one.planned[0] for one in alike], used or None
        ), rest

    def _halve(self, group: _Group) -> None:
        """Use half as many lanes after memory has run out."""
        self._programs.clear()
        if len(group.jobs) == 1:
            self.recorded = False
            self.reasons.append("one client at a time: a recorded step does not fit into memory")
        else:
            self.lanes = len(group.jobs) // 2
            self.reasons.append(f"chunks of {self.lanes}: more do not fit into memory")

    def _give_up(self, error: Exception, group: _Group) -> None:
        """Train in a plainer way from now on."""
        first = next(iter(str(error).strip().splitlines()), "")
        why = f"{type(error).__name__}: {first}"[:200]
        if len(group.jobs) > 1:
            self.lanes = 1
            self.reasons.append(f"clients cannot be trained side by side: {why}")
        else:
            self.recorded = False
            self.reasons.append(f"steps cannot be recorded: {why}")

    def _group(self, jobs: list[Job], message: Message) -> _Group:
        planned = [plan(self.world, message, job) for job in jobs]
        used = None
        if self._bench.plan.preparations:
            used = [np.unique(np.concatenate(one)) for one in planned]
        return _Group(jobs, planned, used)

    # ---- one group --------------------------------------------------------------------------

    def _train(self, message: Message, group: _Group, kept: Kept) -> list[Done]:
        """Train a group, on lanes where there are several."""
        world, jobs = self.world, group.jobs
        lanes = None if len(jobs) == 1 else len(jobs)
        if lanes is None:
            seed(torch_seed(world.seed, "torch", message.round, jobs[0].client))
        shared = _shared(message)
        held = self._held(message, group, kept)
        moving = self._start(message, shared, held, group)
        feed = _Feed(self, message, group)
        rate = torch.tensor(message.lr, dtype=torch.float64)
        done: list[Done] = []
        live = len(jobs)
        for step in range(group.steps[0]):
            going = sum(steps > step for steps in group.steps)
            if lanes is not None and going <= live // 2:
                while live > going and live // 2 >= going:
                    live = live // 2
                done.append(self._finish(message, group, held, moving, live))
                held, moving = (_head(one, live) for one in (held, moving))
                group = _first(group, live)
            batch = feed.batch(step, live, going)
            moving = self._step(shared, held, moving, batch, rate, lanes and live)
        done.append(self._finish(message, group, held, moving, None if lanes is None else 0))
        return done

    def _held(self, message: Message, group: _Group, get: Kept) -> State:
        """Return what stays the same in each lane: what it keeps, and facts about it."""
        bench = self._bench
        own = [get(job.client) for job in group.jobs]
        if any(one is None for one in own):
            fresh, _ = kept(bench, message, None)
            own = [fresh if one is None else one for one in own]
        about = [facts(self.world, job.client) for job in group.jobs]
        told = {
            "client": torch.tensor([one.client for one in about]),
            "examples": torch.tensor([one.examples for one in about]),
        }
        counts = [one.counts for one in about if one.counts is not None]
        if counts:
            told["counts"] = torch.stack(counts)
        if len(group.jobs) == 1:
            return {"mine": dict(own[0] or {}), "facts": {k: t[0] for k, t in told.items()}}
        return {"mine": tree.stack([one or {} for one in own]), "facts": dict(told)}

    def _start(self, message: Message, shared: State, held: State, group: _Group) -> State:
        """Begin the round of each lane; what parts prepare is added to what it holds."""
        bench, lanes = self._bench, len(group.jobs)
        single = lanes == 1

        def start(shared: State, held: State, whole: State) -> State:
            batch = _batch_of(whole) if whole else None
            client, progress = client_start(
                bench,
                _message(shared),
                branches(below(held, "mine")),
                _facts(held),
                _refuse,
                (lambda: batch) if batch is not None else None,
            )
            return {"moving": _moving(progress), "prepared": dict(client.prepared)}

        whole: State = {}
        if bench.plan.preparations:
            assert group.used is not None
            whole = self._whole(group, group.used)
            lift = start if single else torch.func.vmap(start, in_dims=(None, 0, 0))
            found = self._run("start", lift, (shared, held, whole))
        elif single:
            found = start(shared, held, whole)
        else:
            found = torch.func.vmap(
                lambda shared, held: start(shared, held, {}), in_dims=(None, 0)
            )(shared, held)
        if below(found, "prepared"):
            held["prepared"] = below(found, "prepared")
        return tree.map_tensors(torch.clone, below(found, "moving"))  # steps write over it

    def _step(
        self,
        shared: State,
        held: State,
        moving: State,
        batch: State,
        rate: Tensor,
        lanes: int | None,
    ) -> State:
        """Make one step in every lane."""
        bench = self._bench

        def step(shared: State, held: State, moving: State, batch: State, rate: State) -> State:
            client = _client(bench, _message(shared), held, _refuse)
            after = client_step(
                client,
                _progress(moving),
                _batch_of(batch),
                tree.tensors(batch).get("rows"),
                tree.tensors(batch).get("first"),
                tree.tensors(batch).get("active"),
                tensors(below(batch, "noise")) or None,
                tree.leaf(rate, "lr"),
            )
            return _moving(after)

        lift: Callable[..., State] = step
        if lanes is not None:
            lift = torch.func.vmap(step, in_dims=(None, 0, 0, 0, None))
        return self._run("step", lift, (shared, held, moving, batch, {"lr": rate}), owned=2)

    def _finish(
        self, message: Message, group: _Group, held: State, moving: State, start: int | None
    ) -> Done:
        """End the round of the lanes from `start` on; None for a single one without an axis."""
        if start:
            held, moving = (_tail(one, start) for one in (held, moving))
            group = _last(group, start)
        if start is not None and not self._apart:
            try:
                found = self._together(message, group, held, moving)
            except _WantsAll:
                self._apart = True
        if start is None:
            found = _head_added(self._by_itself(message, group, 0, held, moving))
        elif self._apart:
            lanes = range(len(group.jobs))
            each = [
                self._by_itself(message, group, i, _lane(held, i), _lane(moving, i)) for i in lanes
            ]
            found = tree.stack(each)
        counts = tensors(found)
        return Done(
            group.jobs,
            {k: below(found, k) for k in ("delta", "buffers", "uploads", "mine", "notes")},
            counts["loss"],
            counts["finite"],
            group.steps,
            [sum(map(len, one)) for one in group.planned],
        )

    def _together(self, message: Message, group: _Group, held: State, moving: State) -> State:
        """End the round of all lanes of a group at once."""
        lengths = [path(self._bench, count, message.lr) for count in group.steps]
        steps = torch.tensor(group.steps)
        unit = torch.tensor(lengths, dtype=torch.float64)

        def finish(held: State, moving: State, steps: Tensor, unit: Tensor) -> State:
            client = _client(self._bench, message, held, _refuse)
            return _ended(client_finish(client, _progress(moving), steps, unit))

        found: State = torch.func.vmap(finish)(held, moving, steps, unit)
        return found

    def _by_itself(
        self, message: Message, group: _Group, lane: int, held: State, moving: State
    ) -> State:
        """End the round of one lane, whose states come without an axis."""
        job, steps = group.jobs[lane], group.steps[lane]

        def everything() -> Batch:
            index = self._rows(job, np.arange(self.world.federation.sizes[job.client]))
            return _batch_of(self._gather(index[None], None, True))

        client = replace(
            _client(self._bench, message, held, everything), facts=facts(self.world, job.client)
        )
        return _ended(client_finish(client, _progress(moving), steps))

    def _whole(self, group: _Group, positions: Sequence[Ints]) -> State:
        """Return examples of each lane, padded to the most of them, as one batch."""
        index = [self._rows(job, p) for job, p in zip(group.jobs, positions, strict=True)]
        return self._gather(*_padded(index, max(map(len, index))), len(index) == 1)

    def _rows(self, job: Job, positions: Ints) -> Ints:
        rows: Ints = self.world.federation.client(job.client)[positions]
        return rows

    def _gather(self, index: Ints, weight: Ints | None, single: bool) -> State:
        """Return the examples [n, B, ...] of rows [n, B]; without the n of a single lane."""
        data = self.world.federation.data
        flat = torch.from_numpy(index.reshape(-1)).to(self._x.device)
        lead = index.shape[1:] if single else index.shape
        out: State = {
            "x": self._x.index_select(0, flat).view(*lead, *data.x.shape[1:]),
            "y": data.y.index_select(0, flat).view(lead),
        }
        if weight is not None:
            real = torch.from_numpy(weight).to(self._x.device, self._bench.network.dtype)
            out["weight"] = real[0] if single else real
        return out

    # ---- recorded functions -----------------------------------------------------------------

    def _run(
        self, name: str, function: Callable[..., State], given: Sequence[State], owned: int = -1
    ) -> State:
        """Call a function of states by its recording, which is made at the first such call.

        Args:
            name: what it is, and what decides its Python besides the form of the states.
            function: of states, gives one.
            given: the states.
            owned: which of them may be written over; it is of the result's form.
        """
        flat = [list(walk(state)) for state in given]
        values = [tensor for part in flat for _, tensor in part]
        batch = flat[3] if owned >= 0 else flat[-1]
        form = (name, len(values), tuple((path, tuple(t.shape)) for path, t in batch))
        known = self._programs.get(form)
        if known is None:
            if len(self._programs) >= PROGRAMS:
                self._programs.clear()
            known, found = _record(function, flat, owned)
            self._programs[form] = known
            return found
        return unwalk(dict(zip(known.paths, known.program(*values), strict=True)))


@dataclass(frozen=True)
class _Program:
    """A recording, and the paths of what it returns."""

    program: Captured
    paths: tuple[str, ...]


def _record(
    function: Callable[..., State], flat: list[list[tuple[str, Tensor]]], owned: int
) -> tuple[_Program, State]:
    """Record a function, and return also what it gives: it is run both ways and compared."""
    names = [[path for path, _ in part] for part in flat]
    values = [tensor for part in flat for _, tensor in part]
    paths: list[str] = []

    def of_tensors(*given: Tensor) -> list[Tensor]:
        at, states = 0, []
        for part in names:
            states.append(unwalk(dict(zip(part, given[at : at + len(part)], strict=True))))
            at += len(part)
        found = dict(walk(function(*states)))
        paths[:] = list(found)
        return list(found.values())

    starts = np.cumsum([0, *map(len, names)])
    rate, mine = None, frozenset[int]()
    if owned >= 0:
        rate = len(values) - 1
        mine = frozenset(range(int(starts[owned]), int(starts[owned + 1])))
    program = Captured(of_tensors, values, rate, mine)
    state = torch.random.get_rng_state()
    expected = of_tensors(*values)
    torch.random.set_rng_state(state)
    copies = [t.clone() if i in mine else t for i, t in enumerate(values)]
    found = program(*copies)
    for name, one, other in zip(paths, expected, found, strict=True):
        if not _close(one, other):
            raise _NotTheSame(f"its recording gives another {name.split('/')[0]}")
    return _Program(program, tuple(paths)), unwalk(dict(zip(paths, expected, strict=True)))


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same up to rounding."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    size = float(one.abs().max()) if one.numel() else 0.0
    apart = float((one - other).abs().max()) if one.numel() else 0.0
    if not math.isfinite(size):
        return bool(torch.equal(torch.isfinite(one), torch.isfinite(other)))
    return apart <= size * math.sqrt(torch.finfo(one.dtype).eps)


class _Feed:
    """The batches of a group, step by step.

    Args:
        chunks: whose data they are of.
        message: what the server sent.
        group: the clients.
    """

    def __init__(self, chunks: Chunks, message: Message, group: _Group) -> None:
        self._chunks, self._group = chunks, group
        world = chunks.world
        self._single = len(group.jobs) == 1
        self._full = max(len(p) for one in group.planned for p in one)
        self._passes = [
            passes(world, job, p) for job, p in zip(group.jobs, group.planned, strict=True)
        ]
        clients = [job.client for job in group.jobs]
        self._crops = [generator(world.seed, "augment", message.round, k) for k in clients]
        self._noise = [noise(world, message, k) for k in clients]

    def batch(self, step: int, live: int, going: int) -> State:
        """Return what the first `live` lanes see in a step; the first `going` of them train.

        Tensors have a leading axis of lanes where there are several.
        """
        group = self._group
        positions = [one[min(step, len(one) - 1)] for one in group.planned[:live]]
        index = [
            self._chunks._rows(j, p) for j, p in zip(group.jobs[:live], positions, strict=True)
        ]
        rows, weight = _padded(index, self._width(positions[:going]))
        out = self._chunks._gather(rows, weight, self._single)
        if going < live:
            out["active"] = torch.arange(live, device=_device(out)) < going
        if self._chunks.world.augment:
            out["x"] = self._augmented(tree.leaf(out, "x"), positions, going, rows.shape)
        if group.used is not None:
            out.update(self._places(step, positions, rows.shape[1]))
        drawn = [draw() for draw in self._noise[:live]]
        if drawn[0] is not None:
            normal = [one for one in drawn if one is not None]
            out["noise"] = dict(normal[0]) if self._single else tree.stack(normal)
        return out

    def _width(self, positions: Sequence[Ints]) -> int:
        """Return how wide the batch is: a few widths, so that few steps are recorded."""
        most = max(map(len, positions))
        if self._single or all(len(one) == most for one in positions):
            return most
        width = self._full
        while width // 2 >= most:
            width //= 2
        return width

    def _augmented(
        self, x: Tensor, positions: Sequence[Ints], going: int, shape: tuple[int, ...]
    ) -> Tensor:
        offsets = np.full((2, *shape), 4, dtype=np.int64)
        mirrored = np.zeros(shape, dtype=np.bool_)
        for lane, own in enumerate(positions[:going]):
            drawn = crops(self._crops[lane], len(own))
            offsets[:, lane, : len(own)] = drawn.offsets
            mirrored[lane, : len(own)] = drawn.mirrored
        where = Crops(offsets.reshape(2, -1), mirrored.reshape(-1))
        lead = x.shape[:1] if self._single else x.shape[:2]
        flat = x.reshape(-1, *x.shape[len(lead) :])
        return crop_flip(flat, where).reshape(x.shape)

    def _places(self, step: int, positions: Sequence[Ints], width: int) -> State:
        """Return where the examples of a step stand among those that parts have prepared."""
        assert self._group.used is not None
        used = self._group.used
        rows = np.zeros((len(positions), width), dtype=np.int64)
        first = np.zeros_like(rows)
        for lane, own in enumerate(positions):
            rows[lane, : len(own)] = np.searchsorted(used[lane], own)
            begun = self._group.planned[lane][step % self._passes[lane]]
            begun = begun[:width]
            first[lane, : len(begun)] = np.searchsorted(used[lane], begun)
        if self._single:
            begun = self._group.planned[0][step % self._passes[0]]
            return {
                "rows": torch.from_numpy(rows[0]),
                "first": torch.from_numpy(np.searchsorted(used[0], begun)),
            }
        return {"rows": torch.from_numpy(rows), "first": torch.from_numpy(first)}


def _padded(index: Sequence[Ints], width: int) -> tuple[Ints, Ints | None]:
    """Return rows [n, width], the first one repeated where there are fewer, and their weights.

    The weights are None where no row is padding.
    """
    if all(len(one) == width for one in index):
        return np.stack(index), None
    rows = np.empty((len(index), width), dtype=np.int64)
    weight = np.zeros((len(index), width), dtype=np.int64)
    for lane, own in enumerate(index):
        own = own[:width]
        rows[lane, : len(own)], rows[lane, len(own) :] = own, own[0]
        weight[lane, : len(own)] = 1
    return rows, weight


def _widths(group: _Group) -> tuple[int, ...]:
    return tuple(map(len, group.planned[0]))


def _first(group: _Group, count: int) -> _Group:
    used = None if group.used is None else group.used[:count]
    return _Group(group.jobs[:count], group.planned[:count], used)


def _last(group: _Group, start: int) -> _Group:
    used = None if group.used is None else group.used[start:]
    return _Group(group.jobs[start:], group.planned[start:], used)


def _head(state: State, count: int) -> State:
    return tree.map_tensors(lambda t: t[:count], state)


def _tail(state: State, start: int) -> State:
    return tree.map_tensors(lambda t: t[start:], state)


def _lane(state: State, lane: int) -> State:
    return tree.map_tensors(lambda t: t[lane], state)


def _head_added(state: State) -> State:
    return tree.map_tensors(lambda t: t[None], state)


def _device(state: State) -> torch.device:
    return tree.leaf(state, "x").device


def _refuse() -> Batch:
    raise _WantsAll


# ---- values of the client loop as states --------------------------------------------------------


def _shared(message: Message) -> State:
    return {
        "start": dict(message.params),
        "received": dict(message.buffers),
        "sent": dict(message.sent),
    }


def _message(shared: State) -> Message:
    """Return the message as a recorded step sees it: round and rate are not known to it."""
    return Message(
        params=tensors(below(shared, "start")),
        buffers=tensors(below(shared, "received")),
        sent=branches(below(shared, "sent")),
        round=0,
        lr=math.nan,
    )


def _facts(held: State) -> Facts:
    told = tensors(below(held, "facts"))
    return Facts(told["client"], told["examples"], told.get("counts"))


def _client(bench: Bench, message: Message, held: State, everything: Callable[[], Batch]) -> Client:
    return Client(
        bench=bench,
        message=message,
        facts=_facts(held),
        mine=branches(below(held, "mine")),
        prepared=branches(below(held, "prepared")),
        everything=everything,
    )


def _ended(reply: Reply) -> State:
    return {**sent(reply), "loss": reply.loss, "finite": reply.finite}


def _batch_of(state: State) -> Batch:
    own = tensors(state)
    return Batch(own["x"], own["y"], own.get("weight"))


def _moving(progress: Progress) -> State:
    return {
        "params": dict(progress.params),
        "buffers": dict(progress.buffers),
        "optimiser": dict(progress.optimiser),
        "carry": dict(progress.carry),
        "loss": progress.loss,
    }


def _progress(moving: State) -> Progress:
    carry: ByPart = branches(below(moving, "carry"))
    return Progress(
        params=tensors(below(moving, "params")),
        buffers=tensors(below(moving, "buffers")),
        optimiser=below(moving, "optimiser"),
        carry=carry,
        loss=tree.leaf(moving, "loss"),
    )
