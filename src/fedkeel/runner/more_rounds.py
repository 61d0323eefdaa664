"""More rounds for a run that is there: whether it would have begun with the same ones."""

from __future__ import annotations

from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.records.run_record import RunRecord
from fedkeel.runner.prepare import prepare


def is_beginning(record: RunRecord, prepared: Prepared) -> bool:
    """Return whether a recorded run is the one that is prepared, but for fewer rounds.

    Raises:
        RunError: it is, and its rounds would have been others in a longer run; or what the clients
            remember was deleted at its end.
    """
    if record.rounds >= prepared.settings.rounds or prepared.unseen:
        return False
    shorter = prepared.settings.model_copy(update={"rounds": record.rounds})
    earlier = prepare(shorter, prepared.ingredients)
    if earlier.key != record.key:
        return False
    if reason := _why_not(record, earlier, prepared):
        raise RunError(
            f"This run of {record.rounds} rounds cannot go on to {prepared.settings.rounds}.",
            why=reason,
            do="make a new run, in another folder",
        )
    return True


def _why_not(record: RunRecord, earlier: Prepared, prepared: Prepared) -> str:
    before, now = earlier.setup.training, prepared.setup.training
    if now.local.schedule.kind == "cosine":
        return "the learning rate of each round depends on the number of rounds (cosine)"
    if before.local != now.local:
        return "the steps of a round depend on the number of rounds"
    if before.plan.parts != now.plan.parts:
        return "the noise of the privacy budget depends on the number of rounds"
    if record.status == "finished" and prepared.state == "disk":
        return "the clients' state was in a file, which is deleted at the end of a run"
    return ""
