"""Which parts of methods go with the user's own training, and what to take for the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from fedkeel.errors import CompositionError
from fedkeel.method.compose import (
    IN_STEPS,
    acts_in_steps,
    expression_of,
    length_hint,
    summary_of,
)
from fedkeel.method.part import Capability, Part
from fedkeel.method.roles import ROLES, ClientOptimiser, FineTuning, LocalModel, Phases


def check_parts(parts: Sequence[Part]) -> None:
    """Refuse parts that act inside a local step, or count on what it does: the user makes it.

    Raises:
        CompositionError: names the part, its role, and the method that is most like it.
    """
    allowed = [part for part in parts if not _counts_on_steps(part)]
    for part in parts:
        if part in allowed:
            continue
        roles = [role for role in IN_STEPS if isinstance(part, role)]
        why = "it divides by a path of plain gradient steps, which your function need not make"
        if roles:
            why = f"its role, {ROLES[roles[0]]}, acts in local steps, which your function makes"
        nearest = expression_of(allowed) if allowed else _nearest(part, roles)
        raise CompositionError(
            f"{part.name} cannot be combined with local training of your own.",
            got=summary_of(part),
            expected="parts that act at the server, on updates, or on what is sent",
            why=why,
            do=f"take {nearest} in its place, or leave out local_training (local.train)",
        )


def _counts_on_steps(part: Part) -> bool:
    return acts_in_steps(part) or Capability.LINEAR_ACCUMULATION in part.needs


def _nearest(part: Part, roles: Sequence[type]) -> str:
    """Return a method like a refused part that can be used with the user's own training.

    Args:
        part: the refused part.
        roles: those of its roles that act in local steps.
    """
    if not roles:
        return f"{part.name}(length='steps')" if length_hint(part) else "fedavg"
    if Capability.NOISE in part.needs:
        return "dpclient"
    in_file = vars(sys.modules[type(part).__module__]).values()
    kinds = (kind for kind in in_file if isinstance(kind, type) and issubclass(kind, Part))
    of_paper = (k for k in kinds if part.paper and getattr(k, "paper", None) == part.paper)
    near = [kind.name for kind in of_paper if not issubclass(kind, IN_STEPS)]
    return next(iter([*near, *(_NEAR[role] for role in roles if role in _NEAR)]), "momentum")


_NEAR: Mapping[type, str] = {
    **dict.fromkeys((Phases, LocalModel, FineTuning), "fedper"),
    ClientOptimiser: "fedadam",
}
"""What is most like a role that acts in local steps, by the role; else the server's momentum."""
