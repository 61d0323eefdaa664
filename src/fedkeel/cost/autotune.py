"""The engine that runs the clients: the requested one, or the fastest of a short measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedkeel import config
from fedkeel.cost.device import choose_device
from fedkeel.cost.timing import SEQUENTIAL, EngineTimes, is_short_run, time_engines
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.affinity import core_count
from fedkeel.engine.process.malloc import keeping_freed_memory
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.records.run_record import EngineChoice

DISPATCH_SECONDS = 2e-3
"""Seconds that a round takes longer where its clients are sent to other processes."""

SHARING_FACTOR = 1.1
"""Several processes take this many times as long as one alone: they share caches and memory."""

VECTORIZED_MARGIN = 0.95
"""The vectorized engine is preferred if it takes at most this share of the sequential time."""

SIZE_MARGIN = 0.9
"""A later group size is preferred if it takes at most this share of the best time so far. Compiled
steps are measured once, and sizes that are alike differ by less than two measurements do."""

_MEASURED: dict[Any, EngineTimes] = {}
"""Measurements of this process, so that a comparison's seeds run on the same engine."""


@dataclass(frozen=True)
class _RoundTime:
    """Expected seconds of a round, with the number of processes that takes the fewest."""

    seconds: float
    workers: int


def choose_engine(prepared: Prepared, measure: bool = True) -> EngineChoice:
    """Return the engine of a run, and what was measured to choose it.

    Args:
        prepared: the run.
        measure: whether clients may be trained for a measurement; otherwise `auto` stays `auto`.
    """
    requested, cohort = prepared.settings.engine, max(prepared.population.per_round, 1)
    workers, setup = min(requested.workers or core_count(), cohort), prepared.setup
    may_skip_gpu = measure and requested.kind == requested.device == "auto"
    if may_skip_gpu and torch.cuda.is_available() and is_short_run(prepared):
        device, reasons = "cpu", list[str]()  # it ends before a GPU has compiled its first step
    else:
        device, reasons = choose_device(requested, setup)
    kind = requested.kind
    if device == "cuda":  # one process keeps a GPU busy
        kind, workers = "vectorized", workers if requested.workers else 1
    choice = EngineChoice(
        kind=kind,
        workers=workers,
        parallel_clients=1,
        device=device,
        dtype=requested.dtype,
        precision=requested.precision,
        asked=requested.kind,
        reasons=reasons,
    )
    if requested.kind == "sequential":
        return replace(choice, workers=1)
    if requested.kind == "ray":
        return _ray_choice(choice, requested, cohort)
    if kind == "vectorized" and requested.parallel_clients is not None:
        return replace(choice, parallel_clients=min(requested.parallel_clients, cohort))
    if requested.kind == "workers" or not measure:
        return choice
    times = _measure(prepared, workers, device)
    worker_counts = {requested.workers or 1, workers}
    rounds = {  # by group size, in the order in which the sizes were tried
        size: min(
            (_round_time(seconds, size, cohort, count) for count in worker_counts),
            key=lambda time: (time.seconds, time.workers),
        )
        for size, seconds in times.seconds.items()
    }
    best = sequential = rounds.pop(SEQUENTIAL)
    fastest = min((time.seconds for time in rounds.values()), default=float("inf"))
    if fastest <= VECTORIZED_MARGIN * sequential.seconds:
        kind = "vectorized"
    parallel_clients = 1
    if kind == "vectorized" and rounds:
        parallel_clients, best = next(iter(rounds.items()))
        for size, time in rounds.items():
            if time.seconds < SIZE_MARGIN * best.seconds:
                parallel_clients, best = size, time
    if kind == "auto":
        kind = "workers" if best.workers > 1 else "sequential"
    return replace(
        choice,
        kind=kind,
        workers=best.workers,
        parallel_clients=parallel_clients,
        seconds_per_client={_engine_name(k): round(v, 6) for k, v in times.seconds.items()},
        reasons=[*reasons, *times.reasons],
    )


def resumed_engine(previous: EngineChoice, requested: config.Engine) -> EngineChoice:
    """Return the engine with which a run of `auto` goes on: in one process if that is requested."""
    if requested.workers != 1:
        return previous
    kind = "sequential" if previous.kind in ("workers", "ray") else previous.kind
    return replace(previous, kind=kind, workers=1, address=None)


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


def _engine_name(size: int) -> str:
    """Return the name of a measured engine in the run record."""
    return "sequential" if size == SEQUENTIAL else f"vectorized(parallel_clients={size})"


def _round_time(seconds: float, size: int, cohort: int, workers: int) -> _RoundTime:
    """Return the time of a round, from the seconds of a client in groups of a size."""
    busy_workers = min(workers, -(-cohort // max(size, 1)))
    total = seconds * cohort / busy_workers
    return _RoundTime(total * SHARING_FACTOR + DISPATCH_SECONDS if workers > 1 else total, workers)


# ---- measurements -------------------------------------------------------------------------------


def measured_engines() -> dict[Any, EngineTimes]:
    """Return the measurements of this process, by run."""
    return dict(_MEASURED)


def remember(measured: dict[Any, EngineTimes]) -> None:
    """Add the measurements of another process."""
    _MEASURED.update(measured)


def _measure(prepared: Prepared, workers: int, device: str) -> EngineTimes:
    """Measure the engines, or return the measurement of a run like this one."""
    setup, plan = prepared.setup, prepared.plan
    data = setup.federation.data
    key = (
        plan.expression,
        plan.weights,
        setup.training.network.describe(),
        tuple(data.x.shape),
        setup.training.local.model_dump_json(),
        prepared.settings.rounds,
        prepared.population,
        prepared.settings.engine.model_dump_json(),
        setup.augment,
        workers,
        device,
    )
    if key not in _MEASURED:
        with use_numerics(setup.precision), keeping_freed_memory():
            _MEASURED[key] = time_engines(prepared, workers, device)
    return _MEASURED[key]
