"""FedSA-LoRA: clients share the matrices A of their adapters and keep the matrices B.

Source
    Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning, ICLR 2025 (key
    guo2025fedsalora). Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.method.part import param
from fedkeel.method.roles import Personal
from fedkeel.task.parameter_names import ParameterLayout


@dataclass(frozen=True)
class FedSALoRA(Personal):
    r"""Averages A of each adapter :math:`W_0 + BA`, and lets each client train a B of its own.

    Source: guo2025fedsalora, section 3.

    Args:
        keep: what the names of parameters that stay at the client contain; ``lora_B`` is peft's
            name of B.
    Sent: all trained parameters but B.
    State: B of each client.
    Cost: that of FedAvg.
    Laws: where no name matches it is FedAvg.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedsalora").personals[0].keep
        'lora_B'
    """

    keep: str = param("lora_B")

    name: ClassVar[str] = "fedsalora"
    paper: ClassVar[str] = "guo2025fedsalora"

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return B of each adapter."""
        return frozenset(name for name in layout.names if self.keep in name)
