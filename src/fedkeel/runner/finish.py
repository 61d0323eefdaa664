"""The end of a run: its record says how it ended, and its models are written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from fedkeel.method.round_values import Server
from fedkeel.records.client_models import client_files, client_names
from fedkeel.records.folder import BEST_MODEL, MODEL, RunFolder
from fedkeel.records.pictures import PICTURES, Pictures
from fedkeel.records.row_file import ROWS
from fedkeel.records.run_record import BestModel, RunRecord, Status
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
    record: RunRecord, status: Status, message: str, reasons: Sequence[str], best: BestModel | None
) -> RunRecord:
    """Return the record of a run that has ended.

    Args:
        record: the record from before.
        status: what became of the run.
        message: why.
        reasons: why the engine trained clients in a plainer way.
        best: the best model.
    """
    every = list(dict.fromkeys([*record.engine.reasons, *reasons]))
    engine = replace(record.engine, reasons=every)
    return replace(record, status=status, message=message, engine=engine, best_model=best)


def finish(
    result: Result,
    folder: RunFolder | None,
    pictures: Pictures | None = None,
    client_models: Iterable[tuple[int, Tree]] = (),
) -> Result:
    """Write how a run ended; a finished one leaves its models and no more client state.

    Args:
        result: the result.
        folder: the run folder, None of a run in memory.
        pictures: counts of what the last model answers.
        client_models: clients that have models of their own, with these; each is kept in memory
            or written before the next one is taken.

    Returns:
        The result with its record as it was written.

    Raises:
        RunError: the folder cannot be written to.
    """
    record = result.record
    if folder is None:
        files = client_files(client_names(record))
        return replace(result, client_modules={files[k]: module for k, module in client_models})
    if record.status == "finished":
        digests = {ROWS: folder.complete_rows(), **folder.histogram_digest()}
        if pictures is not None:
            digests[PICTURES] = folder.save_pictures(pictures)
        for name, module in ((MODEL, result.module), (BEST_MODEL, result.best_module)):
            if module:
                arrays = {key: tensor.numpy() for key, tensor in module.items()}
                digests[name] = folder.save_model(arrays, name)
        files = client_files(client_names(record))
        for client, module in client_models:
            arrays = {key: tensor.numpy() for key, tensor in module.items()}
            digests[files[client]] = folder.save_model(arrays, files[client])
        record = replace(record, digests=digests)
    if folder.rows_were_restored:
        record = replace(record, warnings=[*record.warnings, _ROWS_RESTORED])
    folder.write_run(record)
    if record.status == "finished":
        shutil.rmtree(folder.state, ignore_errors=True)
    return replace(result, record=record)
