"""Trains several clients side by side by compiled steps, as the vectorized engine does.

Clients lie on a leading axis, those with the most steps first: the clients that still train are
always the first ones. When half of a group has ended, the others go on as a group of half the size.
In between, steps of clients that have ended are masked, and batches shorter than others are padded
with examples of weight 0.

A single client has no leading axis. A large model on a processor is trained so: its arithmetic
fills the machine, and compiled steps save the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fedkeel.engine.compiler.cache import FlatState
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.store.record import ClientRecord
from fedkeel.engine.trainer import ReadRecord, SequentialTrainer, TrainedClients
from fedkeel.engine.vectorized.batching import ClientGroup, GroupBatches, TrainingExamples
from fedkeel.engine.vectorized.compiled_loop import CompiledLoop, NeedsAllExamples, SharedInputs
from fedkeel.engine.vectorized.facts import SetupFacts, establish
from fedkeel.engine.vectorized.low_rank import Matrix, dense, stack_records
from fedkeel.engine.vectorized.memory import MemoryBound, uncompiled
from fedkeel.engine.vectorized.strategy import ONE_BY_ONE, Strategy
from fedkeel.engine.vectorized.streams import Streams
from fedkeel.engine.vectorized.transfers import copies, to_device, with_counts_on_host
from fedkeel.method.checks import explain_errors
from fedkeel.method.context import ClientInfo, Message
from fedkeel.method.local_loop import local_path_length
from fedkeel.method.local_training import start_client_state
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
    ) -> None:
        self.device = torch.device(device)
        self._memory = MemoryBound(self.device, processes)
        self._streams = Streams(self.device, processes)
        self.placed = placed or setup.on(self.device)
        self.facts = facts or establish(setup)
        self.strategy = strategy or Strategy.choose(self.facts, parallel_clients, self.device)
        self.reasons: list[str] = []
        if self.facts.not_compilable:
            self.reasons.append(f"steps are not compiled: {self.facts.not_compilable}")
        self._setup = setup
        network = self.placed.training.network.for_tracing()
        self._training = replace(self.placed.training, network=network)
        self._plain = SequentialTrainer(self.placed)
        self._loop = CompiledLoop(self._training, setup.precision, self.facts.draws)
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
        clock = Clock()
        message = self._message_on_device(message)
        read = self._records_on_device(read)
        waiting = ClientGroup.single_clients(self._setup, message, jobs)
        one_by_one = self.parallel_clients == 1 and self.facts.draws is None
        self._streams.share(len(waiting) if one_by_one else 1)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), self._streams:
            while waiting and self.strategy.is_compiled:
                group, rest = self._next_group(waiting)
                if not self._fits(message, group, read):
                    continue
                refusal: CannotCompile | None = None
                try:
                    with self._turn():
                        done = self._train(message, group, read, clock, sums)
                        done = list(map(with_counts_on_host, done))
                except torch.OutOfMemoryError:
                    self._use_less_memory(len(group))
                    continue
                except CannotCompile as error:
                    refusal = error
                if refusal is None:
                    yield from done[:-1]
                    yield replace(done[-1], seconds=clock.seconds)
                    clock, waiting = Clock(), rest
                    continue
                if refusal.raised is not None:  # raised again here if it is the user's own error
                    yield from map(with_counts_on_host, self._plain(message, group.jobs, read))
                    clock, waiting = Clock(), rest
                self._use_plainer_strategy(len(group), refusal.reason)
            jobs = [group.jobs[0] for group in waiting]
            yield from map(with_counts_on_host, self._plain(message, jobs, read))

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

    def _fits(self, message: Message, group: ClientGroup, read: ReadRecord) -> bool:
        """Return whether a group fits into memory; where it does not, groups get smaller."""

        def two_clients() -> None:
            pair = group[:2]
            data = self._client_data(message, pair, read)
            shared, batches = self._begin(message, pair, self.facts.pads)
            loop = uncompiled(self._training)
            data, local = loop.start(shared, data, batches.distinct_examples())
            loop.step(shared, data, local, batches.batch(0, 2, 2))

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

    def _train(
        self, message: Message, group: ClientGroup, read: ReadRecord, clock: Clock, sums: bool
    ) -> list[TrainedClients]:
        """Train a group by a whole compiled round where that is possible, else by steps."""
        is_alike = len(set(group.steps)) == 1
        if self.facts.draws is not None:
            is_alike = is_alike and len(set(group.batch_sizes)) == 1
        if self.strategy.compiles_whole_round(len(group)) and is_alike:
            try:
                done = self._train_whole_round(message, group, read, clock, sums)
            except CannotCompile:  # perhaps steps can be compiled; if not, they say why
                self.strategy = self.strategy.without_whole_rounds(len(group))
            else:
                if done is not None:
                    return [done]
        return self._train_by_steps(message, group, read, clock)

    def _begin(
        self, message: Message, group: ClientGroup, pads: bool
    ) -> tuple[SharedInputs, GroupBatches]:
        """Return what the clients see, with all random numbers of their rounds yet to be drawn."""
        channels_last, dtype = self.strategy.channels_last, self._training.network.dtype
        batches = GroupBatches(self._setup, self._examples, message, group, pads, channels_last)
        draws = group.is_single or self.facts.draws is not None
        clients = [job.client for job in group.jobs] if draws else []
        seeds = torch_seeds(self._setup.seed, "torch", message.round, clients)
        if group.is_single:
            seed_torch(seeds[0])
            return SharedInputs.of(message, None, dtype), batches
        missing = len(seeds) - len(self._generators)
        self._generators += [torch.Generator(self.device) for _ in range(missing)]
        generators = self._generators[: len(seeds)]
        for generator, number in zip(generators, seeds, strict=True):
            generator.manual_seed(number)
        return SharedInputs.of(message, generators, dtype), batches

    def _train_whole_round(
        self, message: Message, group: ClientGroup, read: ReadRecord, clock: Clock, sums: bool
    ) -> TrainedClients | None:
        """Train a group whose clients make as many steps; None where a result is not finite.

        A sum would be spoilt by one client, which may be finite by itself: low-rank terms overflow
        earlier than the matrices that they make.
        """
        client_data = self._client_data(message, group, read, low_rank=self.device.type == "cpu")
        pads = self.facts.pads and self.facts.draws is None  # masks are drawn for whole batches
        shared, batches = self._begin(message, group, pads)
        weights = None
        if sums and not group.is_single:
            weights = torch.from_numpy(self._setup.raw_weights(group.jobs, group.processed))
            weights = to_device(weights.to(self._training.network.dtype), self.device)
        every_batch = batches.all_steps(group.steps[0])
        distinct, end_info = batches.distinct_examples(), self._end_info(shared, group)
        clock.lap("data")
        result = self._loop.whole_round(
            shared, client_data, distinct, every_batch, end_info, weights
        )
        clock.lap("steps")
        if not group.is_single and not bool(dense(result.by_path["finite"]).all()):
            return None
        return replace(self._as_trained(group, result), added=weights is not None)

    def _train_by_steps(
        self, message: Message, group: ClientGroup, read: ReadRecord, clock: Clock
    ) -> list[TrainedClients]:
        """Train a group step by step; as clients end, the others go on as a smaller group."""
        client_data = self._client_data(message, group, read)
        shared, batches = self._begin(message, group, self.facts.pads)
        clock.lap("data")
        client_data, local = self._loop.start(shared, client_data, batches.distinct_examples())
        running = _Running(shared, group, client_data, local)
        done: list[TrainedClients] = []
        n = len(group)
        clock.lap("steps")
        for step in range(group.steps[0]):
            active = sum(steps > step for steps in running.group.steps)
            if not shared.is_single and active <= n // 2:
                while n // 2 >= active:
                    n //= 2
                done.append(self._finish(running[n:], first=n))
                clock.lap("upload")
                running = running[:n]
            batch = batches.batch(step, n, active)
            clock.lap("data")
            draws = self.facts.draws is not None
            real_examples = batches.real_examples(step, batch, active) if draws else None
            local = self._loop.step(shared, running.data, running.local, batch, real_examples)
            running = replace(running, local=local)
            clock.lap("steps")
        done.append(self._finish(running))
        clock.lap("upload")
        return done

    # ---- what clients begin with ------------------------------------------------------------

    def _client_data(
        self, message: Message, group: ClientGroup, read: ReadRecord, low_rank: bool = False
    ) -> FlatState:
        """Return what stays the same for each client in a round: its state, and its information.

        With `low_rank`, matrices of client states come as their factors where they may.
        """
        setup, clients = self._setup, [job.client for job in group.jobs]
        sizes = torch.from_numpy(setup.federation.sizes[clients])
        info: State = {
            "client": torch.tensor(clients),
            "examples": sizes.to(setup.training.network.dtype),
        }
        counts = [declared_class_counts(setup, client) for client in clients]
        if known := [c for c in counts if c is not None]:
            info["counts"] = torch.stack(known)
        if group.is_single:
            info = map_tensors(lambda t: t[0], info)
        client_state = self._client_state(message, group, read, low_rank)
        data = {CLIENT_STATE + path: value for path, value in client_state.items()}
        data.update(walk({"client_info": info}))
        return FlatState.of_values(data).map(lambda t: to_device(t, self.device))

    def _client_state(
        self, message: Message, group: ClientGroup, read: ReadRecord, low_rank: bool
    ) -> dict[str, Matrix]:
        """Return what the clients keep, by path; they are read one after the other."""
        if not self._training.stateful:
            return {}
        records = self._records(message, group, read)
        if group.is_single:
            return {path: dense(value) for path, value in next(records).values.items()}
        parts = self._training.plan.last_round_states if low_rank else ()
        rank = sum(max(sizes) for sizes in zip(*group.batch_sizes, strict=True)) if parts else 0
        return stack_records(records, len(group), rank, parts)

    def _records(
        self, message: Message, group: ClientGroup, read: ReadRecord
    ) -> Iterator[ClientRecord]:
        """Yield what each client keeps; new clients share one record."""
        initial: ClientRecord | None = None
        for job in group.jobs:
            record = read(job.client) or initial
            if record is None:
                client_state, _ = start_client_state(self._training, message, None)
                record = initial = ClientRecord.of(dict(client_state))
            yield record

    # ---- the end of a round -----------------------------------------------------------------

    def _finish(self, running: _Running, first: int = 0) -> TrainedClients:
        """End the round of clients, the first of which has this place in its group."""
        shared, group = running.shared, running.group
        result = self._finish_together(running)
        if result is None:
            ends = []
            for i in range(len(group)):
                states = [running.data.state, running.local.state]
                if not shared.is_single:
                    states = [map_tensors(lambda t, i=i: t[i], state) for state in states]  # type: ignore[misc]
                if shared.generators:  # draws at the end follow those of the steps
                    continue_torch(shared.generators[first + i])
                ends.append(self._finish_plainly(shared.message, group[i : i + 1], *states))
            result = tree.stack(ends)
        return self._as_trained(group, FlatState.of(result))

    def _finish_together(self, running: _Running) -> State | None:
        """End the round of all clients at once; None where each has to end by itself."""
        shared, end_info = running.shared, self._end_info(running.shared, running.group)
        while self.strategy.round_end != "one by one":
            is_compiled = self.strategy.round_end == "compiled"
            if shared.is_single and not is_compiled:
                return None
            try:
                return self._loop.end(shared, running.data, running.local, end_info, is_compiled)
            except NeedsAllExamples:
                self.strategy = replace(self.strategy, round_end="one by one")
            except CannotCompile:
                if not is_compiled:
                    raise
                self.strategy = replace(self.strategy, round_end="side by side")
        return None

    def _end_info(self, shared: SharedInputs, group: ClientGroup) -> State:
        """Return each client's steps and the length of its local path."""
        steps, training, message = group.steps, self._training, shared.message
        lengths = {count: local_path_length(training, message, count) for count in set(steps)}
        path_lengths = [lengths[count] for count in steps]
        info: State = {
            "steps": to_device(torch.tensor(steps), self.device),
            "path_length": to_device(torch.tensor(path_lengths, dtype=torch.float64), self.device),
        }
        return map_tensors(lambda t: t[0], info) if shared.is_single else info

    def _finish_plainly(
        self, message: Message, group: ClientGroup, client_data: State, local: State
    ) -> State:
        """End the round of a group of one client, whose states come without a client axis."""
        client, steps = group.jobs[0].client, group.steps[0]
        rows = self._setup.federation.client(client)
        known = tensors(substate(client_data, "client_info"))
        info = ClientInfo(known["client"], known["examples"], known.get("counts"))

        def all_examples() -> State:
            table = self._examples.on_device(rows[None])
            return self._examples.take(table, None, True, self.strategy.channels_last)

        with explain_errors(f"Training failed at client {client}, step {steps}"):
            return self._loop.end_plainly(message, client_data, local, info, steps, all_examples)

    def _as_trained(self, group: ClientGroup, reply: FlatState) -> TrainedClients:
        if self.queue_length:  # the next group's steps write over what lies in a graph's memory
            reply = reply.with_tensors(copies(reply.tensors))
        values = reply.by_path
        kept = {k: v for k, v in values.items() if k.startswith(CLIENT_STATE)}
        state = unwalk({k: dense(v) for k, v in values.items() if k not in kept})
        return TrainedClients(
            jobs=group.jobs,
            state={k: substate(state, k) for k in ("update", "buffers", "uploads", "diagnostics")},
            client_state=ClientRecord({k.removeprefix(CLIENT_STATE): v for k, v in kept.items()}),
            loss=leaf(state, "loss"),
            finite=leaf(state, "finite"),
            steps=group.steps,
            examples=group.processed,
        )


def one_by_one(setup: TrainingSetup, device: str) -> VectorizedTrainer:
    """Return what trains clients on a device as the sequential engine does, one after the other."""
    facts = SetupFacts("", None, "", short_rounds=False)
    return VectorizedTrainer(setup, 1, device, facts=facts, strategy=ONE_BY_ONE)


@dataclass(frozen=True)
class _Running:
    """A group of clients between two steps, with the client data and local state of each."""

    shared: SharedInputs
    group: ClientGroup
    data: FlatState
    local: FlatState

    def __getitem__(self, clients: slice) -> _Running:
        """Return some of the clients."""
        data, local = (state.map(lambda t: t[clients]) for state in (self.data, self.local))
        return replace(self, group=self.group[clients], data=data, local=local)
