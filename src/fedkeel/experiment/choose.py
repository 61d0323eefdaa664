"""Which engine runs the clients: what was asked for, or what a short measurement finds fastest."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedkeel import config
from fedkeel.data import batches
from fedkeel.engine.arithmetic import arithmetic
from fedkeel.engine.heap import kept
from fedkeel.engine.loop import OneByOne, Trainer
from fedkeel.engine.rounds import answered
from fedkeel.engine.world import Job, World
from fedkeel.experiment.device import device_for
from fedkeel.experiment.prepare import cores, learning_rate
from fedkeel.experiment.prepared import Prepared
from fedkeel.method.context import Floats, Ints, Message
from fedkeel.method.server import server_message

SHORT = 3.0
"""Seconds of a run, one client after the other, below which nothing is measured, nor a GPU used."""

SHARE = 0.05
"""Share of a run that its measurement may take, where that is more than `LEAST`."""

LEAST = 3.0
"""Seconds that a measurement may take, but no more than a quarter of the run."""

HANDING = 2e-3
"""Seconds that a round takes longer where its clients are handed to other processes."""

SHARING = 1.1
"""Times as long as a process alone each of several takes: they share caches and memory."""

GAIN = 0.95
"""Share of the exact engine's time that the vectorised one has to reach to be preferred."""

LANES = (8, 32, 128)
"""Sizes of chunks that are tried, besides 1 and a worker's whole share of a round."""

FEW = 3
"""Clients that are trained one after the other, twice, to measure that."""

LONG = 1.0
"""Seconds of a client from which one is enough, once."""

ALONE = 0.5
"""Share of the exact engine's time that recorded steps of one lane never get to."""

EXACT = 0
"""The exact engine, among sizes of chunks."""

LIKELY = 32
"""Size of a chunk that is often a good one for small dense networks."""

HEAVY = 5e-3
"""Seconds of a convolutional network's step from which clients side by side gain nothing on a
processor: what they save are the operations' calls, some 5 us each."""

CLEARLY = 0.9
"""Share of another size's time that one which is tried later has to reach to be preferred: what is
recorded is measured once, and differs from time to time by more than sizes that are alike."""

FAR = 1.3
"""Times as long as the best from which a chunk is not measured again."""


@dataclass
class Measured:
    """Seconds for each client, by engine, in one process of one thread.

    Args:
        seconds: by the size of the chunk, or `EXACT`.
        reasons: why clients cannot be trained side by side, or steps not be recorded.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


_KNOWN: dict[Any, Measured] = {}
"""What has been measured in this process: a comparison's seeds run on the same engine."""


def choose(prepared: Prepared, measure: bool = True) -> dict[str, Any]:
    """Return the engine of a run: ``kind``, ``workers``, ``chunk``, and what was measured.

    Args:
        prepared: the run.
        measure: whether clients may be trained to find out; otherwise what was asked for stays.
    """
    asked, per_round = prepared.settings.engine, max(prepared.population.per_round, 1)
    workers, world = min(asked.workers or cores(), per_round), prepared.world
    free = measure and asked.kind == asked.device == "auto" and torch.cuda.is_available()
    # a brief run is over before a GPU has recorded its first step
    device, reasons = ("cpu", []) if free and _brief(prepared) else device_for(asked, world)
    engine: dict[str, Any] = {
        "kind": asked.kind,
        "workers": workers,
        "chunk": 1,
        "device": device,
        "dtype": asked.dtype,
        "precision": asked.precision,
        "asked": asked.kind,
    }
    if device == "cuda":  # one process keeps a GPU busy
        engine.update(kind="vectorised", workers=workers if asked.workers else 1)
        workers = engine["workers"]
    if reasons:
        engine["reasons"] = reasons
    if asked.kind == "sequential":
        return {**engine, "workers": 1}
    if asked.kind == "workers":
        return engine
    if asked.kind == "ray":
        return {**engine, **_on_ray(asked, per_round)}
    if engine["kind"] == "vectorised" and asked.chunk is not None:
        return {**engine, "chunk": min(asked.chunk, per_round)}
    if not measure:
        return engine
    found = _measured(prepared, workers, device)
    counts = {asked.workers or 1, workers}
    options = {
        (chunk, count): _round(each, max(chunk, 1), per_round, count)
        for chunk, each in found.seconds.items()
        for count in counts
    }
    exact = min((one for one in options if one[0] == EXACT), key=lambda one: options[one])
    others = [one for one in options if one[0] != EXACT]
    best = None
    for one in others:  # in the order in which they were tried
        if best is None or options[one] < CLEARLY * options[best]:
            best = one
    if best is not None and options[best] <= GAIN * options[exact]:
        engine["kind"] = "vectorised"
    chosen = exact
    if engine["kind"] == "vectorised":
        chosen = best or exact
        engine["chunk"] = max(chosen[0], 1)
    engine["workers"] = chosen[1]
    if engine["kind"] == "auto":
        engine["kind"] = "workers" if chosen[1] > 1 else "sequential"
    engine["seconds_per_client"] = {_name(c): round(s, 6) for c, s in found.seconds.items()}
    if found.reasons:
        engine["reasons"] = [*reasons, *found.reasons]
    return engine


def known() -> dict[Any, Measured]:
    """Return what has been measured in this process."""
    return dict(_KNOWN)


def learn(found: dict[Any, Measured]) -> None:
    """Take what another process has measured."""
    _KNOWN.update(found)


def begun_with(before: dict[str, Any], asked: config.Engine) -> dict[str, Any]:
    """Return the engine of a run that `auto` chose before, in one process where that is asked."""
    if asked.workers != 1:
        return before
    kind = "sequential" if before["kind"] in ("workers", "ray") else before["kind"]
    again = {**before, "kind": kind, "workers": 1}
    again.pop("address", None)
    return again


def _on_ray(asked: config.Engine, per_round: int) -> dict[str, Any]:
    """Return what is different on Ray: one actor for each core of a cluster, exact as a rule."""
    count, address = asked.workers, asked.address
    if address is not None:
        from fedkeel.engine.cluster import cores as all_cores

        count = count or all_cores(address)
    chunk = None if asked.chunk is None else min(asked.chunk, per_round)
    return {"workers": min(count or cores(), per_round), "chunk": chunk, "address": address}


def _name(chunk: int) -> str:
    """Return how the record calls an engine that was measured."""
    return "sequential" if chunk == EXACT else f"vectorised(chunk={chunk})"


def _round(each: float, chunk: int, per_round: int, workers: int) -> float:
    """Return the seconds of a round, from those of a client."""
    busy = min(workers, -(-per_round // chunk))
    alone = each * per_round / busy
    return alone * SHARING + HANDING if workers > 1 else alone


def _measured(prepared: Prepared, workers: int, device: str) -> Measured:
    """Measure the engines, or look up what was found for a run like this one."""
    world, plan = prepared.world, prepared.plan
    data = world.federation.data
    key = (
        plan.expression,
        plan.weights,
        world.bench.network.describe(),
        tuple(data.x.shape),
        world.bench.local.model_dump_json(),
        prepared.settings.rounds,
        prepared.population,
        prepared.settings.engine.model_dump_json(),
        world.augment,
        workers,
        device,
    )
    if key not in _KNOWN:
        with arithmetic(world.precision), kept():
            _KNOWN[key] = _measure(prepared, workers, device)
    return _KNOWN[key]


def _message(prepared: Prepared) -> Message:
    """Return the message of the first round."""
    lr = learning_rate(prepared.settings, prepared.world.bench, 0)
    return answered(server_message(prepared.plan, prepared.server, lr), prepared.spec)


def _brief(prepared: Prepared) -> bool:
    """Return whether a run, one client after the other on the processor, is a `SHORT` one."""
    message, (jobs, shares) = _message(prepared), _sample(prepared.world)
    clients = max(prepared.population.per_round, 1) * prepared.settings.rounds
    with arithmetic(prepared.world.precision):
        one, _, _ = _each(OneByOne(prepared.world), message, jobs, shares)
    return one * clients < SHORT


def _each(
    exact: Trainer, message: Message, jobs: list[Job], shares: dict[int, float]
) -> tuple[float, int, int]:
    """Return the seconds of a client, and of how many clients, how often, they are to be taken."""
    alone = _seconds(exact, message, jobs[:1])  # the first one also pays for what is made once
    few, times = (min(FEW, len(jobs)), 2) if alone < LONG else (1, 1)
    return _seconds(exact, message, jobs[:few]) / shares[few], few, times


def _measure(prepared: Prepared, workers: int, device: str) -> Measured:
    """Train some clients of the first round by each engine and throw them away."""
    world, per_round = prepared.world, max(prepared.population.per_round, 1)
    message, found = _message(prepared), Measured()
    jobs, shares = _sample(world)
    exact = _exact(world, device)
    one, few, times = _each(exact, message, jobs, shares)
    found.seconds[EXACT] = one
    clients = per_round * prepared.settings.rounds
    if one * clients < SHORT and prepared.settings.engine.kind == "auto" and device == "cpu":
        return found
    if times > 1:
        found.seconds[EXACT] = min(one, _seconds(exact, message, jobs[:few]) / shares[few])
    from fedkeel.engine.chunks import Chunks
    from fedkeel.engine.recording.capture import warm  # takes half a second to import

    warm()
    began = time.perf_counter()
    slower, lane, chunks = 0, 0.0, Chunks(world, 1, device, exact.placed)
    sizes, sums = _sizes(world, per_round, workers, device), world.bench.plan.sums
    while sizes and chunks.recorded:
        lanes = sizes.pop(0)
        spent = time.perf_counter() - began
        known = min(found.seconds.values())
        if device == "cpu":
            total, likely = one * clients, lanes * max(one, lane)
        else:  # where one by one is far from what a GPU can do
            total, likely = known * clients, 0.0
        budget = max(min(LEAST, total / 4), SHARE * total)
        if lanes > 1 and (spent + likely > budget or slower >= times):
            continue
        if lanes == 1 and known < ALONE * one:
            continue
        if lanes > 1 and device == "cpu" and _heavy(world, found):
            continue
        chunks = Chunks(world, lanes, device, chunks.placed)
        some, share = jobs[:few], shares[few]
        if lanes > 1:
            some, share = _chunk(world, lanes, per_round)
        before = time.perf_counter()
        first = _seconds(chunks, message, some, sums, _user) / share  # records
        if lanes > 1:  # more lanes are recorded as much longer
            lane = max(lane, (time.perf_counter() - before) / lanes)
        seconds = _seconds(chunks, message, some, sums) / share
        if times > 1 and seconds < FAR * min(found.seconds.values()):
            seconds = min(seconds, _seconds(chunks, message, some, sums) / share)
        met = world.federation.sizes[[job.client for job in some]]
        if lanes > 1 and world.bench.plan.preparations:  # padded to the longest of them
            met = met.max(keepdims=True)
        forms = _forms(world, world.federation.sizes, lanes) / _forms(world, met, lanes)
        # once in a run each, by every process
        seconds += max(first - seconds, 0.0) * len(some) * forms * workers / clients
        found.reasons += [r for r in chunks.reasons if r not in found.reasons]
        if not chunks.recorded:
            break
        if chunks.lanes != lanes:
            sizes = [size for size in sizes if size <= chunks.lanes]
            continue
        slower += seconds > min(found.seconds.values())
        found.seconds[lanes] = seconds
    return found


def _heavy(world: World, found: Measured) -> bool:
    """Return whether a recorded step of one lane is `HEAVY`, in a network with convolutions."""
    if 1 not in found.seconds or not _convolutions(world):
        return False
    sizes, local = world.federation.sizes, world.bench.local
    steps = np.mean([batches.steps(local, int(n)) for n in sizes[sizes > 0]])
    return found.seconds[1] > HEAVY * float(steps)


def _convolutions(world: World) -> bool:
    """Return whether the network has tensors of more than two axes."""
    return any(t.ndim > 2 for t in world.bench.network.params.values())


def _exact(world: World, device: str) -> Trainer:
    """Return what trains one client after the other, with no recording, where the others do."""
    if device == "cpu":
        return OneByOne(world)
    from fedkeel.engine.chunks import Chunks

    plain = Chunks(world, 1, device)
    plain.recorded = False
    return plain


def _work(world: World) -> tuple[Ints, Floats]:
    """Return the clients that have examples, and how many examples each processes in a round."""
    sizes, local = world.federation.sizes, world.bench.local
    some = np.flatnonzero(sizes)
    kinds, place = np.unique(sizes[some], return_inverse=True)
    return some, np.array([batches.processed(local, int(n)) for n in kinds], dtype=float)[place]


def _chunk(world: World, lanes: int, per_round: int) -> tuple[list[Job], float]:
    """Return clients as they share a chunk, and their mean work over that of all clients.

    They are the longest of a typical round's, which has short and long ones: lanes wait for the
    longest among them.
    """
    some, work = _work(world)
    places = np.linspace(0, len(some) - 1, min(per_round, len(some))).astype(np.int64)
    longest = np.argsort(work, kind="stable")[places][::-1][:lanes]
    jobs = [Job(row=0, client=int(k), done=0) for k in some[longest]]
    return jobs, float(work[longest].mean() / work.mean())


def _sample(world: World) -> tuple[list[Job], dict[int, float]]:
    """Return clients of about the mean work, to be measured alone, and what they stand for.

    Returns:
        The clients, and by the number n of the first ones their mean work over that of all clients,
        by which their time is divided.
    """
    some, work = _work(world)
    typical = np.argsort(np.abs(work - work.mean()), kind="stable")[:FEW]
    means = np.cumsum(work[typical]) / np.arange(1, len(typical) + 1) / work.mean()
    jobs = [Job(row=0, client=int(k), done=0) for k in some[typical]]
    return jobs, {n: float(mean) for n, mean in enumerate(means, start=1)}


def _sizes(world: World, per_round: int, workers: int, device: str) -> list[int]:
    """Return the sizes of chunks to try, the most promising first.

    A GPU wants as many clients as fit. On a processor convolutions get slow side by side, and the
    more so the more there are: then they are tried ascending.
    """
    if not world.pads and len(np.unique(world.federation.sizes)) > 1:
        return [1]  # few clients of a round agree in all their batches
    share = -(-per_round // workers)
    if device != "cpu":
        most = min(share, 4 * LANES[-1])
        return [most, *(lanes for lanes in reversed(LANES) if lanes < most), *[1] * (most > 1)]
    sizes = [lanes for lanes in LANES if lanes < share]
    if share > 1:
        sizes.append(min(share, 4 * LANES[-1]))
    whole = [per_round] if share < per_round <= LIKELY else []  # in one process
    if _convolutions(world):
        return [1, *sizes, *whole]
    sizes.sort(key=lambda lanes: abs(math.log(lanes / LIKELY)))
    return [*sizes[:1], 1, *sizes[1:], *whole]


def _forms(world: World, clients: Ints, lanes: int = 1) -> int:
    """Return about how many forms of a step have to be recorded for clients of these sizes.

    Where batches can be padded, these are as wide as the widest, or a half of it, or a quarter; and
    where clients end one before the other, lanes are halved. Examples that parts prepare are padded
    to powers of two.
    """
    local, kinds = world.bench.local, [int(n) for n in np.unique(clients[clients > 0])]
    wide = set().union(*(batches.sizes(local, n) for n in kinds))
    if not world.pads:
        return len(wide)
    if world.bench.plan.preparations:
        return len({(n - 1).bit_length() for n in kinds})
    halved = {int(math.log2(max(wide) / size)) for size in wide}
    ends = {batches.steps(local, n) for n in kinds}
    return len(halved) * (1 if len(ends) == 1 else 1 + int(math.log2(lanes)))


def _user() -> float:
    """Return the seconds that this process has worked, without what the system did for it.

    Most of the latter, where something is done for the first time, is for memory that the process
    then has, and differs from time to time.
    """
    return os.times().user


def _seconds(
    train: Trainer,
    message: Message,
    jobs: list[Job],
    sums: bool = False,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the seconds that one client takes.

    On a processor those of this process alone: other work, or a sleep of the machine, is none of
    the engine's.
    """
    on_gpu = str(getattr(train, "device", "cpu")).startswith("cuda")
    if on_gpu:
        clock = time.perf_counter
    began = clock()
    for _ in train(message, jobs, lambda _: None, sums):
        pass
    if on_gpu:
        torch.cuda.synchronize()
    return (clock() - began) / len(jobs)
