"""The end of a run: its record says how it ended, and its models are written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from fedkeel.engine.base import TrainingEngine
from fedkeel.engine.prepared import Prepared
from fedkeel.method.round_values import Server
from fedkeel.records.folder import MODEL, RunFolder
from fedkeel.records.pictures import PICTURES
from fedkeel.records.row_file import ROWS
from fedkeel.records.run_record import RunRecord, Status
from fedkeel.runner.feature_hooks import Hooks
from fedkeel.runner.pictures import measure_pictures
from fedkeel.runner.result import Result
from fedkeel.tree import Tree

_ROWS_RESTORED = (
    f"{ROWS} was deleted or changed by another during the run, and was written again with all rows"
)


def server_on_processor(server: Server, lenient: bool) -> tuple[Server, bool]:
    """Return the server on the processor, and whether its model is lost.

    It may be after an error of a GPU, which `lenient` lets pass. The model is then NaN.
    """
    try:
        return server.on(torch.device("cpu")), False
    except RuntimeError:
        if not lenient:
            raise
    params = {k: torch.full(t.shape, math.nan, dtype=t.dtype) for k, t in server.params.items()}
    return replace(server, params=params, memory={}), True


def ended(
    record: RunRecord,
    status: Status,
    message: str,
    engine: TrainingEngine | None,
    hooks: Sequence[Hooks],
) -> RunRecord:
    """Return the record of a run that has ended.

    Args:
        record: the record from before.
        status: what became of the run.
        message: why.
        engine: says why it trained clients in a plainer way; None where it did not start.
        hooks: of the run's features.
    """
    record = replace(record, status=status, message=message)
    if engine is not None:
        every = list(dict.fromkeys([*record.engine.reasons, *engine.reasons]))
        warnings = list(dict.fromkeys([*record.warnings, *engine.warnings]))
        choice = replace(record.engine, reasons=every)
        record = replace(record, engine=choice, warnings=warnings)
    for each in hooks:
        record = each.ended(record)
    return record


def finish(
    result: Result,
    folder: RunFolder | None,
    prepared: Prepared,
    server: Server,
    engine: TrainingEngine | None,
    hooks: Sequence[Hooks],
) -> Result:
    """Write how a run ended; a finished one leaves its models and no more client state.

    Args:
        result: the result.
        folder: the run folder, None of a run in memory.
        prepared: the run.
        server: after the last round.
        engine: keeps what clients keep; None after an error.
        hooks: of the run's features.

    Returns:
        The result with its record as it was written.

    Raises:
        RunError: the folder cannot be written to.
    """
    record = result.record
    alive = engine if record.status == "finished" else None
    kept: Iterable[tuple[str, Tree]] = ()
    if alive is not None and record.engine.kind != "flower":  # there they stay on the nodes
        kept = chain.from_iterable(each.models_at_end(alive, server) for each in hooks)
    if folder is None:
        return replace(result, models={**result.models, **dict(kept)})
    if record.status == "finished":
        digests = {ROWS: folder.complete_rows(), **folder.digests_of_inputs()}
        pictures = None
        if alive is not None:
            pictures = measure_pictures(alive, prepared, server, hooks)
        if pictures is not None:
            digests[PICTURES] = folder.save_pictures(pictures)
        final = [(MODEL, result.module)] if result.module else []
        for name, module in chain(final, result.models.items(), kept):
            arrays = {key: tensor.numpy() for key, tensor in module.items()}
            digests[name] = folder.save_model(arrays, name)
        record = replace(record, digests=digests)
    if folder.rows_were_restored:
        record = replace(record, warnings=[*record.warnings, _ROWS_RESTORED])
    folder.write_run(record)
    if record.status == "finished":
        shutil.rmtree(folder.state, ignore_errors=True)
    return replace(result, record=record)
