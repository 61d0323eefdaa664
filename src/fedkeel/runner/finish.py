"""The end of a run: its record says how it ended, and its models are written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

from fedkeel.records.folder import BEST_MODEL, MODEL, RunFolder
from fedkeel.records.run_record import BestModel, RunRecord, Status
from fedkeel.runner.result import Result


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


def finish(result: Result, folder: RunFolder | None) -> None:
    """Write how a run ended; a finished one leaves its models and no more client state.

    Raises:
        RunError: the folder cannot be written to.
    """
    if folder is None:
        return
    is_finished = result.record.status == "finished"
    for name, module in ((MODEL, result.module), (BEST_MODEL, result.best_module)):
        if is_finished and module is not None:
            folder.save_model({key: tensor.numpy() for key, tensor in module.items()}, name)
    folder.write_run(result.record)
    if is_finished:
        shutil.rmtree(folder.state, ignore_errors=True)
