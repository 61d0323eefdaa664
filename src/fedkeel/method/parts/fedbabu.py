"""FedBABU: train the base with a head that never moves; fine-tune at each client at the end.

Source
    Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022
    (key oh2022fedbabu). Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedkeel.config import Local
from fedkeel.method.part import param
from fedkeel.method.parts.fedper import head_or
from fedkeel.method.parts.finetune import plain_training
from fedkeel.method.roles import FineTuning, Personal, Phases
from fedkeel.task.parameter_names import ParameterLayout


@dataclass(frozen=True)
class FedBABU(Personal, Phases, FineTuning):
    r"""Averages the base under the initial head, and fine-tunes base and head for an evaluation.

    Source: oh2022fedbabu, Algorithm 1; fine-tuning of section 5.

    Args:
        head: what is not trained: comma-separated names of sub-modules or parameters, ``*`` for any
            text; "" for the head.
        epochs: passes over a client's training examples before it is evaluated, >= 1.
    Sent: only the base.
    State: none that changes.
    Cost: that of FedAvg, and `epochs` of training at every client whenever clients are evaluated.
    Laws: the head of the global model is the initial one.
    Deviations: PFLlib fine-tunes each client's last local model; here, as in the paper, it is the
        global model.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedbabu").fine_tuning.epochs
        5
    """

    head: str = param("")
    epochs: int = param(5, ge=1)

    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = "oh2022fedbabu"

    def personal(self, layout: ParameterLayout) -> frozenset[str]:
        """Return the parameters of the head, which need not be sent."""
        return head_or(self.head, layout, self.name)

    def phases(self, layout: ParameterLayout, personal: frozenset[str]) -> Sequence[frozenset[str]]:
        """Return one phase, which trains the base."""
        return [frozenset(layout.names) - personal]

    def phase(self, step: int, steps: int, round: int) -> int:
        """Return 0."""
        return 0

    def fine_tuning(self, local: Local) -> Local:
        """Return the settings of so many epochs."""
        return plain_training(local, self.epochs, None, 0.0)
