"""The engine of a run, made as `choose` has decided."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeel.engine.base import Engine
from fedkeel.engine.local import Trainer
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.round_buffers import answered
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.workers import Workers
from fedkeel.method.server_round import server_message


def make(prepared: Prepared, chosen: Mapping[str, Any], state: Path | None = None) -> Engine:
    """Return an engine, to be used in a ``with`` statement.

    Args:
        prepared: the run.
        chosen: ``kind``, ``workers`` and ``parallel_clients``, from `choose`;
            for Ray also ``address``.
        state: folder of client state; None keeps it in memory.

    Raises:
        RunError: its processes cannot be started.
    """
    setup, spec, capacity = prepared.setup, prepared.spec, prepared.population.per_round
    file = None if state is None else state / "clients.bin"
    kind, count = chosen["kind"], chosen["workers"]
    message = answered(server_message(prepared.plan, prepared.server, 1.0), spec)
    if kind == "ray":
        from fedkeel.engine.ray.engine import Ray

        address, parallel_clients = chosen.get("address"), chosen.get("parallel_clients")
        return Ray(
            setup, spec, capacity, message, count, address, file=file, chunk=parallel_clients
        )
    chunks: Trainer | None = None
    if kind == "vectorized":
        from fedkeel.engine.vectorized.engine import (
            VectorizedTrainer,
        )  # takes half a second to import

        device = chosen.get("device", "cpu")
        chunks = VectorizedTrainer(setup, chosen["parallel_clients"], device)
    if kind != "workers" and count == 1:
        return Sequential(setup, spec, capacity, file=file, chunks=chunks)
    return Workers(setup, spec, capacity, message, count, file=file, chunks=chunks)
