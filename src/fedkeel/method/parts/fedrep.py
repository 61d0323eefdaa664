"""FedRep: each client trains its own head first, then the common base.

Source
    Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021
    (key collins2021fedrep). Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.part import param
from fedkeel.method.parts.fedper import head_or
from fedkeel.method.roles import Personal, Phases
from fedkeel.task.parameter_names import ParameterLayout


@dataclass(frozen=True)
class FedRep(Personal, Phases):
    r"""Trains the client's own head while the base is fixed, then the base while the head is.

    .. math::
        h_k \leftarrow \arg\min_h F_k(\theta^t, h), \quad
        \theta_k \leftarrow \theta^t - \eta \nabla_\theta F_k(\theta^t, h_k)

    both by local steps, in each round.

    Source: collins2021fedrep, Algorithm 1.

    Args:
        keep: what stays at the client: comma-separated names of sub-modules or parameters, ``*``
            for any text; "" for the head.
        first: share of a round's steps, the first ones, that train what stays at the client, in
            0..1; rounded to whole steps. With h epochs for the head and e for the base, set
            ``local.epochs`` to h + e and this to h / (h + e).
    Sent: only the base.
    State: the head of each client.
    Cost: that of FedAvg: gradients of both are taken in every step.
    Laws: with first = 1 the global model never moves; with first = 0 no head does.
    Deviations: the paper makes one gradient step on the base; here it has the rest of the steps.
        Momentum of a phase rests in the other one.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedrep(first=0.9)").phases.phase(step=8, steps=10, round=0)
        0
    """

    keep: str = param("")
    first: float = param(0.5, ge=0.0, le=1.0)

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "collins2021fedrep"

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters of the head, or those that are named."""
        return head_or(self.keep, layout, self.name)

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return the personal parameters, then the others."""
        return [personal, frozenset(layout.names) - personal]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0 for the first steps, then 1."""
        return int(step >= round_half_up(self.first * steps))


def round_half_up(value: float) -> int:
    """Return the nearest whole number, the upper one of two."""
    return int(value + 0.5)
