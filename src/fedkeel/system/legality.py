"""What does not go with a server that does not wait, or with clients that time leaves out."""

from __future__ import annotations

from fedkeel.config import Run
from fedkeel.errors import ConfigError
from fedkeel.method.compose import Plan
from fedkeel.method.part import traits_of


def check_system(settings: Run, plan: Plan, averages_buffers: bool) -> None:
    """Refuse settings that virtual time or staleness makes wrong.

    Args:
        settings: of the run.
        plan: its method.
        averages_buffers: whether the model has buffers that are averaged.

    Raises:
        ConfigError: with the reason.
    """
    policy = plan.policy
    if policy is None:
        return
    if settings.diagnose.kinds:
        raise ConfigError(
            f"Diagnostics do not go with {policy.name}.",
            got=", ".join(settings.diagnose.kinds),
            why="they compare clients that began a round at one model",
            do="leave out [diagnose]",
        )
    if settings.adversary.kind not in ("none", "label_flip"):
        raise ConfigError(
            f"Attacks on updates do not go with {policy.name}.",
            got=f"adversary.kind = {settings.adversary.kind!r}",
            why="they are made of the updates of a round, which begin at one model",
            do="leave out [adversary]",
        )
    if averages_buffers and traits_of(policy).updates_from_present:
        raise ConfigError(
            f"{policy.name} does not go with buffers that are averaged.",
            why="it mixes parameters, and a client's running statistics would replace the server's",
            do="use fedbuff, keep them local (model.buffers = 'local'), or replace batch "
            "normalisation: fedkeel.replace_batch_norm(module)",
        )


def refuse_on_nodes(settings: Run) -> None:
    """Refuse what only a simulation has: virtual time, cohorts by losses, and clients' own models.

    Raises:
        ConfigError: with what to do.
    """
    if settings.cohort.by_losses:
        raise ConfigError(
            f"cohort.sampling = {settings.cohort.sampling!r} is for simulations.",
            why="the cohorts of nodes depend on the seed alone, so that each node can tell what a "
            "run is going to ask of it",
            do="set cohort.sampling = 'uniform'",
        )
    if settings.system is not None:
        raise ConfigError(
            "Virtual time is for simulations: nodes take the time that they take.",
            got="[system]",
            do="drop it; flower.enough and flower.deadline_seconds say how long a round waits",
        )
    if settings.engine.client_models == "all":
        raise ConfigError(
            "The clients' own models cannot be kept in a federation of nodes.",
            got='engine.client_models = "all"',
            why="what a client keeps never leaves its node",
            do="drop it",
        )
