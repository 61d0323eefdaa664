"""FedBN: each client keeps its own batch normalisation.

Source
    Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR
    2021 (key li2021fedbn). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.roles import Personal, Traits
from fedkeel.task.parameter_names import ParameterLayout


@dataclass(frozen=True)
class FedBN(Personal):
    r"""Averages all but the normalisation layers, which each client has for itself.

    Source: li2021fedbn, Algorithm 1.

    Args:
        parameters: whether scale and shift stay at the client, and not only the running
            statistics.
    Sent: all but the normalisation layers; with parameters = False all parameters.
    State: scale, shift and running statistics of each client.
    Cost: that of FedAvg.
    Laws: a model without normalisation layers is trained as by FedAvg; one without running
        statistics too, with parameters = False.
    Deviations: layers of any normalisation are kept, also group and layer normalisation. The run's
        ``buffers`` are ``local`` whatever the task says.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedbn+scaffold").personals[0].parameters
        True
    """

    parameters: bool = True

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "li2021fedbn"
    traits: ClassVar[Traits] = Traits(keeps_statistics=True)

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return scale and shift of the normalisation layers."""
        return layout.normalisation if self.parameters else frozenset()
