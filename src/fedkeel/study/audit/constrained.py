"""An attacker who knows FedGC's projection: what it hides is one number for each group.

FedGC's paper (fedgc2023, Appendix A.5) says that CGC cannot be undone. The client sends u =
h + v z, where z is the server's last pseudo-gradient. The attacker knows u, and z, which the server
made. So h is unknown only along z, and only where the constraint binds, which <u, z> = C tells.
Matching leaves that component out, and v is what is left of it in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedkeel import tree
from fedkeel.method.compose import Plan
from fedkeel.method.parts.fedgc import CGC
from fedkeel.study.audit.matching import Direction
from fedkeel.study.audit.observation import Observation
from fedkeel.tree import Tree

TOLERANCE = 1e-3
"""Relative difference from C up to which a constraint is taken for one that binds."""


@dataclass(frozen=True)
class Unprojected:
    """What of a client's pseudo-gradient is hidden by CGC.

    Args:
        directions: one for each group on which the constraint binds.
        groups: number of groups.
    """

    directions: tuple[Direction, ...]
    groups: int


def find_cgc(plan: Plan) -> CGC | None:
    """Return the method's projection of updates; None where it has none."""
    return next((part for part in plan.parts if isinstance(part, CGC)), None)


def hidden_by_cgc(part: CGC, seen: Observation) -> Unprojected:
    """Return the directions along which CGC has changed a client's pseudo-gradient.

    Args:
        part: the projection.
        seen: one client's update, and what the server sent.
    """
    last = {k: v.double() for k, v in tree.leaves(seen.broadcast[part.name], "g").items()}
    sent = {k: v.double() / seen.lr for k, v in seen.update.items()}
    groups = tree.group_names(list(sent), part.groups)
    return Unprojected(tuple(_bound(part, sent, last, groups)), len(groups))


def _bound(part: CGC, sent: Tree, last: Tree, groups: list[list[str]]) -> Iterator[Direction]:
    rounding = (32 * torch.finfo(torch.float32).eps) ** 2 * float(tree.dot(last, last))
    for names in groups:
        z = {k: last[k] for k in names}
        u = {k: sent[k] for k in names}
        size = float(tree.dot(z, z))
        if size <= rounding:
            continue
        inner = float(tree.dot(u, z))
        scale = max(part.margin, 1e-3 * (size * float(tree.dot(u, u))) ** 0.5)
        if abs(inner - part.margin) <= TOLERANCE * scale:
            yield Direction(tuple(names), tree.scale(z, size**-0.5))


def multipliers(hidden: Unprojected, target: Tree, gradient: Tree) -> list[float]:
    """Return, for each direction, how far the projection moved along it: v |z|.

    Args:
        hidden: the directions.
        target: the gradient that was seen: minus u.
        gradient: that of the inputs that were found: minus h.
    """
    difference = tree.sub(gradient, target)
    return [
        float(sum((difference[k] * d.vector[k]).sum() for k in d.names)) for d in hidden.directions
    ]
