"""Making the record of a round: who took part, what was sent, and the diagnostics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedkeel.data.cohort import Selection
from fedkeel.engine.base import RemoteReport, TrainedCohort
from fedkeel.engine.message_state import bytes_to_client
from fedkeel.method.compose import Plan
from fedkeel.method.context import Message
from fedkeel.method.round_values import RoundResult
from fedkeel.records.rows import RoundRecord

SELECTION, LOSS_BYTES = "selection", 8
"""Name of what choosing the clients of a round costs, and the bytes of a client's loss."""


def round_record(
    cohort: Selection,
    message: Message,
    trained: TrainedCohort,
    result: RoundResult,
    plan: Plan,
    bytes_up: Mapping[str, int] | None,
) -> RoundRecord:
    """Return the record of a round, without scores and seconds.

    Args:
        cohort: the clients that were chosen.
        message: what they received.
        trained: what they replied.
        result: the server after the round.
        plan: the method.
        bytes_up: estimated bytes of a reply, by part; None where nothing is sent either way.
    """
    replied = trained.replies.clients
    is_used = ~np.isin(replied, result.excluded)
    silent = np.setdiff1d(cohort.clients, replied)
    down = bytes_to_client(message, plan)
    traffic = trained.remote or _traffic(down, cohort, len(replied), bytes_up)
    losses = trained.loss[is_used]
    diagnostics = {
        name: float(values[is_used].mean())
        for name, values in trained.diagnostics.items()
        if is_used.any()
    }
    return RoundRecord(
        round=result.server.round,
        lr=message.lr,
        clients=[int(k) for k in replied[is_used]],
        dropped=sorted(int(k) for k in (*cohort.dropped, *silent)),
        excluded=result.excluded,
        examples=int(trained.replies.processed.sum()),
        steps=int(trained.steps.sum()),
        processor_seconds=trained.processor_seconds,
        train_loss=float(losses.mean()) if len(losses) else None,
        bytes_down=traffic.down,
        bytes_up=traffic.up,
        diagnostics={**diagnostics, **result.diagnostics},
        faults=traffic.faults,
    )


def _traffic(
    down: Mapping[str, int], cohort: Selection, replied: int, bytes_up: Mapping[str, int] | None
) -> RemoteReport:
    """Return what was sent, where every client receives and sends the same."""
    if bytes_up is None:
        return RemoteReport(down={}, up={}, faults={}, lost=[])
    selected = len(cohort.clients) + len(cohort.dropped)
    sent = {part: size * selected for part, size in down.items()}
    received = {part: size * replied for part, size in bytes_up.items()}
    if cohort.candidates is not None:  # the others have the model too, and all have sent a loss
        sent[SELECTION] = sum(down.values()) * (len(cohort.candidates) - selected)
        received[SELECTION] = LOSS_BYTES * len(cohort.candidates)
    return RemoteReport(
        down=sent,
        up=received,
        faults={},
        lost=[],
    )
