"""pFedMe: the global model follows the personal ones, each of which stays near it.

Source
    Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020 (key
    dinh2020pfedme). Algorithm 1, Eq. (3) and (7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import GradientRule, LocalModel
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import Tree


@dataclass(frozen=True)
class PFedMe(GradientRule, LocalModel):
    r"""Descends on the Moreau envelope of each client's loss.

    .. math::
        \theta \leftarrow \theta - \eta_p\bigl(\nabla F_k(\theta) + \lambda(\theta - w)\bigr)
        \;(K\ \text{times}),\qquad
        w \leftarrow w - \eta\,\lambda(w - \theta)

    on each mini-batch. The server's step :math:`w^{t+1} = (1-\beta) w^t + \beta\,\bar w` is
    ``+addition(lr=beta)``.

    Source: dinh2020pfedme, Algorithm 1, Eq. (3) and (7).

    Args:
        lam: lambda, weight of the distance to w, > 0, in units of 1 / learning rate. The paper
            has 15.
        inner_lr: eta_p, learning rate of theta, > 0.
        inner_steps: K, steps of theta for each mini-batch, >= 1.
        decay: weight decay of theta, >= 0; PFLlib's code has 0.001.
    Sent: nothing beyond the model.
    State: theta of each client.
    Cost: K gradients for each step.
    Laws: with eta lam = 1, w takes the place of theta. theta of w at a minimum of F_k stays there.
    Deviations: theta begins each round at the received model, as in public codes, and goes on from
        mini-batch to mini-batch. The loss and the terms of other parts act on theta.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("pfedme(lam=15.0)+addition(lr=2.0)").local_model.inner_steps
        5
    """

    lam: float = param(15.0, gt=0.0)
    inner_lr: float = param(0.01, gt=0.0)
    inner_steps: int = param(5, ge=1)
    decay: float = param(0.0, ge=0.0)

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "dinh2020pfedme"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def init_model(self, start: Tree, layout: ParameterLayout) -> Tree:
        """Return the received model."""
        return dict(start)

    def begin_model(self, model: Tree, received: Tree) -> Tree:
        """Return the received model."""
        return dict(received)

    def next_model(
        self, model: Tree, params: Tree, step: Step, descend: Callable[[Tree], Tree]
    ) -> Tree:
        """Return theta after K steps."""
        for _ in range(self.inner_steps):
            grads = step.grad(model)
            model = tree.map(self._descended, model, grads, params)
        return model

    def _descended(self, v: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return v - self.inner_lr * (g + self.lam * (v - w) + self.decay * v)

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return lambda (w - theta), the gradient of the Moreau envelope."""
        return tree.scale(tree.sub(params, step.local_model), self.lam)

    def personal_model(self, model: Tree, params: Tree) -> Tree:
        """Return theta."""
        return model
