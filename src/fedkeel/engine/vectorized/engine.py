"""Clients trained side by side, by recorded steps: what the vectorized engine does with a chunk.

Clients lie on a leading axis of lanes. The longest come first, so that those which still train are
always the first lanes; when half of them have ended, the others go on in half as many lanes. In
between, steps of lanes that have ended are masked, and batches shorter than others are padded with
examples of weight 0.

One lane has no leading axis at all. It is what large models on a processor want: their arithmetic
fills the machine, and a recorded step saves the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedkeel import tree
from fedkeel.clock import Clock
from fedkeel.data import batches
from fedkeel.engine.base import Job, TrainingSetup
from fedkeel.engine.compiler.cache import Flat
from fedkeel.engine.compiler.capture import warm_up as warm_up
from fedkeel.engine.local import Done, ReadRecord, SequentialTrainer, carry_on, client_info, seed
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.vectorized.batching import Examples, Feed, Group
from fedkeel.engine.vectorized.loop import Common, Lanes
from fedkeel.engine.vectorized.low_rank import Matrix, dense, stack_records
from fedkeel.method.context import ClientInfo, Message
from fedkeel.method.local_loop import kept, path
from fedkeel.rng import torch_seeds
from fedkeel.tree import State, map_tensors, substate, substates, tensors, unwalk, walk

CLIENT_STATE = "client_state/"
"""Prefix of the paths of what a client keeps."""

SHORT = 8
"""Steps of a round that is recorded as a whole, at most."""


class VectorizedTrainer:
    """A `Trainer` that trains clients side by side.

    What cannot be trained side by side, or recorded, is trained one by one; `reasons` says why.

    Args:
        setup: method, model, data and seed.
        lanes: clients on the leading axis, at most.
        device: where they train.
        placed: `setup` with network and data there, where it is at hand.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        lanes: int,
        device: str = "cpu",
        placed: TrainingSetup | None = None,
    ) -> None:
        self.parallel_clients = lanes
        self.device = torch.device(device)
        self.recorded = True
        self.reasons: list[str] = []
        self._setup = setup
        self.placed = placed or setup.on(self.device)
        network = self.placed.training.network.for_tracing()
        self._training = replace(self.placed.training, network=network, autograd="functional")
        self._plain = SequentialTrainer(self.placed)
        self._lanes = Lanes(self._training, setup.precision, setup.draws)
        self._examples = Examples(self.placed.federation.data, setup.training.network.dtype)
        self._sources: list[torch.Generator] = []  # of lanes: graphs know these, and no others
        self._short = {True, False} if _short(setup) else set()  # alone, and side by side
        traits = setup.training.network.traits
        if traits.why_not_traceable:
            self.parallel_clients, self.recorded = 1, False
            self.reasons.append(f"steps are not recorded: {traits.why_not_traceable}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave recordings behind: another process makes its own."""
        return VectorizedTrainer, (self._setup, self.parallel_clients, str(self.device))

    def __call__(
        self, message: Message, jobs: Sequence[Job], kept: ReadRecord, sums: bool = False
    ) -> Iterator[Done]:
        """Train clients from a message."""
        clock = Clock()
        message = self._placed_message(message)
        left = Group.each(self._setup, message, jobs)
        own = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=own), torch.no_grad():
            while left and self.recorded:
                group, rest = self._next(left)
                try:
                    found = self._train(message, group, kept, clock, sums)
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
            broadcast=substates(self._place(dict(message.broadcast))),
        )

    def _placing(self, kept: ReadRecord) -> ReadRecord:
        """Return what reads clients' records and places them on the device."""

        def placed(client: int) -> ClientRecord | None:
            record = kept(client)
            if record is None:
                return None
            return ClientRecord({k: v.to(self.device) for k, v in record.values.items()})

        return placed

    def _place(self, state: State) -> State:
        return map_tensors(lambda t: t.to(self.device), state)

    def _next(self, left: list[Group]) -> tuple[Group, list[Group]]:
        """Return the clients that are trained next, side by side, and the others."""
        if self.parallel_clients == 1 or len(left) == 1:
            return left[0], left[1:]
        ordered = sorted(left, key=lambda group: -group.steps[0])  # stable
        if self._setup.pads:
            return Group.join(ordered[: self.parallel_clients]), ordered[self.parallel_clients :]
        alike = [g for g in ordered if g.form == ordered[0].form]  # the others see padding
        rest = [g for g in ordered if g.form != ordered[0].form]
        return Group.join(alike[: self.parallel_clients]), alike[self.parallel_clients :] + rest

    def _wait(self) -> None:
        """Wait for a GPU, whose seconds would count for whatever asks for its results."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _halve(self, group: Group) -> None:
        """Use half as many lanes after memory has run out."""
        self._lanes.recordings.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.parallel_clients = max(1, len(group.jobs) // 2)
        self.recorded = len(group.jobs) > 1
        found = (
            f"chunks of {self.parallel_clients}" if self.recorded else "steps that are not recorded"
        )
        self.reasons.append(f"{found}: more does not fit into memory")

    def _give_up(self, error: Exception, group: Group) -> None:
        """Train in a plainer way from now on."""
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "random operation" in first:
            first = "the model draws random numbers, or may (attention does where it drops out)"
        if len(group.jobs) > 1:
            self.parallel_clients = 1
            self.reasons.append(f"clients are not trained side by side: {first[:160]}")
        elif self._examples.channels_last:
            self._examples.channels_last = False  # a module may want the usual layout
        else:
            self.recorded = False
            self.reasons.append(f"steps are not recorded: {first[:160]}")

    # ---- one group ------------------------------------------------------------------------------

    def _train(
        self, message: Message, group: Group, kept: ReadRecord, clock: Clock, sums: bool
    ) -> list[Done]:
        """Train a group, on lanes where there are several clients."""
        alike = self._setup.draws is None or len(set(group.widths)) == 1
        if (len(group.jobs) == 1) in self._short and len(set(group.steps)) == 1 and alike:
            held = self._held(message, group, kept, thin=self.device.type == "cpu")
            done = self._at_once(message, group, held, clock, sums and len(group.jobs) > 1)
            if done is not None:
                return [done]
            del held  # before it is read again
        return self._by_steps(message, group, self._held(message, group, kept), clock)

    def _begin(self, message: Message, group: Group) -> tuple[Common, Feed]:
        """Return what the lanes see, with all random numbers of their rounds yet to be drawn."""
        feed = Feed(self._setup, self._examples, message, group)
        alone = len(group.jobs) == 1
        drawing = group.jobs if alone or self._setup.draws is not None else []
        clients = [job.client for job in drawing]
        seeds = torch_seeds(self._setup.seed, "torch", message.round, clients)
        if alone:
            seed(seeds[0])
            return Common.of(message, None), feed
        missing = len(seeds) - len(self._sources)
        self._sources += [torch.Generator(self.device) for _ in range(missing)]
        sources = self._sources[: len(seeds)]
        for source, one in zip(sources, seeds, strict=True):
            source.manual_seed(one)
        return Common.of(message, sources), feed

    def _at_once(
        self, message: Message, group: Group, held: Flat, clock: Clock, sums: bool
    ) -> Done | None:
        """Train lanes of short rounds of equal length; None where that cannot be."""
        common, feed = self._begin(message, group)
        weights = None
        if sums:
            weights = torch.from_numpy(self._setup.raw_weights(group.jobs, group.seen))
            weights = weights.to(self.device, self._training.network.dtype)
        pads = self._setup.pads and self._setup.draws is None
        seen = feed.batches(group.steps[0], pads)
        prepared = feed.prepared(self._setup.pads) if group.used else {}
        clock.lap("data")
        about = self._about(common, group)
        try:
            found = self._lanes.whole(common, held, prepared, seen, about, weights)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # step by step it may be possible, or is known why not
            self._short.discard(len(group.jobs) == 1)
            return None
        self._wait()
        clock.lap("steps")
        if len(group.jobs) > 1 and not bool(dense(found.by_path["finite"]).all()):
            return None  # it spoils a sum, and may be finite by itself: terms overflow earlier
        return replace(_done(group, found), added=sums)

    def _by_steps(self, message: Message, group: Group, held: Flat, clock: Clock) -> list[Done]:
        """Train lanes step by step; as they end, the others go on in half as many."""
        common, feed = self._begin(message, group)
        clock.lap("data")
        prepared = feed.prepared(self._setup.pads) if group.used else {}
        held, moving = self._lanes.start(common, held, prepared)
        done: list[Done] = []
        live, left = len(group.jobs), group
        clock.lap("steps")
        for step in range(group.steps[0]):
            going = sum(steps > step for steps in left.steps)
            if not common.single and going <= live // 2:
                while live // 2 >= going:
                    live //= 2
                self._wait()
                clock.lap("steps")
                done.append(self._finish(common, left, held, moving, live))
                clock.lap("upload")
                left = left.part(slice(live))
                held, moving = (flat.map(lambda t, n=live: t[:n]) for flat in (held, moving))  # type: ignore[misc]
            batch = feed.batch(step, live, going, self._setup.pads)
            clock.lap("data")
            real = None if self._setup.draws is None else feed.real(step, batch, going)
            moving = self._lanes.step(common, held, moving, batch, real)
            clock.lap("steps")
        self._wait()
        clock.lap("steps")
        done.append(self._finish(common, left, held, moving, 0))
        clock.lap("upload")
        return done

    def _held(self, message: Message, group: Group, get: ReadRecord, thin: bool = False) -> Flat:
        """Return what stays the same in each lane: what it keeps, and facts about it.

        Matrices of what it keeps are products where they may be (`thin`) and come as such.
        """
        values = self._client_state(message, group, self._placing(get), thin)
        about = [client_info(self._setup, job.client) for job in group.jobs]
        told: State = {
            "client": torch.tensor([one.client for one in about]),
            "examples": torch.tensor([one.examples for one in about]),
        }
        counts = [one.class_counts for one in about if one.class_counts is not None]
        if counts:
            told["counts"] = torch.stack(counts)
        if len(group.jobs) == 1:
            told = map_tensors(lambda t: t[0], told)
        held = {CLIENT_STATE + path: value for path, value in values.items()}
        return Flat.from_values({**held, **dict(walk({"facts": told}))}).map(
            lambda t: t.to(self.device)
        )

    def _client_state(
        self, message: Message, group: Group, get: ReadRecord, thin: bool
    ) -> dict[str, Matrix]:
        """Return what each lane keeps by path; clients are read one after the other."""
        if not self._training.stateful:
            return {}
        records = self._records(message, group, get)
        if len(group.jobs) == 1:
            return {path: dense(value) for path, value in next(records).values.items()}
        parts = self._training.plan.renewed if thin else ()
        seen = sum(max(sizes) for sizes in zip(*group.widths, strict=True)) if parts else 0
        return stack_records(records, len(group.jobs), seen, parts)

    def _records(self, message: Message, group: Group, get: ReadRecord) -> Iterator[ClientRecord]:
        """Yield what each client keeps."""
        fresh: ClientRecord | None = None
        for job in group.jobs:
            record = get(job.client)
            if record is None:
                if fresh is None:  # which may be empty, and is made once
                    fresh = ClientRecord.of(dict(kept(self._training, message, None)[0]))
                record = fresh
            yield record

    def _finish(self, common: Common, group: Group, held: Flat, moving: Flat, start: int) -> Done:
        """End the round of the lanes from `start` on."""
        if start:
            held, moving = (flat.map(lambda t: t[start:]) for flat in (held, moving))
            group = group.part(slice(start, None))
        found = self._lanes.end(common, held, moving, self._about(common, group))
        if found is None:
            each = []
            for lane in range(len(group.jobs)):
                own = [held.state, moving.state]
                if not common.single:
                    own = [map_tensors(lambda t, i=lane: t[i], state) for state in own]  # type: ignore[misc]
                if common.sources:  # what is drawn at the end follows what the steps have drawn
                    carry_on(common.sources[start + lane])
                each.append(self._alone(common.message, group, lane, *own))
            found = tree.stack(each)
        return _done(group, Flat.of(found))

    def _about(self, common: Common, group: Group) -> State:
        """Return what the end of a round has to know of each lane."""
        steps = group.steps
        known = {count: path(self._training, count, common.message.lr) for count in set(steps)}
        about: State = {
            "steps": torch.tensor(steps, device=self.device),
            "path_length": torch.tensor(
                [known[count] for count in steps], dtype=torch.float64, device=self.device
            ),
        }
        return map_tensors(lambda t: t[0], about) if common.single else about

    def _alone(
        self, message: Message, group: Group, lane: int, held: State, moving: State
    ) -> State:
        """End the round of one lane, whose states come without an axis."""
        job, federation = group.jobs[lane], self._setup.federation
        rows = federation.client(job.client)

        def everything() -> State:
            return self._examples.take(self._examples.placed(rows[None]), None, True)

        counts = tensors(substate(held, "facts")).get("counts")
        about = ClientInfo(job.client, len(rows), counts)
        return self._lanes.alone(message, held, moving, about, group.steps[lane], everything)


def _done(group: Group, reply: Flat) -> Done:
    """Return the replies of a group."""
    values = reply.by_path
    keeps = {k: v for k, v in values.items() if k.startswith(CLIENT_STATE)}
    state = unwalk({k: dense(v) for k, v in values.items() if k not in keeps})
    counts = tensors(state)
    return Done(
        jobs=group.jobs,
        state={k: substate(state, k) for k in ("update", "buffers", "uploads", "diagnostics")},
        client_state=ClientRecord({k.removeprefix(CLIENT_STATE): v for k, v in keeps.items()}),
        loss=counts["loss"],
        finite=counts["finite"],
        steps=group.steps,
        seen=group.seen,
    )


def _short(setup: TrainingSetup) -> bool:
    """Return whether all rounds are so short and alike that few recordings of a whole one do."""
    sizes = np.unique(setup.federation.sizes[setup.federation.sizes > 0])
    if len(sizes) > SHORT:
        return False
    local = setup.training.local
    if max(batches.count_steps(local, int(n)) for n in sizes) > SHORT:
        return False
    forms = {tuple(map(len, batches.plan(local, int(n), 0, 0, 0))) for n in sizes}
    return len(forms) <= 2
