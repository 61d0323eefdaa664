"""Seconds that engines take, measured by training some clients of the first round."""

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

SHORT_RUN_SECONDS = 3.0
"""A run that takes less than this, one client after the other, is not measured and uses no GPU."""

MEASURING_SHARE = 0.05
"""Share of a run that its measurement may take, where that is more than `MEASURING_SECONDS`."""

MEASURING_SECONDS = 3.0
"""Seconds that a measurement may take, but at most a quarter of the run."""

GROUP_SIZES = (8, 32, 128, 512)
"""Approximate sizes of client groups to try, beside 1 and one group for the whole cohort."""

SAMPLE_CLIENTS = 3
"""Number of clients that measure an engine without client groups; they are trained twice."""

LONG_CLIENT_SECONDS = 1.0
"""A client that takes longer than this is enough as a sample, and is trained once."""

COMPILED_SPEEDUP = 0.5
"""Compiled steps of single clients never take less than this share of the sequential time."""

SEQUENTIAL = 0
"""Stands for training without compiled steps among sizes of client groups."""

USUAL_GROUP_SIZE = 32
"""Size of a client group that is often a good choice for small dense networks."""

LONG_STEP_SECONDS = 5e-3
"""Client groups gain nothing on a CPU where a convolutional network's step takes longer than this.
What they save is the overhead of calling operations, about 5 us each."""

REPEAT_FACTOR = 1.3
"""A group size that takes this many times as long as the best one is not measured again."""


@dataclass
class EngineTimes:
    """Measured seconds of one client in one process of one thread.

    Args:
        seconds: by size of the client group, or `SEQUENTIAL`.
        reasons: why clients cannot be trained side by side, or steps cannot be compiled.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    """Clients that are trained to measure an engine.

    Args:
        jobs: the clients.
        relative_work: their mean number of examples over that of all clients. Measured seconds are
            divided by it.
    """

    jobs: list[ClientJob]
    relative_work: float


def is_short_run(prepared: Prepared) -> bool:
    """Return whether a run on the CPU, one client after the other, is below the limit."""
    trainings = max(prepared.population.per_round, 1) * prepared.settings.rounds
    with use_numerics(prepared.setup.precision):
        trainer = SequentialTrainer(prepared.setup)
        seconds, _, _ = _time_sequential(trainer, _first_message(prepared), prepared.setup)
    return seconds * trainings < SHORT_RUN_SECONDS


def time_engines(prepared: Prepared, workers: int, device: str) -> EngineTimes:
    """Measure the engines that may run the clients.

    Args:
        prepared: the run.
        workers: number of processes.
        device: ``cpu`` or ``cuda``.
    """
    setup, cohort = prepared.setup, max(prepared.population.per_round, 1)
    trainings = cohort * prepared.settings.rounds
    message, sequential = _first_message(prepared), _sequential_trainer(setup, device)
    sequential_seconds, sample, repeats = _time_sequential(sequential, message, setup)
    times = EngineTimes({SEQUENTIAL: sequential_seconds})
    is_short = sequential_seconds * trainings < SHORT_RUN_SECONDS
    if is_short and prepared.settings.engine.kind == "auto" and device == "cpu":
        return times
    if repeats > 1:
        times.seconds[SEQUENTIAL] = min(
            sequential_seconds, _sample_seconds(sequential, message, sample)
        )
    from fedkeel.engine.vectorized.engine import VectorizedTrainer, warm_up  # slow to import
    from fedkeel.engine.vectorized.facts import establish

    warm_up()
    facts = establish(setup)
    began = time.perf_counter()
    sums = setup.training.plan.needs_only_update_sum
    slower_sizes, group_seconds = 0, 0.0  # the latter: seconds to compile, for each client
    trainer = VectorizedTrainer(setup, 1, device, sequential.placed, facts)
    sizes = _group_sizes(setup, cohort, workers, device, facts.pads)
    while sizes and trainer.strategy.is_compiled:
        size = sizes.pop(0)
        best = min(times.seconds.values())
        if device == "cpu":
            run_seconds, expected = (
                sequential_seconds * trainings,
                size * max(sequential_seconds, group_seconds),
            )
        else:  # training one by one says little about a GPU
            run_seconds, expected = best * trainings, 0.0
        budget = max(min(MEASURING_SECONDS, run_seconds / 4), MEASURING_SHARE * run_seconds)
        spent = time.perf_counter() - began
        if size > 1 and (spent + expected > budget or slower_sizes >= repeats):
            continue
        if size > 1 and device == "cpu" and _has_long_convolution_steps(setup, times):
            continue
        if size == 1 and best < COMPILED_SPEEDUP * sequential_seconds:
            continue
        trainer = VectorizedTrainer(setup, size, device, trainer.placed, facts)
        group = sample if size == 1 else _group_sample(setup, size, cohort)
        compile_began = time.perf_counter()
        first = _sample_seconds(trainer, message, group, sums, _user_seconds)  # compiles
        if size > 1:  # larger groups take longer to compile
            group_seconds = max(group_seconds, (time.perf_counter() - compile_began) / size)
        seconds = _sample_seconds(trainer, message, group, sums)
        if repeats > 1 and seconds < REPEAT_FACTOR * best:
            seconds = min(seconds, _sample_seconds(trainer, message, group, sums))
        compiled = setup.federation.sizes[[job.client for job in group.jobs]]
        if size > 1 and setup.training.plan.preparations:  # all are padded to the longest
            compiled = compiled.max(keepdims=True)
        shapes = _shape_count(setup, setup.federation.sizes, facts.pads, size)
        shapes_of_sample = _shape_count(setup, compiled, facts.pads, size)
        # every process compiles each shape once in a run
        compilations = shapes / shapes_of_sample * workers
        seconds += max(first - seconds, 0.0) * len(group.jobs) * compilations / trainings
        times.reasons += [reason for reason in trainer.reasons if reason not in times.reasons]
        if not trainer.strategy.is_compiled:
            break
        if trainer.parallel_clients != size:  # it did not fit into memory
            sizes = [other for other in sizes if other <= trainer.parallel_clients]
            continue
        slower_sizes += seconds > min(times.seconds.values())
        times.seconds[size] = seconds
    return times


def _first_message(prepared: Prepared) -> Message:
    lr = learning_rate(prepared.settings, prepared.setup.training, 0)
    return with_empty_answers(server_message(prepared.plan, prepared.server, lr), prepared.spec)


def _sequential_trainer(setup: TrainingSetup, device: str) -> Trainer:
    """Return what trains one client after the other on the device, without compiled steps."""
    if device == "cpu":
        return SequentialTrainer(setup)
    from fedkeel.engine.vectorized.engine import VectorizedTrainer
    from fedkeel.engine.vectorized.strategy import ONE_BY_ONE

    return VectorizedTrainer(setup, 1, device, strategy=ONE_BY_ONE)


def _time_sequential(
    trainer: Trainer, message: Message, setup: TrainingSetup
) -> tuple[float, _Sample, int]:
    """Return the seconds of a client, the sample, and how often a sample is to be trained."""
    first = _typical_sample(setup, 1)
    seconds = _seconds(trainer, message, first.jobs)  # the first client also warms up
    is_long = seconds >= LONG_CLIENT_SECONDS
    sample, repeats = (first, 1) if is_long else (_typical_sample(setup, SAMPLE_CLIENTS), 2)
    return _sample_seconds(trainer, message, sample), sample, repeats


# ---- samples and sizes --------------------------------------------------------------------------


def _work(setup: TrainingSetup) -> tuple[Ints, Floats]:
    """Return the clients that have examples, and how many examples each processes in a round."""
    sizes, local = setup.federation.sizes, setup.training.local
    clients = np.flatnonzero(sizes)
    distinct, index = np.unique(sizes[clients], return_inverse=True)
    work = np.array([batches.count_examples(local, int(n)) for n in distinct], dtype=float)
    return clients, work[index]


def _sample_of(clients: Ints, work: Floats, chosen: Ints) -> _Sample:
    jobs = [ClientJob(row=0, client=int(k), steps_done=0) for k in clients[chosen]]
    return _Sample(jobs, float(work[chosen].mean() / work.mean()))


def _typical_sample(setup: TrainingSetup, count: int) -> _Sample:
    """Return clients of about the mean work."""
    clients, work = _work(setup)
    order = np.argsort(np.abs(work - work.mean()), kind="stable")
    return _sample_of(clients, work, order[:count])


def _group_sample(setup: TrainingSetup, size: int, cohort: int) -> _Sample:
    """Return the clients with the most work of a typical cohort, as they form a client group.

    A group waits for its longest client, so the sample is as mixed as a group of a round.
    """
    clients, work = _work(setup)
    places = np.linspace(0, len(clients) - 1, min(cohort, len(clients))).astype(np.int64)
    longest_first = np.argsort(work, kind="stable")[places][::-1]
    return _sample_of(clients, work, longest_first[:size])


def _group_sizes(
    setup: TrainingSetup, cohort: int, workers: int, device: str, pads: bool
) -> list[int]:
    """Return the sizes of client groups to try, the most promising first.

    A GPU needs large groups. On a CPU convolutions get slower with the size of the group, so small
    groups are tried first. A worker's share is cut into groups of about the same size, and this
    size is tried: for a share of 50 clients 25, not 32 and 18.
    """
    if not pads and len(np.unique(setup.federation.sizes)) > 1:
        return [1]  # few clients of a round have the same batch sizes
    share = -(-cohort // workers)
    limits = [min(size, share) for size in GROUP_SIZES]
    sizes = [-(-share // -(-share // limit)) for limit in limits]
    sizes = [size for size in dict.fromkeys(sizes) if size > 1]
    if device != "cpu":
        return [*reversed(sizes), 1]
    single_process = [cohort] if share < cohort <= USUAL_GROUP_SIZE else []
    if _has_convolutions(setup):
        return [1, *sizes, *single_process]
    sizes.sort(key=lambda size: abs(math.log(size / USUAL_GROUP_SIZE)))
    return [*sizes[:1], 1, *sizes[1:], *single_process]


def _shape_count(setup: TrainingSetup, client_sizes: Ints, pads: bool, size: int = 1) -> int:
    """Return about how many shapes of a step are compiled for clients with these sizes.

    Padded batches are as wide as the widest batch, or a half, or a quarter of it. Where clients end
    one before the other, the group is halved. Examples that parts prepare are padded to powers of
    two.
    """
    local = setup.training.local
    distinct = [int(n) for n in np.unique(client_sizes[client_sizes > 0])]
    widths = set().union(*(batches.batch_sizes(local, n) for n in distinct))
    if not pads:
        return len(widths)
    if setup.training.plan.preparations:
        return len({(n - 1).bit_length() for n in distinct})
    halvings = {int(math.log2(max(widths) / width)) for width in widths}
    steps = {batches.count_steps(local, n) for n in distinct}
    return len(halvings) * (1 if len(steps) == 1 else 1 + int(math.log2(size)))


def _has_convolutions(setup: TrainingSetup) -> bool:
    """Return whether the network has tensors of more than two axes."""
    return any(t.ndim > 2 for t in setup.training.network.params.values())


def _has_long_convolution_steps(setup: TrainingSetup, times: EngineTimes) -> bool:
    """Return whether a network with convolutions takes too long a step for client groups."""
    if 1 not in times.seconds or not _has_convolutions(setup):
        return False
    sizes, local = setup.federation.sizes, setup.training.local
    steps = np.mean([batches.count_steps(local, int(n)) for n in sizes[sizes > 0]])
    return times.seconds[1] > LONG_STEP_SECONDS * float(steps)


# ---- clocks -------------------------------------------------------------------------------------


def _user_seconds() -> float:
    """Return the seconds, to a hundredth, of this process without the system's work for it.

    When something is done for the first time, the system mostly provides memory, which takes a
    different time each time and is not needed again.
    """
    return os.times().user


def _sample_seconds(
    trainer: Trainer,
    message: Message,
    sample: _Sample,
    sums: bool = False,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the seconds of a client of mean work, measured with a sample."""
    return _seconds(trainer, message, sample.jobs, sums, clock) / sample.relative_work


def _seconds(
    trainer: Trainer,
    message: Message,
    jobs: list[ClientJob],
    sums: bool = False,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Return the seconds for each client.

    On a CPU only this process's seconds count: neither other work nor a sleep of the machine.
    """
    on_gpu = str(getattr(trainer, "device", "cpu")).startswith("cuda")
    if on_gpu:
        clock = time.perf_counter
    began = clock()
    for _ in trainer(message, jobs, lambda _: None, sums):
        pass
    if on_gpu:
        torch.cuda.synchronize()
    return (clock() - began) / len(jobs)
