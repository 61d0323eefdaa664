"""Which methods a privacy budget allows, and why others are refused.

A budget counts one noisy sum for each round and client, or for each local step and example. A part
that lets anything else of the data leave a client is refused.
"""

from __future__ import annotations

from fedkeel.engine.prepared import Draft
from fedkeel.errors import CompositionError, ConfigError
from fedkeel.features.root.declaration import RootDeclaration
from fedkeel.method.compose import Plan
from fedkeel.method.part import Capability, Part
from fedkeel.method.roles import (
    Carry,
    ClientOptimiser,
    ClientState,
    GradientTransform,
    LocalStart,
    StepCorrection,
    UpdateTransform,
    Upload,
)
from fedkeel.runner.feature import Feature

CLIENT_PARTS = frozenset({"dpclient", "dpftrl", "dpquantile"})
"""Parts that make a round's noisy sum of clipped updates."""

EXAMPLE_PART = "dpsgd"
"""The part that makes a step's noisy sum of clipped gradients."""

BY_PATH_ALONE = frozenset(
    {
        *("addition", "clip", "fedacg", "fedadam", "fedadagrad", "fedadamw", "fedavgm", "fedcm"),
        *("feddyn", "fedexp", "fedinit", "fedlada", "fedmuon", "fednar", "fednova", "fedprox"),
        *("fedswa", "fedyogi", "gcfed.local", "momentum", "moon", "scaffnew", "scaffold", "topk"),
        *("quantise",),
    }
)
"""Parts whose client half computes only from the local path, which is private already where the
gradients are: they may then send what they like."""


def check_client_level(plan: Plan, has_shared_buffers: bool) -> None:
    """Refuse a method of which a round's noisy sum is not all that leaves a client.

    Args:
        plan: the method, with the part that makes the noisy sum.
        has_shared_buffers: whether the model's buffers are averaged.

    Raises:
        CompositionError: names the part and the reason.
    """
    if plan.weights != "uniform":
        raise CompositionError(
            "A privacy budget of clients needs equal weights.",
            got=f"weights = {plan.weights!r}",
            why="with others, one client can change the sum by more than the bound on its update",
            do="leave out 'weights', or set weights = 'uniform'",
        )
    private = next(part for part in plan.parts if part.name in CLIENT_PARTS)
    refusals = (
        (plan.cohort_transforms, "compares single clients' updates before they are summed"),
        (plan.tables, "keeps single clients' updates at the server, without noise"),
        (plan.surveys, "sends a second message before training, without noise"),
        (
            [part for part in plan.uploads if part is not private],
            "sends a further message, which has neither bound nor noise",
        ),
        ([plan.codec] if plan.codec else [], "may send an update that is longer than the bound"),
    )
    for parts, reason in refusals:
        for part in parts:
            raise _refused(part, reason, "client")
    if has_shared_buffers:
        raise CompositionError(
            "A privacy budget of clients cannot cover averaged buffers.",
            why="running means and variances are sent beside the update, with neither bound nor "
            "noise",
            do="set model.buffers = 'local', or use fedkeel.replace_batch_norm(module)",
        )


def check_example_level(plan: Plan, has_shared_buffers: bool, has_user_transform: bool) -> None:
    """Refuse a method in which examples count beside their clipped gradients.

    Args:
        plan: the method, with `dpsgd`.
        has_shared_buffers: whether the model's buffers are averaged.
        has_user_transform: whether batches pass through a function of the user's.

    Raises:
        CompositionError: names the part and the reason.
    """
    for part in plan.parts:
        if part.name == EXAMPLE_PART:
            if getattr(part, "clipped", "example") != "example":
                raise _refused(part, "clips the gradient of a batch, not of an example", "example")
            continue
        reason = _reads_examples(part, plan)
        if reason:
            raise _refused(part, reason, "example")
    if has_shared_buffers or has_user_transform:
        what = "averaged buffers" if has_shared_buffers else "a transform of whole batches"
        raise CompositionError(
            f"A privacy budget of examples cannot cover {what}.",
            why="an example then counts beside its own clipped gradient",
            do="set model.buffers = 'local'" if has_shared_buffers else "leave out 'augment'",
        )


def _reads_examples(part: Part, plan: Plan) -> str:
    """Return how a part uses examples beside their clipped gradients, "" where it does not."""
    if Capability.CLASS_COUNTS in part.needs:
        return "uses how many examples of each class a client has"
    if part in plan.surveys:
        return "sends a gradient without noise before training"
    if part in plan.preparations:
        return "makes values of all examples of a round before the first step"
    if part in plan.personals or part is plan.local_model:
        return "trains parameters by gradients that are neither clipped nor noisy"
    roles = (
        *(GradientTransform, StepCorrection, Carry, ClientOptimiser),
        *(ClientState, UpdateTransform, Upload, LocalStart),
    )
    if isinstance(part, roles) and part.name not in BY_PATH_ALONE:
        return "may use the examples beside their clipped gradients"
    if part.name not in BY_PATH_ALONE and not type(part).__module__.startswith("fedkeel."):
        return "is a part of one's own, of which it is not known what it uses"
    return ""


def _refused(part: Part, reason: str, unit: str) -> CompositionError:
    return CompositionError(
        f"{part.name} cannot be run with a privacy budget of unit {unit!r}.",
        why=f"it {reason}, and the budget would not cover it",
        do=f"drop {part.name}, or the table [privacy]",
    )


def check_server_examples(draft: Draft) -> None:
    """Refuse a server that trains on examples of the clients', without noise.

    Raises:
        ConfigError: names the part and what to do.
    """
    part = next((p for p in draft.training.plan.parts if Capability.ROOT_EXAMPLES in p.needs), None)
    root = getattr(draft.settings, RootDeclaration.table)
    if part is not None and root is not None and root.examples is not None:
        raise ConfigError(
            f"A privacy budget does not cover the server's examples, which {part.name} needs.",
            got=f"root.examples = {root.examples}, drawn from those of the clients",
            expected="examples that need no protection",
            why="the server trains on them in every round without noise",
            do="name a file with such examples: root.file = 'root.npz'; or drop [privacy]",
        )


def check_participation(draft: Draft) -> None:
    """Refuse runs in which time decides who takes part: the account counts on equal draws.

    Raises:
        ConfigError: with the reason.
    """
    plan, features = draft.training.plan, draft.features
    leaving_out = (item.leaves_out for item in features if isinstance(item, Feature))
    if got := next(filter(None, leaving_out), ""):
        raise ConfigError(
            "A privacy budget does not go with clients that time leaves out.",
            got=got,
            why="the account counts on cohorts that are drawn from all clients alike",
            do="drop these settings, or [privacy]",
        )
    if plan.policy is not None:
        raise ConfigError(
            f"A privacy budget does not go with {plan.policy.name}.",
            why="who replies, and how often, depends on how fast clients are, and the account "
            "counts on cohorts that are drawn alike",
            do=f"drop {plan.policy.name}, or [privacy]",
        )
