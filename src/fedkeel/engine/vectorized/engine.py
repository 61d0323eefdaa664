"""Trains several clients side by side by compiled steps, as the vectorized engine does.

Clients lie on a leading axis, those with the most steps first: the clients that still train are
always the first ones. When half of a group has ended, the others go on as a group of half the size.
In between, steps of clients that have ended are masked, and batches shorter than others are padded
with examples of weight 0.

A single client has no leading axis. A large model on a processor is trained so: its arithmetic
fills the machine, and compiled steps save the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.clock import Clock
from fedkeel.base.rng import continue_torch, seed_torch, torch_seeds
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.client_inputs import declared_class_counts
from fedkeel.engine.compiler.cache import CompileCache, FlatState
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import ReadRecord, TrainedClients
from fedkeel.engine.vectorized.batching import (
    ClientGroup,
    GroupBatches,
    PaddedSizes,
    TrainingExamples,
)
from fedkeel.engine.vectorized.begun import BEGUN, stepped_start
from fedkeel.engine.vectorized.compiled_loop import CompiledLoop, NeedsAllExamples, ReceivedInputs
from fedkeel.engine.vectorized.facts import SetupFacts, establish
from fedkeel.engine.vectorized.low_rank import Matrix, dense, stack_records
from fedkeel.engine.vectorized.memory import MemoryBound, uncompiled
from fedkeel.engine.vectorized.run_inputs import PlacedRun, RunInputs
from fedkeel.engine.vectorized.starts import Starts
from fedkeel.engine.vectorized.strategy import ONE_BY_ONE, Strategy
from fedkeel.engine.vectorized.streams import Streams
from fedkeel.engine.vectorized.transfers import copies, to_device, with_counts_on_host
from fedkeel.method.checks import explain_errors
from fedkeel.method.context import ByPart, ClientInfo, Message
from fedkeel.method.local_loop import local_path_length
from fedkeel.method.local_training import ClientTraining, start_client_state
from fedkeel.tree import State, leaf, map_tensors, substate, substates, tensors, unwalk, walk

CLIENT_STATE = "client_state/"
"""Prefix of the paths of what a client keeps."""

MAX_REASON = 160
"""Characters of a reason in the run record."""


class VectorizedTrainer:
    """A `Trainer` that trains clients side by side.

    What cannot be trained side by side, or compiled, is trained in a plainer way; `reasons` says
    why.

    Args:
        setup: method, model, data and seed.
        parallel_clients: clients that are trained side by side, at most.
        device: where they train.
        placed: `setup` with network and data on the device, if there is one already.
        facts: what is known about the setup, if it has been established already.
        strategy: how clients are trained at first; None for the fastest way that facts allow.
        processes: how many processes share the memory of the device.
        fixed: where clients may be of several runs of the setup's structure, what all of them are
            padded to: the bits of a client do not depend on who trains beside it then.
        varied: names of the numbers of the method in which these runs may differ.
        loop: makes the local loop of a training; None for one that is compiled.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        parallel_clients: int,
        device: str = "cpu",
        placed: TrainingSetup | None = None,
        facts: SetupFacts | None = None,
        strategy: Strategy | None = None,
        processes: int = 1,
        fixed: PaddedSizes | None = None,
        varied: tuple[str, ...] = (),
        loop: Callable[[ClientTraining], CompiledLoop] | None = None,
    ) -> None:
        self.device, self._fixed = torch.device(device), fixed
        self._memory = MemoryBound(self.device, processes)
        self._streams = Streams(self.device, processes)
        self.placed = placed or setup.on(self.device)
        self.facts = facts or establish(setup)
        self.strategy = strategy or Strategy.choose(self.facts, parallel_clients, self.device)
        self.reasons: list[str] = []
        if self.facts.not_compilable:
            self.reasons.append(f"steps are not compiled: {self.facts.not_compilable}")
        self._setup = setup
        self.run = PlacedRun(setup, self.placed, varied)
        training, draws = self.run.training, self.facts.draws
        self._loop = loop(training) if loop else CompiledLoop(training, setup.precision, draws)
        self._starts = CompileCache(setup.precision, ())
        self._examples = TrainingExamples(self.placed.federation.data, setup.training.network.dtype)
        self._generators: list[torch.Generator] = []  # CUDA graphs draw from these very objects

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave compiled functions behind: another process compiles its own."""
        device = str(self.device)
        return VectorizedTrainer, (self._setup, self.parallel_clients, device, None, self.facts)

    def on(self, device: torch.device, processes: int) -> VectorizedTrainer:
        """Return a trainer of the same clients on a device that some processes share."""
        placed = self.placed if device == self.device else None
        return VectorizedTrainer(
            self._setup,
            self.parallel_clients,
            str(device),
            placed,
            self.facts,
            processes=processes,
        )

    @property
    def parallel_clients(self) -> int:
        """Clients that are trained side by side, at most."""
        return self.strategy.parallel_clients

    @property
    def queue_length(self) -> int:
        """Groups of clients that may wait for a GPU while the next one is started."""
        return self._streams.count if self.device.type == "cuda" else 0

    def __call__(
        self,
        message: Message,
        jobs: Sequence[ClientJob],
        read: ReadRecord,
        sums: bool = False,
    ) -> Iterator[TrainedClients]:
        """Train clients from a message."""
        run = self.inputs(self.run, message, read)
        for trained in self.train(ClientGroup.single_clients(run, jobs), sums):
            yield trained.clients

    def inputs(self, run: PlacedRun, message: Message, read: ReadRecord) -> RunInputs:
        """Return what the clients of a run begin a round with, on the device."""
        return RunInputs(run, self._message_on_device(message), self._records_on_device(read))

    def train(self, waiting: list[ClientGroup], sums: bool = False) -> Iterator[TrainedGroup]:
        """Train clients, which come as groups of one client each; they may be of several runs.

        With `sums`, the updates of a single run's clients may come added up.
        """
        clock = Clock()
        one_by_one = self.parallel_clients == 1 and self.facts.draws is None
        self._streams.share(len(waiting) if one_by_one else 1)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._streams:
            while waiting and self.strategy.is_compiled:
                group, rest = self._next_group(waiting)
                if not self._fits(group):
                    continue
                refusal: CannotCompile | None = None
                try:
                    with self._turn():
                        done = self._train(group, clock, sums)
                        done = [each.with_counts_on_host() for each in done]
                except torch.OutOfMemoryError:
                    self._use_less_memory(len(group))
                    continue
                except CannotCompile as error:
                    refusal = error
                if refusal is None:
                    yield from done[:-1]
                    yield done[-1].in_seconds(clock.seconds)
                    clock, waiting = Clock(), rest
                    continue
                if refusal.raised is not None:  # raised again here if it is the user's own error
                    yield from _train_one_by_one(group)
                    clock, waiting = Clock(), rest
                self._use_plainer_strategy(len(group), refusal.reason)
            for group in waiting:
                yield from _train_one_by_one(group)

    def _use_plainer_strategy(self, clients: int, reason: str) -> None:
        before, self.strategy = self.strategy, self.strategy.lowered(clients)
        if before.parallel_clients != self.strategy.parallel_clients:
            self.reasons.append(f"clients are not trained side by side: {reason[:MAX_REASON]}")
        elif not self.strategy.is_compiled:
            self.reasons.append(f"steps are not compiled: {reason[:MAX_REASON]}")

    def _turn(self) -> AbstractContextManager[None]:
        """Return the context in which a group is trained: clients that train alone take turns.

        Graphs that draw from torch's one generator for a GPU cannot run at the same time.
        """
        return nullcontext() if self._loop.compiled.draws else self._streams.turn()

    def _use_less_memory(self, clients: int) -> None:
        self._loop.compiled.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if clients == 1 and self._streams.reduce():
            return
        self.strategy = self.strategy.with_less_memory(clients)
        fewer = f"at most {self.parallel_clients} clients are trained side by side"
        change = fewer if self.strategy.is_compiled else "steps are not compiled"
        self.reasons.append(f"{change}: more does not fit into memory")

    def _fits(self, group: ClientGroup) -> bool:
        """Return whether a group fits into memory; where it does not, groups get smaller."""

        def two_clients() -> None:
            pair = group[:2]
            data = self._client_data(pair)
            received, batches = self._begin(pair, self.facts.pads)
            loop = uncompiled(self.run.training)
            data, local = loop.start(received, data, batches.distinct_examples())
            loop.step(received, data, local, batches.batch(0, 2, 2))

        width = max(max(sizes) for sizes in group.batch_sizes)
        fitting = self._memory.clients(len(group), width, two_clients)
        if fitting == len(group):
            return True
        self.strategy = replace(self.strategy, parallel_clients=fitting)
        self.reasons.append(self._memory.reason(fitting))
        return False

    # ---- where tensors lie ------------------------------------------------------------------

    def _on_device(self, state: State) -> State:
        return map_tensors(lambda t: t.to(self.device), state)

    def _message_on_device(self, message: Message) -> Message:
        return replace(
            message,
            params=tensors(self._on_device(dict(message.params))),
            buffers=tensors(self._on_device(dict(message.buffers))),
            broadcast=substates(self._on_device(dict(message.broadcast))),
        )

    def _records_on_device(self, read: ReadRecord) -> ReadRecord:
        """Return what reads clients' records and puts them on the device."""

        def read_there(client: int) -> ClientRecord | None:
            record = read(client)
            if record is None:
                return None
            moved = {
                k: to_device(v, self.device) if isinstance(v, Tensor) else v.to(self.device)
                for k, v in record.values.items()
            }
            return ClientRecord(moved)

        return read_there

    # ---- one group --------------------------------------------------------------------------

    def _next_group(self, waiting: list[ClientGroup]) -> tuple[ClientGroup, list[ClientGroup]]:
        """Return the clients that are trained next, side by side, and the others."""
        n = self.parallel_clients
        if n == 1 or len(waiting) == 1:
            return waiting[0], waiting[1:]
        ordered = sorted(waiting, key=lambda group: -group.steps[0])  # stable
        if self.facts.pads:
            return ClientGroup.join(ordered[:n]), ordered[n:]
        alike = [group for group in ordered if group.shape == ordered[0].shape]
        others = [group for group in ordered if group.shape != ordered[0].shape]
        return ClientGroup.join(alike[:n]), alike[n:] + others

    def _train(self, group: ClientGroup, clock: Clock, sums: bool) -> list[TrainedGroup]:
        """Train a group by a whole compiled round where that is possible, else by steps."""
        is_alike = len(set(group.steps)) == 1
        if self.facts.draws is not None:
            is_alike = is_alike and len(set(group.batch_sizes)) == 1
        if self.strategy.compiles_whole_round(len(group)) and is_alike:
            try:
                done = self._train_whole_round(group, clock, sums)
            except CannotCompile:  # perhaps steps can be compiled; if not, they say why
                self.strategy = self.strategy.without_whole_rounds(len(group))
            else:
                if done is not None:
                    return [done]
        return self._train_by_steps(group, clock)

    def _begin(self, group: ClientGroup, pads: bool) -> tuple[ReceivedInputs, GroupBatches]:
        """Return what the clients see, with all random numbers of their rounds yet to be drawn."""
        channels_last, dtype = self.strategy.channels_last, self.run.training.network.dtype
        batches = GroupBatches(self._examples, group, pads, channels_last, self._fixed)
        if group.is_single:
            (seed,) = _torch_seeds(group)
            seed_torch(seed)
            return ReceivedInputs.of(group, None, dtype, by_client=False), batches
        seeds = [] if self.facts.draws is None else _torch_seeds(group)
        missing = len(seeds) - len(self._generators)
        self._generators += [torch.Generator(self.device) for _ in range(missing)]
        generators = self._generators[: len(seeds)]
        for generator, number in zip(generators, seeds, strict=True):
            generator.manual_seed(number)
        return ReceivedInputs.of(group, generators, dtype, self._fixed is not None), batches

    def _train_whole_round(
        self, group: ClientGroup, clock: Clock, sums: bool
    ) -> TrainedGroup | None:
        """Train a group whose clients make as many steps; None where a result is not finite.

        A sum would be spoilt by one client, which may be finite by itself: low-rank terms overflow
        earlier than the matrices that they make.
        """
        low_rank = self.device.type == "cpu" and self._fixed is None
        client_data = self._client_data(group, low_rank)
        pads = self.facts.pads and self.facts.draws is None  # masks are drawn for whole batches
        received, batches = self._begin(group, pads)
        weights = None
        if sums and not group.is_single:
            weights = torch.from_numpy(self._setup.raw_weights(group.jobs, group.processed))
            weights = to_device(weights.to(self.run.training.network.dtype), self.device)
        every_batch = batches.all_steps(group.steps[0])
        distinct, end_info = batches.distinct_examples(), self._end_info(received, group)
        clock.lap("data")
        result = self._loop.whole_round(
            received, client_data, distinct, every_batch, end_info, weights
        )
        clock.lap("steps")
        if not group.is_single and not bool(dense(result.by_path["finite"]).all()):
            return None
        return self._as_trained(group, result, added=weights is not None)

    def _train_by_steps(self, group: ClientGroup, clock: Clock) -> list[TrainedGroup]:
        """Train a group step by step; as clients end, the others go on as a smaller group."""
        client_data = self._client_data(group)
        received, batches = self._begin(group, self.facts.pads)
        clock.lap("data")
        client_data, local = self._loop.start(received, client_data, batches.distinct_examples())
        running = _Running(received, group, client_data, local)
        done: list[TrainedGroup] = []
        n = len(group)
        clock.lap("steps")
        for step in range(group.steps[0]):
            active = sum(steps > step for steps in running.group.steps)
            if not received.is_single and active <= n // 2:
                while n // 2 >= active:
                    n //= 2
                done.append(self._finish(running[n:], first=n))
                clock.lap("upload")
                running = running[:n]
            batch = batches.batch(step, n, active)
            clock.lap("data")
            draws = self.facts.draws is not None
            real_examples = batches.real_examples(step, batch, active) if draws else None
            local = self._loop.step(
                running.received, running.data, running.local, batch, real_examples
            )
            running = replace(running, local=local)
            clock.lap("steps")
        done.append(self._finish(running))
        clock.lap("upload")
        return done

    # ---- what clients begin with ------------------------------------------------------------

    def _client_data(self, group: ClientGroup, low_rank: bool = False) -> FlatState:
        """Return what stays the same for each client in a round: its state, and its information.

        With `low_rank`, matrices of client states come as their factors where they may.
        """
        sizes = [run.setup.federation.sizes[job.client] for job, run in group.members]
        info: State = {
            "client": torch.tensor([job.client for job in group.jobs]),
            "examples": torch.tensor(sizes).to(self.run.training.network.dtype),
        }
        counts = [declared_class_counts(run.setup, job.client) for job, run in group.members]
        if known := [c for c in counts if c is not None]:
            info["counts"] = torch.stack(known)
        if group.is_single:
            info = map_tensors(lambda t: t[0], info)
        client_state = self._client_state(group, low_rank)
        data: dict[str, Matrix] = {CLIENT_STATE + k: v for k, v in client_state.items()}
        data.update(self._begun(group))
        data.update(walk({"client_info": info}))
        return FlatState.of_values(data).map(lambda t: to_device(t, self.device))

    def _client_state(self, group: ClientGroup, low_rank: bool) -> dict[str, Matrix]:
        """Return what the clients keep, by path; they are read one after the other."""
        training = self.run.training
        if not training.stateful:
            return {}
        records = _records(group)
        if group.is_single:
            return {path: dense(value) for path, value in next(records).values.items()}
        parts = training.plan.last_round_states if low_rank else ()
        rank = sum(max(sizes) for sizes in zip(*group.batch_sizes, strict=True)) if parts else 0
        return stack_records(records, len(group), rank, parts)

    def _begun(self, group: ClientGroup) -> dict[str, Matrix]:
        """Return where clients begin, by path, of a method whose start takes steps."""
        width = 0 if self._fixed is None else self._fixed.batch
        kept: list[ByPart] | None = None
        begun: dict[int, State] = {}
        for run in group.distinct_runs:
            part = stepped_start(run.setup)
            if part is None:
                return {}
            kept = kept or [record.state for record in _records(group)]
            places = [i for i, own in enumerate(group.runs) if own is run]
            starts = Starts(run.run.placed, part, self._examples, self._starts, width)
            clients = [group.jobs[i].client for i in places]
            found = starts.of(run.message, clients, [kept[i] for i in places])
            begun.update(
                (i, {part.name: {BEGUN: each}}) for i, each in zip(places, found, strict=True)
            )
        states = [begun[i] for i in range(len(group))]
        together = states[0] if group.is_single else tree.stack(states)
        return {CLIENT_STATE + path: tensor for path, tensor in walk(together)}

    # ---- the end of a round -----------------------------------------------------------------

    def _finish(self, running: _Running, first: int = 0) -> TrainedGroup:
        """End the round of clients, the first of which has this place in its group."""
        received, group = running.received, running.group
        result = self._finish_together(running)
        if result is None:
            ends = []
            for i in range(len(group)):
                states = [running.data.state, running.local.state]
                if not received.is_single:
                    states = [map_tensors(lambda t, i=i: t[i], state) for state in states]  # type: ignore[misc]
                if received.generators:  # draws at the end follow those of the steps
                    continue_torch(received.generators[first + i])
                ends.append(self._finish_plainly(group[i : i + 1], *states))
            result = tree.stack(ends)
        return self._as_trained(group, FlatState.of(result))

    def _finish_together(self, running: _Running) -> State | None:
        """End the round of all clients at once; None where each has to end by itself."""
        received = running.received
        end_info = self._end_info(received, running.group)
        while self.strategy.round_end != "one by one":
            is_compiled = self.strategy.round_end == "compiled"
            if received.is_single and not is_compiled:
                return None
            try:
                return self._loop.end(received, running.data, running.local, end_info, is_compiled)
            except NeedsAllExamples:
                self.strategy = replace(self.strategy, round_end="one by one")
            except CannotCompile:
                if not is_compiled:
                    raise
                self.strategy = replace(self.strategy, round_end="side by side")
        return None

    def _end_info(self, received: ReceivedInputs, group: ClientGroup) -> State:
        """Return each client's steps, path length, and rate where it has its own."""
        pairs = list(zip(group.runs, group.steps, strict=True))
        lengths = {
            (run, count): local_path_length(run.training, run.message, count)
            for run, count in dict.fromkeys(pairs)
        }
        path_lengths = torch.tensor([lengths[pair] for pair in pairs], dtype=torch.float64)
        info: State = {
            "steps": to_device(torch.tensor(group.steps), self.device),
            "path_length": to_device(path_lengths, self.device),
        }
        if received.by_client:
            rates = torch.tensor([run.message.lr for run in group.runs], dtype=torch.float64)
            info["rate"] = to_device(rates.to(self.run.training.network.dtype), self.device)
        return map_tensors(lambda t: t[0], info) if received.is_single else info

    def _finish_plainly(self, group: ClientGroup, client_data: State, local: State) -> State:
        """End the round of a group of one client, whose states come without a client axis."""
        client, steps, run = group.jobs[0].client, group.steps[0], group.runs[0]
        rows = run.setup.federation.client(client)
        known = tensors(substate(client_data, "client_info"))
        info = ClientInfo(known["client"], known["examples"], known.get("counts"))

        def all_examples() -> State:
            table = self._examples.on_device(rows[None])
            return self._examples.take(table, None, True, self.strategy.channels_last)

        with explain_errors(f"Training failed at client {client}, step {steps}"):
            return self._loop.end_plainly(run, client_data, local, info, steps, all_examples)

    def _as_trained(
        self, group: ClientGroup, reply: FlatState, added: bool = False
    ) -> TrainedGroup:
        if self.queue_length:  # the next group's steps write over what lies in a graph's memory
            reply = reply.with_tensors(copies(reply.tensors))
        values = reply.by_path
        kept = {k: v for k, v in values.items() if k.startswith(CLIENT_STATE)}
        state = unwalk({k: dense(v) for k, v in values.items() if k not in kept})
        clients = TrainedClients(
            jobs=group.jobs,
            state={k: substate(state, k) for k in ("update", "buffers", "uploads", "diagnostics")},
            client_state=ClientRecord({k.removeprefix(CLIENT_STATE): v for k, v in kept.items()}),
            loss=leaf(state, "loss"),
            finite=leaf(state, "finite"),
            steps=group.steps,
            examples=group.processed,
            added=added,
        )
        return TrainedGroup(group, clients)


def one_by_one(setup: TrainingSetup, device: str) -> VectorizedTrainer:
    """Return what trains clients on a device as the sequential engine does, one after the other."""
    facts = SetupFacts("", None, "", short_rounds=False)
    return VectorizedTrainer(setup, 1, device, facts=facts, strategy=ONE_BY_ONE)


@dataclass(frozen=True)
class TrainedGroup:
    """A group of clients that have ended their round.

    Args:
        group: the clients, with their runs.
        clients: what came of them.
    """

    group: ClientGroup
    clients: TrainedClients

    def with_counts_on_host(self) -> TrainedGroup:
        """Return it with what `transfers.with_counts_on_host` makes of the clients."""
        return replace(self, clients=with_counts_on_host(self.clients))

    def in_seconds(self, seconds: Mapping[str, float]) -> TrainedGroup:
        """Return it with the seconds that the clients have taken, by phase."""
        return replace(self, clients=replace(self.clients, seconds=seconds))


def _train_one_by_one(group: ClientGroup) -> Iterator[TrainedGroup]:
    """Train the clients of a group one after the other, as the sequential engine does."""
    for i, (job, run) in enumerate(group.members):
        for trained in run.train_one_by_one([job]):
            yield TrainedGroup(group[i : i + 1], trained).with_counts_on_host()


def _torch_seeds(group: ClientGroup) -> list[int]:
    """Return what torch is seeded with for each client of a group."""
    seeds: dict[tuple[RunInputs, int], int] = {}
    for run in group.distinct_runs:
        clients = [job.client for job, own in group.members if own is run]
        numbers = torch_seeds(run.setup.seed, "torch", run.message.round, clients)
        seeds.update({(run, k): number for k, number in zip(clients, numbers, strict=True)})
    return [seeds[run, job.client] for job, run in group.members]


def _records(group: ClientGroup) -> Iterator[ClientRecord]:
    """Yield what each client keeps; new clients of a run share one record."""
    initial: dict[RunInputs, ClientRecord] = {}
    for job, run in group.members:
        record = run.read(job.client) or initial.get(run)
        if record is None:
            client_state, _ = start_client_state(run.training, run.message, None)
            record = initial[run] = ClientRecord.of(dict(client_state))
        yield record


@dataclass(frozen=True)
class _Running:
    """A group of clients between two steps, with the client data and local state of each."""

    received: ReceivedInputs
    group: ClientGroup
    data: FlatState
    local: FlatState

    def __getitem__(self, clients: slice) -> _Running:
        """Return some of the clients."""
        data, local = (state.map(lambda t: t[clients]) for state in (self.data, self.local))
        return _Running(self.received[clients], self.group[clients], data, local)
