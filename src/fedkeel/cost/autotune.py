"""Which engine runs the clients: what was asked for, or what a short measurement finds fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedkeel import config
from fedkeel.cost.device import device_for
from fedkeel.cost.timing import EXACT, Measured, brief, time_engines
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.affinity import core_count
from fedkeel.engine.process.malloc import keeping_freed_memory
from fedkeel.engine.process.numerics import use_numerics
from fedkeel.records.run_record import EngineChoice

HANDING = 2e-3
"""Seconds that a round takes longer where its clients are handed to other processes."""

SHARING = 1.1
"""Times as long as a process alone each of several takes: they share caches and memory."""

GAIN = 0.95
"""Share of the exact engine's time that the vectorized one has to reach to be preferred."""

CLEARLY = 0.9
"""Share of another size's time that one which is tried later has to reach to be preferred: what is
recorded is measured once, and differs from time to time by more than sizes that are alike."""

_KNOWN: dict[Any, Measured] = {}
"""What has been measured in this process: a comparison's seeds run on the same engine."""


def choose(prepared: Prepared, measure: bool = True) -> EngineChoice:
    """Return the engine of a run, and what was measured to choose it.

    Args:
        prepared: the run.
        measure: whether clients may be trained to find out; otherwise what was asked for stays.
    """
    asked, per_round = prepared.settings.engine, max(prepared.population.per_round, 1)
    workers, setup = min(asked.workers or core_count(), per_round), prepared.setup
    free = measure and asked.kind == asked.device == "auto" and torch.cuda.is_available()
    # a brief run is over before a GPU has recorded its first step
    device, reasons = ("cpu", []) if free and brief(prepared) else device_for(asked, setup)
    kind = asked.kind
    if device == "cuda":  # one process keeps a GPU busy
        kind, workers = "vectorized", workers if asked.workers else 1
    engine = EngineChoice(
        kind=kind,
        workers=workers,
        parallel_clients=1,
        device=device,
        dtype=asked.dtype,
        precision=asked.precision,
        asked=asked.kind,
        reasons=reasons,
    )
    if asked.kind == "sequential":
        return replace(engine, workers=1)
    if asked.kind == "workers":
        return engine
    if asked.kind == "ray":
        return replace(engine, **_on_ray(asked, per_round))
    if kind == "vectorized" and asked.parallel_clients is not None:
        return replace(engine, parallel_clients=min(asked.parallel_clients, per_round))
    if not measure:
        return engine
    found = _measured(prepared, workers, device)
    # the best number of processes for each size, in the order in which they were tried
    options = {
        chunk: min(
            (_round(each, max(chunk, 1), per_round, n), n) for n in {asked.workers or 1, workers}
        )
        for chunk, each in found.seconds.items()
    }
    exact, rounds = options.pop(EXACT), {chunk: one for chunk, (one, _) in options.items()}
    if rounds and min(rounds.values()) <= GAIN * exact[0]:
        kind = "vectorized"
    chosen, parallel_clients = exact, 1
    if kind == "vectorized" and rounds:
        best = next(iter(rounds))
        for chunk, one in rounds.items():
            best = chunk if one < CLEARLY * rounds[best] else best
        parallel_clients, chosen = best, options[best]
    if kind == "auto":
        kind = "workers" if chosen[1] > 1 else "sequential"
    return replace(
        engine,
        kind=kind,
        workers=chosen[1],
        parallel_clients=parallel_clients,
        seconds_per_client={_name(c): round(s, 6) for c, s in found.seconds.items()},
        reasons=[*reasons, *found.reasons],
    )


def measured_engines() -> dict[Any, Measured]:
    """Return what has been measured in this process."""
    return dict(_KNOWN)


def remember(measured: dict[Any, Measured]) -> None:
    """Take what another process has measured."""
    _KNOWN.update(measured)


def begun_with(before: EngineChoice, asked: config.Engine) -> EngineChoice:
    """Return the engine of a run that `auto` chose before, in one process where that is asked."""
    if asked.workers != 1:
        return before
    kind = "sequential" if before.kind in ("workers", "ray") else before.kind
    return replace(before, kind=kind, workers=1, address=None)


def _on_ray(asked: config.Engine, per_round: int) -> dict[str, Any]:
    """Return what is different on Ray: one actor for each core of a cluster, exact as a rule."""
    count, address = asked.workers, asked.address
    if address is not None:
        from fedkeel.engine.ray.cluster import cluster_cores

        count = count or cluster_cores(address)
    chunk = None if asked.parallel_clients is None else min(asked.parallel_clients, per_round)
    return {
        "workers": min(count or core_count(), per_round),
        "parallel_clients": chunk,
        "address": address,
    }


def _name(chunk: int) -> str:
    """Return how the record calls an engine that was measured."""
    return "sequential" if chunk == EXACT else f"vectorized(parallel_clients={chunk})"


def _round(each: float, chunk: int, per_round: int, workers: int) -> float:
    """Return the seconds of a round, from those of a client."""
    busy = min(workers, -(-per_round // chunk))
    alone = each * per_round / busy
    return alone * SHARING + HANDING if workers > 1 else alone


def _measured(prepared: Prepared, workers: int, device: str) -> Measured:
    """Measure the engines, or look up what was found for a run like this one."""
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
    if key not in _KNOWN:
        with use_numerics(setup.precision), keeping_freed_memory():
            _KNOWN[key] = time_engines(prepared, workers, device)
    return _KNOWN[key]
