"""FedRoD: a generic head for balanced classes, and each client's own head beside it.

Source
    Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification,
    ICLR 2022 (key chen2022fedrod). Section 4, Eq. (5) to (7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import Criterion, LocalModel
from fedkeel.task.losses import cross_entropy
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedRoD(Criterion, LocalModel):
    r"""Trains the model that is sent with a balanced softmax, and a personal head on its scores.

    .. math::
        \ell(z, y) = -\log\frac{n_y^\gamma e^{z_y}}{\sum_c n_c^\gamma e^{z_c}},\qquad
        \text{personal scores } z + h_k(f)

    with n_c the number of the client's examples of class c, and f the features, through which the
    personal head's loss, a plain cross-entropy, sends no gradient.

    Source: chen2022fedrod, Eq. (5) to (7), with a linear personal head.

    Args:
        gamma: exponent of the class counts, >= 0.
    Sent: nothing beyond the model.
    State: the personal head of each client.
    Cost: a second gradient for each step.
    Laws: with gamma = 0 the global model is FedAvg's where each client has examples of all classes.
    Deviations: the heads' parameters are added up, which for a linear head adds their scores. A
        personal head begins at the head that the client receives first, as in PFLlib. The paper's
        hypernetwork is not there. Classes without examples are left out of the sum. FL-bench's
        public code makes one joint step, in which the personal head's loss trains the base too,
        so its personal models are others.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedrod+scaffold").objective.criterion.gamma
        1.0
    """

    gamma: float = param(1.0, ge=0.0)

    name: ClassVar[str] = "fedrod"
    paper: ClassVar[str] = "chen2022fedrod"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.CLASS_COUNTS, Capability.CLASSES, Capability.HEAD, Capability.PLAIN_LOSS}
    )

    def criterion(self, logits: Tensor, step: Step) -> Tensor:
        """Return the balanced softmax loss of each example."""
        counts = step.client_info.class_counts
        counts = F.pad(counts, (0, logits.shape[1] - len(counts)))
        shift = self.gamma * counts.clamp(min=1).to(logits.dtype).log()
        shift = torch.where(counts > 0, shift, -1e4)  # leaves classes without examples out
        return cross_entropy(logits + shift, step.batch.labels)

    def init_model(self, start: Tree, layout: ParameterLayout) -> Tree:
        """Return the head of the received model."""
        return {name: start[name] for name in start if name in layout.head}

    def next_model(
        self, model: Tree, params: Tree, step: Step, descend: Callable[[Tree], Tree]
    ) -> Tree:
        """Return the personal head after a step on the sum of the scores."""
        grads = step.task_grad(self.personal_model(model, params), step.batch)
        return descend(tree.pick(grads, model))

    def personal_model(self, model: Tree, params: Tree) -> Tree:
        """Return the model whose head is the sum of both."""
        return {k: v + model[k] if k in model else v for k, v in params.items()}
