"""Making the engine of a run, and the folder of its client state."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedkeel.base.memory import free_on
from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.rehearsal import client_state_spec, with_empty_answers
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.vectorized.low_rank import low_rank_codec
from fedkeel.engine.workers import Workers
from fedkeel.method.part import traits_of
from fedkeel.method.plugins import user_modules
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.features import features_of
from fedkeel.tree import nbytes


def make(prepared: Prepared, choice: EngineChoice, state: Path | None = None) -> TrainingEngine:
    """Return an engine, to be used in a ``with`` statement.

    Args:
        prepared: the run.
        choice: the engine, from `choose`.
        state: folder of client state; None keeps it in memory.

    Raises:
        RunError: its processes cannot be started.
    """
    setup, spec, capacity = prepared.setup, prepared.spec, prepared.largest_cohort
    file = None if state is None else state / "clients.bin"
    codec = low_rank_codec(client_state_spec(spec), prepared.plan)
    kind, count = choice.kind, choice.workers
    message = with_empty_answers(server_message(prepared.plan, prepared.server, 1.0), spec)
    if kind == "ray":
        from fedkeel.engine.ray.engine import Ray

        address, parallel = choice.address, choice.parallel_clients
        return Ray(
            setup,
            spec,
            capacity,
            message,
            count,
            address,
            file=file,
            parallel_clients=parallel,
            codec=codec,
        )
    if kind == "vectorized":  # slow to import
        from fedkeel.engine.vectorized.engine import VectorizedTrainer
        from fedkeel.engine.vectorized.side_by_side import trainer_of
        from fedkeel.engine.vectorized.single_process import SingleProcess

        parallel, devices = choice.parallel_clients or 1, choice.devices or [choice.device or "cpu"]
        if count == 1 and not choice.devices:
            runs = (
                choice.parallel_runs or 1 if capacity > 1 else 1
            )  # single clients: no client axis
            varied = tuple(choice.parallel_numbers)
            trainer = trainer_of(setup, parallel, devices[0], runs, varied)
            return SingleProcess(setup, spec, capacity, trainer, file=file, codec=codec)
        return Workers(
            setup,
            spec,
            capacity,
            message,
            count,
            file=file,
            trainer=VectorizedTrainer(setup, parallel),
            codec=codec,
            devices=devices,
        )
    if kind == "sequential" and choice.device == "cuda":
        from fedkeel.engine.vectorized.engine import one_by_one
        from fedkeel.engine.vectorized.single_process import SingleProcess

        trainer = one_by_one(setup, "cuda")
        return SingleProcess(setup, spec, capacity, trainer, file=file, codec=codec)
    if kind == "workers" or count > 1:
        return Workers(setup, spec, capacity, message, count, file=file, codec=codec)
    return Sequential(setup, spec, capacity, file=file, codec=codec)


SERVER_SHARE = 0.25
"""Share of a GPU's free memory that the server may take there, while it makes its next model."""

SERVER_COPIES = 4
"""Models that lie side by side meanwhile: the old one, the sum of the updates, their mean, the new
one. The server's memory counts as often."""


def server_device(prepared: Prepared, engine: TrainingEngine, choice: EngineChoice) -> torch.device:
    """Return where the server's part of a run is done.

    If it can be, that is the GPU on which all clients train: the engine leaves the sums of what
    they send there.
    """
    cpu, server = torch.device("cpu"), prepared.server
    if choice.device != "cuda" or not may_be_on_gpu(prepared):
        return cpu
    from fedkeel.engine.vectorized.single_process import SingleProcess  # slow to import

    if not isinstance(engine, SingleProcess) or not engine.sums_replies:
        return cpu
    needed = SERVER_COPIES * (nbytes(dict(server.params)) + nbytes(dict(server.memory)))
    if needed > SERVER_SHARE * (free_on(engine.device) or 0):
        return cpu
    engine.keep_sums_on_device()
    return engine.device


def may_be_on_gpu(prepared: Prepared) -> bool:
    """Return whether the server needs nothing from clients but sums, and bears tensors on a GPU.

    A user's part may make tensors on the processor.
    """
    plan = prepared.plan
    if prepared.is_baseline:
        return False
    if any(feature.on_processor for feature in features_of(prepared).values()):
        return False
    if user_modules(plan.parts) or plan.surveys or plan.policy:
        return False
    if traits_of(plan.reduction).hides_updates:
        return False
    return plan.needs_only_update_sum and {p.name for p in plan.uploads} <= plan.sum_only_uploads


@contextmanager
def state_folder(
    prepared: Prepared, folder: RunFolder | None, resume: bool
) -> Iterator[Path | None]:
    """Give the folder of client state, None where it lives in memory.

    A run that began with its state on disk leaves it there. Without a run folder it is a temporary
    one.
    """
    on_disk = prepared.state == "disk"
    if folder is not None:
        yield folder.state if on_disk or (resume and folder.state.exists()) else None
    elif on_disk:
        with tempfile.TemporaryDirectory(prefix="fedkeel-") as temporary:
            yield Path(temporary)
    else:
        yield None
