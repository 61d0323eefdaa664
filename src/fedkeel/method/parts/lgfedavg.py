"""LG-FedAvg: each client keeps its own first layers.

Source
    Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global
    Representations, 2020 (key liang2020lgfedavg). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.part import param
from fedkeel.method.parts.fedper import head_or
from fedkeel.method.roles import Personal
from fedkeel.task.parameter_names import ParameterLayout


@dataclass(frozen=True)
class LGFedAvg(Personal):
    r"""Averages the head, and lets each client train a representation of its own.

    .. math::
        \min_{h,\,\theta_1,\dots,\theta_C} \sum_k p_k F_k(\theta_k, h)

    Source: liang2020lgfedavg, Algorithm 1, without its auxiliary losses.

    Args:
        share: what is averaged: comma-separated names of sub-modules or parameters, ``*`` for any
            text; "" for the head.
    Sent: only what is shared.
    State: the other parameters of each client.
    Cost: that of FedAvg.
    Laws: to share all parameters is FedAvg.
    Deviations: the paper evaluates new clients with an ensemble of all local models; here a new
        client has the initial representation.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("lgfedavg(share='fc2')").personals[0].share
        'fc2'
    """

    share: str = param("")

    name: ClassVar[str] = "lgfedavg"
    paper: ClassVar[str] = "liang2020lgfedavg"

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return all parameters but the shared ones."""
        return frozenset(layout.names) - head_or(self.share, layout, self.name)
