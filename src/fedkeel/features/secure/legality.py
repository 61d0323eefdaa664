"""Which methods can be run where the server sees only sums, and why others are refused."""

from __future__ import annotations

from fedkeel.errors import CompositionError, ConfigError
from fedkeel.method.compose import Plan
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability, traits_of

ADAPTIVE_NOISE = "dpquantile"
"""The part that adds noise to a second sum, its count, and only at the server."""

Refusal = tuple[str, str]
"""(the part, the reason)"""


def refusal(plan: Plan) -> Refusal | None:
    """Return which part of a method cannot be run where the server sees only sums, and why.

    >>> import fedkeel
    >>> refusal(fedkeel.parse("scaffold"))
    >>> refusal(fedkeel.parse("fedgh"))
    ('fedgh', "needs single clients' updates at the server")
    """
    if plan.policy is not None:
        return (
            plan.policy.name,
            "takes updates as they come, and a sum needs clients that train at one time",
        )
    for part in plan.parts:
        if Capability.PER_CLIENT_UPDATES in part.needs:
            return part.name, f"needs {Capability.PER_CLIENT_UPDATES.value}"
    single = (
        (plan.tables, "remembers single clients' updates at the server"),
        (plan.cohort_transforms, "changes single clients' updates at the server"),
        (plan.surveys, "asks each client for an answer before training, which is sent as it is"),
        ([plan.codec] if plan.codec else [], "sends updates in a form that cannot be added up"),
    )
    for parts, reason in single:
        for part in parts:
            return part.name, reason
    for part in plan.uploads:
        if not traits_of(part).needs_only_sum:
            return part.name, "sends a further message, and uses that of each client by itself"
        if part.name == ADAPTIVE_NOISE:
            return part.name, "adds noise to a count at the server; dpclient has none there"
    if not plan.needs_only_update_sum:
        return plan.expression, "may use more than the sum of the updates at the server"
    return None


def check_sums(training: ClientTraining, nodes: int | None, clients: int) -> None:
    """Refuse a run that cannot do with sums.

    Args:
        training: what clients do.
        nodes: `flower.secure_minimum`.
        clients: C.

    Raises:
        CompositionError: names the part and the reason.
        ConfigError: no sum can be of so many nodes.
    """
    refuse_single_updates(training.plan)
    if nodes is not None and nodes > clients:
        raise ConfigError(
            "A secure sum cannot be of more nodes than there are clients.",
            got=f"flower.secure_minimum = {nodes}",
            expected=f"at most {clients}",
        )
    if not training.plan.makes_steps and training.plan.weights == "processed":
        raise CompositionError(
            "A secure sum takes no weights by the work that your own training says it did.",
            got="weights = 'processed'",
            why="the server has to know the weights before it gets the sum",
            do="set weights = 'examples' or 'uniform'",
        )
    shared = training.network.buffers if training.buffers == "average" else {}
    of_integers = [name for name, tensor in shared.items() if not tensor.is_floating_point()]
    if of_integers:
        raise CompositionError(
            "Averaged buffers of whole numbers cannot be in a secure sum.",
            got=of_integers[0],
            why="the server takes the largest of each, which no sum tells",
            do="set model.buffers = 'local', or use fedkeel.replace_batch_norm(module)",
        )


def refuse_single_updates(plan: Plan) -> None:
    """Refuse a method that cannot do with sums.

    Raises:
        CompositionError: names the part and the reason.
    """
    refused = refusal(plan)
    if refused is not None:
        part, reason = refused
        raise CompositionError(
            f"{part} cannot be run with secure aggregation.",
            got=plan.expression,
            why=f"it {reason}",
            do="set flower.secure_aggregation = false, or choose a method that needs only sums: "
            "docs/methods/legality.md lists them",
        )
