"""FedPer: each client keeps its own last layers.

Source
    Arivazhagan et al., Federated Learning with Personalization Layers, 2019 (key
    arivazhagan2019fedper). Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.errors import ModelError
from fedkeel.method.part import param
from fedkeel.method.roles import Personal
from fedkeel.task.parameter_names import ParameterLayout


def head_or(patterns: str, layout: ParameterLayout, part: str) -> frozenset[str]:
    """Return the parameters that are named, and those of the head where none are.

    Raises:
        ModelError: no name fits, or the model has no head.
    """
    if patterns:
        return layout.choose(patterns, part=part)
    if not layout.head:
        raise ModelError(
            f"{part} keeps the head at the client, and the model has none that is known.",
            do="name it: model.head = '...', Task(model, head='...'), or in the method's arguments",
        )
    return layout.head


@dataclass(frozen=True)
class FedPer(Personal):
    r"""Averages the base, and lets each client train a head of its own.

    .. math::
        \min_{\theta,\,h_1,\dots,h_C} \sum_k p_k F_k(\theta, h_k)

    Base and head are trained together, in every local step.

    Source: arivazhagan2019fedper, Algorithms 1 and 2.

    Args:
        keep: what stays at the client: comma-separated names of sub-modules or parameters, ``*``
            for any text; "" for the head.
    Sent: only the base.
    State: the head of each client.
    Cost: that of FedAvg.
    Laws: with one client, and without momentum kept at the server, it is FedAvg. Clients whose
        examples are the same have the same head.
    Deviations: the paper starts each client with its own random head; here all start with that of
        the initial model.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedper(keep='fc2')+gcfed").personals[0].keep
        'fc2'
    """

    keep: str = param("")

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "arivazhagan2019fedper"

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters of the head, or those that are named."""
        return head_or(self.keep, layout, self.name)
