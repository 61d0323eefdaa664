"""The refusal of secure aggregation, with the reason."""

from __future__ import annotations

from fedkeel.config import Experiment
from fedkeel.errors import RunError
from fedkeel.method.grammar import parse
from fedkeel.method.part import Capability


def refuse_secure_aggregation(experiment: Experiment) -> None:
    """Refuse an experiment that asks for secure aggregation.

    Raises:
        RunError: secure aggregation was asked for.
    """
    if not experiment.flower.secure_aggregation:
        return
    plan = parse(experiment.method, weights=experiment.weights)
    per_client = [part.name for part in plan.parts if Capability.PER_CLIENT_UPDATES in part.needs]
    uploads = [part.name for part in plan.uploads]
    reason = "this method needs no more than sums"
    if per_client:
        reason = f"{', '.join(per_client)} needs single clients' updates, which it would hide"
    elif uploads or not plan.needs_only_update_sum:
        reason = f"the uploads of {', '.join(uploads) or 'this method'} would have to be summed too"
    raise RunError(
        "Secure aggregation is not available.",
        why="fedkeel does not use Flower's SecAgg+ yet, and has no cryptography of its own; "
        f"{reason}",
        do="set flower.secure_aggregation = false; the server then sees the update of each client",
    )
