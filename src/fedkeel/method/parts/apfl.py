"""APFL: each client's model is a mixture of its own and the global one.

Source
    Deng et al., Adaptive Personalized Federated Learning, 2020 (key deng2020apfl). Algorithm 1,
    Eq. (10) and (11).
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

ALPHA = "apfl.alpha"
"""Name of the share of a client's own model, beside its parameters."""


@dataclass(frozen=True)
class APFL(LocalModel):
    r"""Trains v so that its mixture with the local model fits the client.

    .. math::
        \bar v = \alpha v + (1-\alpha) w,\quad
        v \leftarrow v - \eta\,\alpha \nabla F_k(\bar v),\quad
        \alpha \leftarrow \alpha - \eta\,\langle v - w, \nabla F_k(\bar v)\rangle

    Both factors are gradients by v and by alpha of :math:`F_k(\bar v)`; alpha stays within 0..1.

    Source: deng2020apfl, Algorithm 1; Eq. (10) and (11) for alpha.

    Args:
        alpha: share of the client's own model, in 0..1; the first one where it adapts.
        adaptive: whether alpha is trained.
    Sent: nothing beyond the model.
    State: v and alpha of each client.
    Cost: a second gradient for each step.
    Laws: the global model is that of the method without it, bit for bit. With alpha = 0, not
        adaptive, the personal model is the global one.
    Deviations: alpha takes a step with every step of v, by the same optimiser; the paper changes it
        once a round. The personal model mixes v with the global model, in the paper with the
        client's local one. Public codes differ from the paper in other ways: PFLlib trains v
        without the mixture and overwrites it by the mixture; FL-bench mixes scores; fluke gives v
        no gradient.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("apfl(alpha=0.25, adaptive=False)").local_model.alpha
        0.25
    """

    alpha: float = param(0.5, ge=0.0, le=1.0)
    adaptive: bool = True

    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "deng2020apfl"

    def init_model(self, start: Tree, layout: ParameterLayout) -> Tree:
        """Return the received model, and alpha, []."""
        like = next(iter(start.values()))
        return {**start, ALPHA: like.new_tensor(self.alpha)}

    def next_model(
        self, model: Tree, params: Tree, step: Step, descend: Callable[[Tree], Tree]
    ) -> Tree:
        """Return v and alpha after a step."""
        grads = step.task_grad(self._mixture(model, params), step.batch)
        difference = tree.map(lambda p, v: v - p, params, model)
        alpha = model[ALPHA]
        by_v = tree.map(lambda g: alpha * g, grads)
        after = descend({**by_v, ALPHA: tree.dot(difference, grads)})
        return {**after, ALPHA: after[ALPHA].clamp(0.0, 1.0) if self.adaptive else alpha}

    def personal_model(self, model: Tree, params: Tree) -> Tree:
        """Return the mixture with the global model."""
        return self._mixture(model, params)

    def _mixture(self, model: Tree, params: Tree) -> Tree:
        alpha = model[ALPHA]
        return tree.map(lambda w, v: alpha * v + (1.0 - alpha) * w, params, model)
