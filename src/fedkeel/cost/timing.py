"""What engines take: some clients of the first round are trained by each, and thrown away."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from fedkeel.data import batches
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.trainer import SequentialTrainer, Trainer
from fedkeel.method.context import Floats, Ints, Message
from fedkeel.method.server_round import server_message

SHORT = 3.0
"""Seconds of a run, one client after the other, below which nothing is measured, nor a GPU used."""

SHARE = 0.05
"""Share of a run that its measurement may take, where that is more than `LEAST`."""

LEAST = 3.0
"""Seconds that a measurement may take, but no more than a quarter of the run."""

LANES = (8, 32, 128)
"""About the sizes of chunks that are tried, besides 1 and a worker's whole share of a round."""

MOST = 512
"""The largest size that is tried."""

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


def _message(prepared: Prepared) -> Message:
    """Return the message of the first round."""
    lr = learning_rate(prepared.settings, prepared.setup.training, 0)
    return with_empty_answers(server_message(prepared.plan, prepared.server, lr), prepared.spec)


def brief(prepared: Prepared) -> bool:
    """Return whether a run, one client after the other on the processor, is a `SHORT` one."""
    message, (jobs, shares) = _message(prepared), _sample(prepared.setup)
    clients = max(prepared.population.per_round, 1) * prepared.settings.rounds
    with use_numerics(prepared.setup.precision):
        one, _, _ = _each(SequentialTrainer(prepared.setup), message, jobs, shares)
    return one * clients < SHORT


def _each(
    exact: Trainer, message: Message, jobs: list[ClientJob], shares: dict[int, float]
) -> tuple[float, int, int]:
    """Return the seconds of a client, and of how many clients, how often, they are to be taken."""
    alone = _seconds(exact, message, jobs[:1])  # the first one also pays for what is made once
    few, times = (min(FEW, len(jobs)), 2) if alone < LONG else (1, 1)
    return _seconds(exact, message, jobs[:few]) / shares[few], few, times


def time_engines(prepared: Prepared, workers: int, device: str) -> Measured:
    """Train some clients of the first round by each engine and throw them away."""
    setup, per_round = prepared.setup, max(prepared.population.per_round, 1)
    message, found = _message(prepared), Measured()
    jobs, shares = _sample(setup)
    exact = _exact(setup, device)
    one, few, times = _each(exact, message, jobs, shares)
    found.seconds[EXACT] = one
    clients = per_round * prepared.settings.rounds
    if one * clients < SHORT and prepared.settings.engine.kind == "auto" and device == "cpu":
        return found
    if times > 1:
        found.seconds[EXACT] = min(one, _seconds(exact, message, jobs[:few]) / shares[few])
    from fedkeel.engine.vectorized.engine import VectorizedTrainer, warm_up  # a slow import
    from fedkeel.engine.vectorized.facts import establish

    warm_up()
    facts = establish(setup)
    began = time.perf_counter()
    slower, lane, chunks = 0, 0.0, VectorizedTrainer(setup, 1, device, exact.placed, facts)
    sums = setup.training.plan.needs_only_update_sum
    sizes = _sizes(setup, per_round, workers, device, facts.pads)
    while sizes and chunks.strategy.is_compiled:
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
        if lanes > 1 and device == "cpu" and _heavy(setup, found):
            continue
        chunks = VectorizedTrainer(setup, lanes, device, chunks.placed, facts)
        some, share = jobs[:few], shares[few]
        if lanes > 1:
            some, share = _chunk(setup, lanes, per_round)
        before = time.perf_counter()
        first = _seconds(chunks, message, some, sums, _user) / share  # records
        if lanes > 1:  # more lanes are recorded as much longer
            lane = max(lane, (time.perf_counter() - before) / lanes)
        seconds = _seconds(chunks, message, some, sums) / share
        if times > 1 and seconds < FAR * min(found.seconds.values()):
            seconds = min(seconds, _seconds(chunks, message, some, sums) / share)
        met = setup.federation.sizes[[job.client for job in some]]
        if lanes > 1 and setup.training.plan.preparations:  # padded to the longest of them
            met = met.max(keepdims=True)
        forms = _forms(setup, setup.federation.sizes, facts.pads, lanes) / _forms(
            setup, met, facts.pads, lanes
        )
        # once in a run each, by every process
        seconds += max(first - seconds, 0.0) * len(some) * forms * workers / clients
        found.reasons += [r for r in chunks.reasons if r not in found.reasons]
        if not chunks.strategy.is_compiled:
            break
        if chunks.parallel_clients != lanes:
            sizes = [size for size in sizes if size <= chunks.parallel_clients]
            continue
        slower += seconds > min(found.seconds.values())
        found.seconds[lanes] = seconds
    return found


def _heavy(setup: TrainingSetup, found: Measured) -> bool:
    """Return whether a recorded step of one lane is `HEAVY`, in a network with convolutions."""
    if 1 not in found.seconds or not _convolutions(setup):
        return False
    sizes, local = setup.federation.sizes, setup.training.local
    steps = np.mean([batches.count_steps(local, int(n)) for n in sizes[sizes > 0]])
    return found.seconds[1] > HEAVY * float(steps)


def _convolutions(setup: TrainingSetup) -> bool:
    """Return whether the network has tensors of more than two axes."""
    return any(t.ndim > 2 for t in setup.training.network.params.values())


def _exact(setup: TrainingSetup, device: str) -> Trainer:
    """Return what trains one client after the other, with no recording, where the others do."""
    if device == "cpu":
        return SequentialTrainer(setup)
    from fedkeel.engine.vectorized.engine import VectorizedTrainer
    from fedkeel.engine.vectorized.strategy import ONE_BY_ONE

    return VectorizedTrainer(setup, 1, device, strategy=ONE_BY_ONE)


def _work(setup: TrainingSetup) -> tuple[Ints, Floats]:
    """Return the clients that have examples, and how many examples each processes in a round."""
    sizes, local = setup.federation.sizes, setup.training.local
    some = np.flatnonzero(sizes)
    kinds, place = np.unique(sizes[some], return_inverse=True)
    return some, np.array([batches.count_examples(local, int(n)) for n in kinds], dtype=float)[
        place
    ]


def _chunk(setup: TrainingSetup, lanes: int, per_round: int) -> tuple[list[ClientJob], float]:
    """Return clients as they share a chunk, and their mean work over that of all clients.

    They are the longest of a typical round's, which has short and long ones: lanes wait for the
    longest among them.
    """
    some, work = _work(setup)
    places = np.linspace(0, len(some) - 1, min(per_round, len(some))).astype(np.int64)
    longest = np.argsort(work, kind="stable")[places][::-1][:lanes]
    jobs = [ClientJob(row=0, client=int(k), steps_done=0) for k in some[longest]]
    return jobs, float(work[longest].mean() / work.mean())


def _sample(setup: TrainingSetup) -> tuple[list[ClientJob], dict[int, float]]:
    """Return clients of about the mean work, to be measured alone, and what they stand for.

    Returns:
        The clients, and by the number n of the first ones their mean work over that of all clients,
        by which their time is divided.
    """
    some, work = _work(setup)
    typical = np.argsort(np.abs(work - work.mean()), kind="stable")[:FEW]
    means = np.cumsum(work[typical]) / np.arange(1, len(typical) + 1) / work.mean()
    jobs = [ClientJob(row=0, client=int(k), steps_done=0) for k in some[typical]]
    return jobs, {n: float(mean) for n, mean in enumerate(means, start=1)}


def _sizes(
    setup: TrainingSetup, per_round: int, workers: int, device: str, pads: bool
) -> list[int]:
    """Return the sizes of chunks to try, the most promising first.

    A GPU wants as many clients as fit. On a processor convolutions get slow side by side, and the
    more so the more there are: then they are tried ascending. A worker's share is cut into chunks
    of about the same size, and it is this size that is tried: of 50 clients 25, not 32 and 18.
    """
    if not pads and len(np.unique(setup.federation.sizes)) > 1:
        return [1]  # few clients of a round agree in all their batches
    share = -(-per_round // workers)
    tried = [min(lanes, share) for lanes in (*LANES, MOST)]
    sizes = [-(-share // -(-share // lanes)) for lanes in tried]
    sizes = [lanes for lanes in dict.fromkeys(sizes) if lanes > 1]
    if device != "cpu":
        return [*reversed(sizes), 1]
    whole = [per_round] if share < per_round <= LIKELY else []  # in one process
    if _convolutions(setup):
        return [1, *sizes, *whole]
    sizes.sort(key=lambda lanes: abs(math.log(lanes / LIKELY)))
    return [*sizes[:1], 1, *sizes[1:], *whole]


def _forms(setup: TrainingSetup, clients: Ints, pads: bool, lanes: int = 1) -> int:
    """Return about how many forms of a step have to be recorded for clients of these sizes.

    Where batches can be padded, these are as wide as the widest, or a half of it, or a quarter; and
    where clients end one before the other, lanes are halved. Examples that parts prepare are padded
    to powers of two.
    """
    local, kinds = setup.training.local, [int(n) for n in np.unique(clients[clients > 0])]
    wide = set().union(*(batches.batch_sizes(local, n) for n in kinds))
    if not pads:
        return len(wide)
    if setup.training.plan.preparations:
        return len({(n - 1).bit_length() for n in kinds})
    halved = {int(math.log2(max(wide) / size)) for size in wide}
    ends = {batches.count_steps(local, n) for n in kinds}
    return len(halved) * (1 if len(ends) == 1 else 1 + int(math.log2(lanes)))


def _user() -> float:
    """Return the seconds, to a hundredth, that this process has worked, not the system for it.

    Most of what the system does, where something is done for the first time, is for memory that
    the process then has, and differs from time to time.
    """
    return os.times().user


def _seconds(
    train: Trainer,
    message: Message,
    jobs: list[ClientJob],
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
