"""FedNTD: keep the received model's outputs for the classes that are not the true one.

Source
    Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
    NeurIPS 2022 (key lee2022fedntd). Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import LossTerm
from fedkeel.task.batch import Output
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedNTD(LossTerm):
    r"""Distils the received model into the local one, over the classes that are not the true one.

    .. math:: \beta\tau^2\,\mathrm{KL}\bigl(\mathrm{softmax}(z^t_{\ne y}/\tau)\,\big\|\,
        \mathrm{softmax}(z_{\ne y}/\tau)\bigr)

    where z are the local model's scores of an example and z^t those of the received one.

    Source: lee2022fedntd, section 3, the not-true distillation loss.

    Args:
        beta: weight of the term, >= 0; 1 in the paper.
        tau: temperature, > 0; 1 in the paper.
        squared: whether the term is multiplied by tau^2, which keeps its gradient's size at any
            temperature.
    Sent: nothing beyond the model.
    State: none.
    Cost: a forward pass of the received model for each step.
    Laws: beta = 0 is FedAvg, bit for bit; so is a first step, where both models are equal, up to
        rounding, without dropout and batch normalisation. With two classes the term is 0. The
        scores of the true classes have no influence.
    Deviations: the received model is in evaluation mode. One public code (FedACG) mixes 0.7 of
        the cross-entropy with 0.3 of the divergence, without tau^2: that is beta = 3/7 with
        squared = False at 0.7 times the learning rate.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedntd(beta=0.5, tau=3.0)").expression
        'fedntd(beta=0.5, tau=3.0)'
    """

    beta: float = param(1.0, ge=0.0)
    tau: float = param(1.0, gt=0.0)
    squared: bool = True

    name: ClassVar[str] = "fedntd"
    paper: ClassVar[str] = "lee2022fedntd"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.CLASSES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted divergence of each example."""
        y = step.batch.labels
        ours = torch.log_softmax(_others(output.logits, y) / self.tau, dim=1)
        theirs = torch.log_softmax(_others(step.teacher().logits, y) / self.tau, dim=1)
        weight = self.beta * (self.tau**2 if self.squared else 1.0)
        return weight * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim=1)


def _others(logits: Tensor, y: Tensor) -> Tensor:
    """Return [B, Y - 1] scores of the classes that are not the true one, in order."""
    places = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, places + (places >= y[:, None]).long())
