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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.clock import Clock
from fedkeel.engine.feed import Examples, Feed, Group
from fedkeel.engine.loop import Done, Kept, OneByOne, facts, seed, sent
from fedkeel.engine.recordings import Recordings
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
from fedkeel.method.context import ByPart, Facts, Message
from fedkeel.rng import torch_seed
from fedkeel.task.network import Batch
from fedkeel.tree import State, below, branches, map_tensors, tensors


class _WantsAll(Exception):  # noqa: N818 - never leaves this module
    """A part asks for all examples of a client, which are not laid out in lanes."""


class Chunks:
    """A `Trainer` that trains clients side by side.

    What cannot be trained side by side, or recorded, is trained one by one; `reasons` says why.

    Args:
        world: method, model, data and seed.
        lanes: clients on the leading axis, at most.
        device: where they train.
    """

    def __init__(self, world: World, lanes: int, device: str = "cpu") -> None:
        self.lanes = lanes
        self.device = torch.device(device)
        self.recorded = True
        self.reasons: list[str] = []
        self._world = world
        self.placed = world.on(self.device)
        self._bench = replace(self.placed.bench, autograd="functional")
        self._plain = OneByOne(self.placed)
        self._recordings = Recordings()
        self._examples = Examples(self.placed.federation.data, world.bench.network.dtype)
        self._apart = False  # whether lanes end their round one by one

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave recordings behind: another process makes its own."""
        return Chunks, (self._world, self.lanes, str(self.device))

    def __call__(self, message: Message, jobs: Sequence[Job], kept: Kept) -> Iterator[Done]:
        """Train clients from a message."""
        clock = Clock()
        message = self._placed_message(message)
        left = [Group.of(self._world, message, job) for job in jobs]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            while left and self.recorded:
                group, rest = self._next(left)
                try:
                    found = self._train(message, group, kept, clock)
                except torch.OutOfMemoryError:
                    self._halve(group)
                except Exception as error:  # whatever a module may do that cannot be recorded
                    self._give_up(error, group)
                else:
                    left = rest
                    yield from found[:-1]
                    yield replace(found[-1], seconds=clock.seconds)
                    clock = Clock()
            yield from self._plain(message, [group.jobs[0] for group in left], self._placing(kept))

    def _placed_message(self, message: Message) -> Message:
        return replace(
            message,
            params=tensors(self._place(dict(message.params))),
            buffers=tensors(self._place(dict(message.buffers))),
            sent=branches(self._place(dict(message.sent))),
        )

    def _placing(self, kept: Kept) -> Kept:
        """Return what gives clients' states on the device."""

        def placed(client: int) -> ByPart | None:
            own = kept(client)
            return None if own is None else branches(self._place(dict(own)))

        return placed

    def _place(self, state: State) -> State:
        return map_tensors(lambda t: t.to(self.device), state)

    def _next(self, left: list[Group]) -> tuple[Group, list[Group]]:
        """Return the clients that are trained next, side by side, and the others."""
        if self.lanes == 1 or len(left) == 1:
            return left[0], left[1:]
        ordered = sorted(left, key=lambda group: -group.steps[0])  # stable
        if not self._bench.network.mixes_examples:
            return Group.join(ordered[: self.lanes]), ordered[self.lanes :]
        alike = [g for g in ordered if g.widths == ordered[0].widths]  # the others see padding
        rest = [g for g in ordered if g.widths != ordered[0].widths]
        return Group.join(alike[: self.lanes]), alike[self.lanes :] + rest

    @property
    def _pads(self) -> bool:
        """Whether padding changes nothing: neither other examples nor random numbers see it."""
        return not (self._bench.network.mixes_examples or self._recordings.random)

    def _halve(self, group: Group) -> None:
        """Use half as many lanes after memory has run out."""
        self._recordings.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.lanes = max(1, len(group.jobs) // 2)
        self.recorded = len(group.jobs) > 1
        found = f"chunks of {self.lanes}" if self.recorded else "steps that are not recorded"
        self.reasons.append(f"{found}: more does not fit into memory")

    def _give_up(self, error: Exception, group: Group) -> None:
        """Train in a plainer way from now on."""
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "random operation" in first:
            first = "the model draws random numbers"
        if len(group.jobs) > 1:
            self.lanes = 1
            self.reasons.append(f"clients are not trained side by side: {first[:160]}")
        elif self._examples.channels_last:
            self._examples.channels_last = False  # a module may want the usual layout
        else:
            self.recorded = False
            self.reasons.append(f"steps are not recorded: {first[:160]}")

    # ---- one group ------------------------------------------------------------------------------

    def _train(self, message: Message, group: Group, kept: Kept, clock: Clock) -> list[Done]:
        """Train a group, on lanes where there are several clients."""
        single = len(group.jobs) == 1
        if single:
            client = group.jobs[0].client
            seed(torch_seed(self._world.seed, "torch", message.round, client))
        feed = Feed(self._world, self._examples, message, group)
        clock.lap("data")
        shared, rate = _shared(message), torch.tensor(message.lr, dtype=torch.float64)
        held = self._held(message, group, kept)
        moving = self._start(shared, held, feed if group.used else None, single)
        done: list[Done] = []
        live, left = len(group.jobs), group
        clock.lap("steps")
        for step in range(group.steps[0]):
            going = sum(steps > step for steps in left.steps)
            if not single and going <= live // 2:
                while live // 2 >= going:
                    live //= 2
                done.append(self._finish(message, left, held, moving, live))
                clock.lap("upload")
                left = left.part(slice(live))
                held, moving = (map_tensors(lambda t, n=live: t[:n], s) for s in (held, moving))  # type: ignore[misc]
            batch = feed.batch(step, live, going, self._pads)
            clock.lap("data")
            moving = self._step(shared, held, moving, batch, rate, single)
            clock.lap("steps")
        done.append(self._finish(message, left, held, moving, None if single else 0))
        clock.lap("upload")
        return done

    def _held(self, message: Message, group: Group, get: Kept) -> State:
        """Return what stays the same in each lane: what it keeps, and facts about it."""
        placed = self._placing(get)
        own = [placed(job.client) for job in group.jobs]
        if any(one is None for one in own):
            fresh, _ = kept(self._bench, message, None)
            own = [fresh if one is None else one for one in own]
        about = [facts(self._world, job.client) for job in group.jobs]
        told: State = {
            "client": torch.tensor([one.client for one in about]),
            "examples": torch.tensor([one.examples for one in about]),
        }
        counts = [one.counts for one in about if one.counts is not None]
        if counts:
            told["counts"] = torch.stack(counts)
        mine: list[State] = [dict(one or {}) for one in own]
        if len(mine) == 1:
            told = map_tensors(lambda t: t[0], told)
        held: State = {"mine": mine[0] if len(mine) == 1 else tree.stack(mine), "facts": told}
        return self._place(held)

    def _start(self, shared: State, held: State, feed: Feed | None, single: bool) -> State:
        """Begin the round of each lane; what parts prepare is added to what it holds."""
        bench = self._bench

        def start(shared: State, held: State, whole: State) -> State:
            client, progress = client_start(
                bench,
                _message(shared),
                branches(below(held, "mine")),
                _facts(held),
                _refuse,
                (lambda: _batch(whole)) if whole else None,
            )
            return {"moving": _moving(progress), "prepared": dict(client.prepared)}

        if feed is not None:
            lift = start if single else torch.func.vmap(start, in_dims=(None, 0, 0))
            found = self._recordings.run("start", lift, (shared, held, feed.prepared()), varies=2)
        elif single:
            found = start(shared, held, {})
        else:
            empty = torch.func.vmap(lambda held: start(shared, held, {}))
            found = empty(held)
        if below(found, "prepared"):
            held["prepared"] = below(found, "prepared")
        return map_tensors(torch.clone, below(found, "moving"))  # steps write over it

    def _step(
        self, shared: State, held: State, moving: State, batch: State, rate: Tensor, single: bool
    ) -> State:
        """Make one step in every lane."""
        bench = self._bench

        def step(shared: State, held: State, moving: State, batch: State, lr: Tensor) -> State:
            client = _client(bench, _message(shared), held, _refuse)
            own = tensors(batch)
            after = client_step(
                client,
                _progress(moving),
                _batch(batch),
                own.get("rows"),
                own.get("first"),
                own.get("active"),
                tensors(below(batch, "noise")) or None,
                lr,
            )
            return _moving(after)

        lift = step if single else torch.func.vmap(step, in_dims=(None, 0, 0, 0, None))
        given = (shared, held, moving, batch)
        return self._recordings.run("step", lift, given, varies=3, owned=2, rate=rate)

    def _finish(
        self, message: Message, group: Group, held: State, moving: State, start: int | None
    ) -> Done:
        """End the round of the lanes from `start` on; None for a single one without an axis."""
        if start:
            held, moving = (map_tensors(lambda t: t[start:], s) for s in (held, moving))
            group = group.part(slice(start, None))
        if start is None:
            alone = self._by_itself(message, group, 0, held, moving)
            found = map_tensors(lambda t: t[None], alone)
        else:
            found = self._together(message, group, held, moving)
        counts = tensors(found)
        return Done(
            group.jobs,
            {k: below(found, k) for k in ("delta", "buffers", "uploads", "mine", "notes")},
            counts["loss"],
            counts["finite"],
            group.steps,
            group.seen,
        )

    def _together(self, message: Message, group: Group, held: State, moving: State) -> State:
        """End the round of all lanes of a group."""
        lengths = [path(self._bench, count, message.lr) for count in group.steps]
        steps = torch.tensor(group.steps, device=self.device)
        unit = torch.tensor(lengths, dtype=torch.float64, device=self.device)

        def finish(held: State, moving: State, steps: Tensor, unit: Tensor) -> State:
            client = _client(self._bench, message, held, _refuse)
            return _ended(client_finish(client, _progress(moving), steps, unit))

        if not self._apart:
            try:
                found: State = torch.func.vmap(finish)(held, moving, steps, unit)
                return found
            except _WantsAll:
                self._apart = True
        each = []
        for lane in range(len(group.jobs)):
            own = (map_tensors(lambda t, i=lane: t[i], s) for s in (held, moving))  # type: ignore[misc]
            each.append(self._by_itself(message, group, lane, *own))
        return tree.stack(each)

    def _by_itself(
        self, message: Message, group: Group, lane: int, held: State, moving: State
    ) -> State:
        """End the round of one lane, whose states come without an axis."""
        job, federation = group.jobs[lane], self._world.federation

        def everything() -> Batch:
            return _batch(self._examples.take(federation.client(job.client)[None], None, True))

        client = _client(self._bench, message, held, everything)
        about = Facts(job.client, len(federation.client(job.client)), client.facts.counts)
        client = replace(client, facts=about)
        return _ended(client_finish(client, _progress(moving), group.steps[lane]))


# ---- values of the client loop as states --------------------------------------------------------


def _refuse() -> Batch:
    raise _WantsAll


def _shared(message: Message) -> State:
    return {
        "start": dict(message.params),
        "received": dict(message.buffers),
        "sent": dict(message.sent),
    }


def _message(shared: State) -> Message:
    """Return the message as a recorded function sees it: round and rate are not known to it."""
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


def _batch(state: State) -> Batch:
    own = tensors(state)
    return Batch(own["x"], own["y"], own.get("weight"))


def _ended(reply: Reply) -> State:
    return {**sent(reply), "loss": reply.loss, "finite": reply.finite}


def _moving(progress: Progress) -> State:
    return {
        "params": dict(progress.params),
        "buffers": dict(progress.buffers),
        "optimiser": dict(progress.optimiser),
        "carry": dict(progress.carry),
        "loss": progress.loss,
    }


def _progress(moving: State) -> Progress:
    return Progress(
        params=tensors(below(moving, "params")),
        buffers=tensors(below(moving, "buffers")),
        optimiser=below(moving, "optimiser"),
        carry=branches(below(moving, "carry")),
        loss=tree.leaf(moving, "loss"),
    )
