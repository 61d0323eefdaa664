"""The engine that runs the clients: the requested one, or one by a rule that reads no clock.

The rule looks at what all methods and seeds of a comparison share, so they get the same engine, and
a repeated run gets it again. Its constants are measured: see ``docs/benchmarks``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fedkeel import config
from fedkeel.cost.device import choose_device
from fedkeel.cost.work import Work, run_work
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.prepared import Prepared, learning_rate
from fedkeel.engine.process.affinity import core_count
from fedkeel.engine.process.turns import one_at_a_time
from fedkeel.engine.rehearsal import with_empty_answers
from fedkeel.engine.vectorized.facts import establish
from fedkeel.errors import RunError
from fedkeel.method.plugins import user_part_digests
from fedkeel.method.server_round import server_message
from fedkeel.records.run_record import EngineChoice
from fedkeel.task.models import MODELS
from fedkeel.tree import numel

SHORT_RUN_SECONDS = 3.0
"""A run of less nominal seconds is over before compiled steps or a GPU are worth their start."""

DISPATCHED_SECONDS = 4e-3
"""Nominal seconds of a round from which two processes take less time than one: sending clients to
other processes takes about 2 ms."""

DISPATCHED_GROUP_SECONDS = 3e-2
"""The same where clients are trained side by side, which takes an eighth of the time."""

LONG_STEP = 5e9
"""Multiply-adds of a step from which compiled steps gain nothing on a CPU: arithmetic decides, and
large networks take seconds to compile."""

GROUP_SIZE, LARGEST_GROUP = 32, 128
"""Clients of a group on a CPU, at most: more take longer to compile, and leave the cache. Groups of
small batches may be larger."""

GROUP_EXAMPLES = 320
"""Examples in a step of a group on a CPU that may be larger than `GROUP_SIZE`."""

GROUP_ENTRIES = 2**25
"""Parameters of all clients of a group on a CPU, at most (128 MB in float32)."""

SMALL_CONVOLUTIONS = 1e7
"""Multiply-adds of a step up to which a network with convolutions gains from groups on a CPU. They
save the overhead of operations, and their convolutions are slower."""

GPU_GROUP_SIZE, GPU_GROUP_ENTRIES = 512, 2**28
"""Clients of a group on a GPU, and their parameters (1 GB in float32), at most."""


@one_at_a_time()
def choose_engine(prepared: Prepared, obstacle: str | None = None) -> EngineChoice:
    """Return the engine of a run.

    Args:
        prepared: the run.
        obstacle: why one of the methods that it is compared with cannot be compiled, from
            `vectorization_obstacle`, "" where all can. None looks at the run alone.
    """
    requested, cohort = prepared.settings.engine, max(prepared.population.per_round, 1)
    workers = min(requested.workers or core_count(), cohort)
    choice = EngineChoice(
        kind=requested.kind,
        workers=workers,
        parallel_clients=1,
        device="cpu",
        dtype=requested.dtype,
        precision=requested.precision,
        asked=requested.kind,
    )
    if requested.kind == "sequential":
        return replace(choice, workers=1)
    if requested.kind == "workers":
        return choice
    if requested.kind == "ray":
        return _ray_choice(choice, requested, cohort)
    work = run_work(prepared)
    is_short = requested.kind == "auto" and work.seconds < SHORT_RUN_SECONDS
    if is_short and requested.device == "auto":
        return _exact_choice(choice, requested, work)
    device, reasons = choose_device(requested, prepared.setup)
    if requested.kind == "auto" and device == "cpu":
        obstacle = vectorization_obstacle(prepared) if obstacle is None else obstacle
        reasons = [*reasons, obstacle] if obstacle else reasons
        if obstacle or is_short or work.multiply_adds > LONG_STEP:
            return _exact_choice(replace(choice, reasons=reasons), requested, work)
    if device == "cuda":  # one process keeps a GPU busy
        workers = workers if requested.workers else 1
    is_dispatched = requested.workers or work.round_seconds >= DISPATCHED_GROUP_SECONDS
    workers = workers if is_dispatched else 1
    size = min(requested.parallel_clients or _group_size(prepared, work, workers, device), cohort)
    return replace(
        choice,
        kind="vectorized",
        workers=workers if requested.workers else min(workers, math.ceil(cohort / size)),
        parallel_clients=size,
        device=device,
        reasons=reasons,
    )


@one_at_a_time()
def vectorization_obstacle(prepared: Prepared) -> str:
    """Return why `auto` cannot train a run by compiled steps, "" where it can or need not.

    The package's own models and methods are known to be compiled. Others are tried.
    """
    setup = prepared.setup
    if prepared.settings.engine.kind != "auto":
        return ""
    if facts := establish(setup).not_compilable:
        return f"steps are not compiled: {facts}"
    is_known = prepared.ingredients.model in MODELS and not user_part_digests(prepared.plan.parts)
    work = None if is_known else run_work(prepared)
    if work is None or work.seconds < SHORT_RUN_SECONDS or work.multiply_adds > LONG_STEP:
        return ""
    from fedkeel.engine.vectorized.trial import compile_obstacle  # slow to import

    lr = learning_rate(prepared.settings, setup.training, 0)
    message = server_message(prepared.plan, prepared.server, lr)
    return compile_obstacle(setup, with_empty_answers(message, prepared.spec))


def kept_engine(previous: EngineChoice, requested: config.Engine) -> EngineChoice | None:
    """Return the engine with which a run goes on, or other runs of its comparison are made.

    It is the previous one where the settings leave the choice open, in one process if that is
    requested, and None where they do not.

    Raises:
        RunError: the previous one trained on a GPU, and there is none.
    """
    is_open = requested.kind == "vectorized" and requested.parallel_clients is None
    if requested.kind != "auto" and not (is_open and previous.kind == "vectorized"):
        return None
    if previous.device == "cuda" and requested.device == "cpu":
        return None
    if previous.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "This was begun on a GPU, and torch finds none.",
            why="without it the results differ by rounding, and dropout draws other numbers",
            do="set engine.device = 'cpu' to go on nevertheless",
        )
    if requested.workers != 1:
        return previous
    kind = "sequential" if previous.kind in ("workers", "ray") else previous.kind
    return replace(previous, kind=kind, workers=1, address=None)


def _exact_choice(choice: EngineChoice, requested: config.Engine, work: Work) -> EngineChoice:
    """Return the choice for training as the reference does, in several processes if that pays."""
    is_dispatched = requested.workers or work.round_seconds >= DISPATCHED_SECONDS
    workers = choice.workers if is_dispatched else 1
    return replace(choice, kind="workers" if workers > 1 else "sequential", workers=workers)


def _group_size(prepared: Prepared, work: Work, workers: int, device: str) -> int:
    """Return how many clients are trained side by side.

    A worker's share of the cohort is cut into groups of about the same size: a share of 50 clients
    into two of 25, not into 32 and 18.
    """
    setup, entries = prepared.setup, numel(prepared.setup.training.network.params)
    sizes = setup.federation.sizes
    if not establish(setup).pads and len(np.unique(sizes[sizes > 0])) > 1:
        return 1  # few clients of a round have the same batch sizes
    if device == "cpu" and _has_convolutions(setup) and work.multiply_adds > SMALL_CONVOLUTIONS:
        return 1
    if device == "cpu":
        limit = min(max(GROUP_EXAMPLES // work.batch, GROUP_SIZE), LARGEST_GROUP)
        limit = min(limit, GROUP_ENTRIES // entries)
    else:
        limit = min(GPU_GROUP_SIZE, GPU_GROUP_ENTRIES // entries)
    share = math.ceil(work.cohort / workers)
    return math.ceil(share / math.ceil(share / max(limit, 1)))


def _has_convolutions(setup: TrainingSetup) -> bool:
    """Return whether the network has tensors of more than two axes."""
    return any(t.ndim > 2 for t in setup.training.network.params.values())


def _ray_choice(choice: EngineChoice, requested: config.Engine, cohort: int) -> EngineChoice:
    """Return the choice for Ray: an actor for each core of the cluster, sequential by default."""
    workers, group = requested.workers, requested.parallel_clients
    if requested.address is not None and workers is None:
        from fedkeel.engine.ray.cluster import cluster_cores

        workers = cluster_cores(requested.address)
    return replace(
        choice,
        workers=min(workers or core_count(), cohort),
        parallel_clients=None if group is None else min(group, cohort),
        address=requested.address,
    )
