"""Bytes that a run sends and keeps, and whether they fit into memory and on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeel import config
from fedkeel.base.dispatch import OperationMode
from fedkeel.base.memory import format_bytes, free_memory
from fedkeel.base.values import Values, rows_of
from fedkeel.engine.choose.evaluation import evaluation_memory
from fedkeel.engine.message_state import bytes_to_client
from fedkeel.engine.prepared import Prepared, StatePlace
from fedkeel.engine.rehearsal import SURVEY_PREFIX, client_state_spec, with_empty_answers
from fedkeel.engine.spec import TensorSpec
from fedkeel.engine.store.layout import RowLayout, row_layout
from fedkeel.engine.vectorized.low_rank import low_rank_codec
from fedkeel.errors import RunError
from fedkeel.method.compose import Plan
from fedkeel.method.context import Population
from fedkeel.method.server_memory import initial_memory
from fedkeel.method.server_round import server_message
from fedkeel.records.folder import RunFolder
from fedkeel.records.run_record import Estimate
from fedkeel.task.network import Network
from fedkeel.tree import Tree, nbytes

COMFORTABLE_BYTES = 10**9
"""By default at most so many bytes of client state are kept in memory, because each checkpoint
writes them all. A larger server state is computed before it is allocated."""

SMALL_BYTES = 50_000_000
"""Bytes of one model for each client below which a server's memory is not measured beforehand."""


EVALUATION_BYTES, EVALUATION_BATCH = 2**29, 1000
"""Bytes of what lies between the layers in one forward pass of an evaluation, and its examples, at
most."""


def evaluation_batch(network: Network, x: Values) -> int:
    """Return how many examples an evaluation takes at once.

    It depends on the model and the form of its inputs, so that results repeat anywhere.

    Args:
        network: the model.
        x: [B, ...] a few inputs.
    """
    if network.batch_statistics:  # the batch decides the statistics
        return EVALUATION_BATCH

    def total(count: int) -> int:
        counter = _OutputBytes()
        with torch.no_grad(), torch.random.fork_rng(devices=[]), counter:
            network.test_output(network.params, network.buffers, rows_of(x, [0] * count))
        return counter.total

    try:
        size = total(3) - total(2)  # without what is made only of the parameters
    except Exception:  # a user's model that fails while its outputs are counted
        return EVALUATION_BATCH
    return max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // max(1, size)))


class _OutputBytes(OperationMode):
    """Adds up the bytes of what operations return, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Count an output, and return it."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.total += out.nbytes
        return out


def estimate_run(prepared: Prepared) -> Estimate:
    """Return what a run will send and keep, from its first message and a rehearsed reply."""
    spec, server, population = prepared.spec, prepared.server, prepared.population
    rounds, cohort = prepared.settings.rounds, prepared.population.per_round
    message = with_empty_answers(server_message(prepared.plan, server, 1.0), spec)
    down = bytes_to_client(message, prepared.plan)
    update = 0 if prepared.plan.codec else _bytes(spec, "update/")
    up = {"model": update + _bytes(spec, "buffers/")}
    for path in spec:
        if path.startswith(("uploads/", SURVEY_PREFIX)):
            part = path.split("/")[1]
            up[part] = _bytes(spec, f"uploads/{part}/") + _bytes(spec, f"{SURVEY_PREFIX}{part}/")
    # each client's row, its row of the last checkpoint if that differs, and rows being written
    rows = min(2 * population.clients + cohort, cohort * rounds)
    return Estimate(
        down={} if prepared.is_baseline else down,
        up={} if prepared.is_baseline else up,
        client_state=_mean_kept(prepared, lambda kept: sum(t.nbytes for t in kept.values())),
        clients=min(population.clients, cohort * rounds),
        table=_bytes(prepared.table, ""),
        server_state=nbytes(dict(server.memory)),
        state=prepared.state,
        disk=rows * _row_bytes(prepared) if prepared.state == "disk" else 0,
        evaluation=sum(evaluation_memory(prepared.setup).values()),
    )


def _bytes(spec: Mapping[str, TensorSpec], prefix: str) -> int:
    return sum(item.nbytes for path, item in spec.items() if path.startswith(prefix))


def _row_bytes(prepared: Prepared) -> int:
    """Return the bytes of a client's row in the files, its own and the server's."""
    codec = low_rank_codec(client_state_spec(prepared.spec), prepared.plan)
    row = _mean_kept(prepared, lambda kept: row_layout(kept, codec).nbytes)
    return row + RowLayout(prepared.table).nbytes


def _mean_kept(prepared: Prepared, size: Callable[[Mapping[str, TensorSpec]], int]) -> int:
    """Return a size of what a client keeps: of the mean client where networks differ."""
    own, others = size(client_state_spec(prepared.spec)), prepared.setup.others
    if others is None:
        return own
    sizes = np.array([own, *map(size, others.kept)])
    return int(np.ceil(sizes[others.of_client].mean()))


def choose_place(prepared: Prepared) -> StatePlace:
    """Return where client state lives.

    Whether the disk has enough space depends on the folder: see `check_disk`.

    Raises:
        RunError: the state does not fit into memory.
    """
    estimate, requested = estimate_run(prepared), prepared.settings.engine
    rows, budget = estimate.rows, _budget(requested)
    place: StatePlace = "memory"
    if rows and requested.state == "disk":
        place = "disk"
    elif rows and requested.state == "auto":
        fits = budget is None or estimate.resident <= budget
        is_comfortable = requested.memory_gb is not None or rows <= COMFORTABLE_BYTES
        place = "memory" if fits and is_comfortable else "disk"
    estimate = estimate_run(replace(prepared, state=place))
    if budget is None or estimate.resident <= budget:
        return place
    got, do = f"{format_bytes(estimate.server_state)} at the server", "or raise engine.memory_gb"
    if rows and place == "memory":
        total = format_bytes(estimate.resident)
        got = f"{_describe_rows(prepared)} + {got} = {total}"
        do = "raise engine.memory_gb, or set engine.state = 'disk'"
    raise _too_large(got, budget, do)


def check_server(
    plan: Plan, params: Tree, population: Population, requested: config.Engine
) -> None:
    """Refuse a large server state that does not fit into memory, before it is allocated.

    `choose_place` checks a smaller one, together with what clients keep. The server state of a
    small model is not measured here: PyTorch needs seconds to load what measures it.

    Raises:
        RunError: it does not fit.
    """
    if nbytes(params) * population.clients < SMALL_BYTES:
        return
    shapes = {k: v.to("meta") for k, v in params.items()}  # without memory
    try:
        needed = nbytes(dict(initial_memory(plan, shapes, population)))
    except Exception:  # a part may read values, which tensors on "meta" do not have; where it is
        return  # the part's own error, the start of the run raises it again, with the part's name
    budget = _budget(requested)
    if budget is not None and needed > max(budget, COMFORTABLE_BYTES):
        got = f"{format_bytes(needed)} at the server"
        raise _too_large(got, budget, "or raise engine.memory_gb")


def _budget(requested: config.Engine) -> int | None:
    """Return the bytes that state may take; None where neither user nor system tells."""
    return free_memory() if requested.memory_gb is None else int(requested.memory_gb * 1e9)


def _too_large(got: str, budget: int, do: str) -> RunError:
    return RunError(
        "The state of the clients and the server would not fit into memory.",
        got=got,
        expected=f"at most {format_bytes(budget)}",
        do=f"use fewer clients or rounds, a smaller model, a method without client state, {do}",
    )


def check_disk(prepared: Prepared, folder: Path | None) -> None:
    """Refuse a run whose client state would not fit on the disk, before round 1.

    Args:
        prepared: the run.
        folder: the run folder, which need not exist; None for a run that has none.

    Raises:
        RunError: it does not fit.
    """
    needed = estimate_run(prepared).disk
    target = Path(tempfile.gettempdir()) if folder is None else folder.absolute()
    existing = next(path for path in (target, *target.parents) if os.path.isdir(path))
    free = shutil.disk_usage(existing).free
    if folder is not None and os.path.isdir(folder):  # a resumed run has files there already
        free += sum(_disk_bytes(file) for file in RunFolder(folder).state.glob("*"))
    if needed <= free:
        return
    raise RunError(
        "The state of the clients would not fit on the disk.",
        got=f"{_describe_rows(prepared)}; with what a checkpoint keeps, {format_bytes(needed)}",
        expected=f"at most {format_bytes(free)}, which is free in {existing}",
        do="choose a folder on another disk (--out, in Python out=...), use fewer clients or "
        "rounds, a smaller model, or a method without client state",
    )


def _disk_bytes(file: Path) -> int:
    """Return the bytes that a file takes on the disk, without its holes."""
    status = file.stat()
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size


def _describe_rows(prepared: Prepared) -> str:
    estimate = estimate_run(prepared)
    parts = {path.split("/")[1] for path in prepared.spec if path.startswith("client_state/")}
    parts |= {part.name for part in prepared.plan.tables}
    kept_by = f" (kept by {', '.join(sorted(parts))})" if parts else ""
    row = format_bytes(estimate.client_state + estimate.table)
    return f"{row} x {estimate.clients} clients{kept_by}"
