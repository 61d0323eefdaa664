"""Ditto: each client trains a model of its own, which is drawn to the global one.

Source
    Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021 (key
    li2021ditto). Algorithm 1, Eq. (Ditto).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Step
from fedkeel.method.part import param
from fedkeel.method.roles import LocalModel
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import Tree


@dataclass(frozen=True)
class Ditto(LocalModel):
    r"""Trains a personal model beside the one that is sent, with a proximal term.

    .. math::
        v_k \leftarrow v_k - \eta\bigl(\nabla F_k(v_k) + \lambda (v_k - \theta^t)\bigr)

    Source: li2021ditto, Algorithm 1.

    Args:
        lam: lambda, weight of the proximal term, >= 0, in units of 1 / learning rate. The paper
            chooses from {0.05, 0.1, 0.2, 1, 2}.
    Sent: nothing beyond the model.
    State: the personal model of each client.
    Cost: a second gradient for each step.
    Laws: the global model is that of the method without it, bit for bit. lam = 0 is local training
        on only the client's examples.
    Deviations: both models are trained on the same mini-batches, as many steps each, by the same
        settings; the paper lets their numbers differ. v begins at the model that a client receives
        first. Batch normalisation's statistics are those of the model that is sent.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("ditto(lam=0.1)+scaffold").local_model.lam
        0.1
    """

    lam: float = param(0.1, ge=0.0)

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "li2021ditto"

    def init_model(self, start: Tree, layout: ParameterLayout) -> Tree:
        """Return the received model."""
        return dict(start)

    def next_model(
        self, model: Tree, params: Tree, step: Step, descend: Callable[[Tree], Tree]
    ) -> Tree:
        """Return v after a step."""
        grads = step.task_grad(model, step.batch)
        start, lam = step.start, self.lam
        return descend(tree.map(lambda g, v, w: g + lam * (v - w), grads, model, start))

    def personal_model(self, model: Tree, params: Tree) -> Tree:
        """Return v."""
        return model
