"""What does not go with a server that does not wait."""

from __future__ import annotations

from fedkeel.engine.prepared import Draft
from fedkeel.errors import ConfigError
from fedkeel.method.part import traits_of


def check_policy(draft: Draft) -> None:
    """Refuse what does not go with a server that does not wait.

    Raises:
        ConfigError: with the reason.
    """
    training = draft.training
    policy = training.plan.policy
    if policy is None:
        return
    has_buffers = training.buffers == "average" and bool(training.network.buffers)
    if has_buffers and traits_of(policy).updates_from_present:
        raise ConfigError(
            f"{policy.name} does not go with buffers that are averaged.",
            why="it mixes parameters, and a client's running statistics would replace the server's",
            do="use fedbuff, keep them local (model.buffers = 'local'), or replace batch "
            "normalisation: fedkeel.replace_batch_norm(module)",
        )
