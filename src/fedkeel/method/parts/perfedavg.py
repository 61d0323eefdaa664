"""Per-FedAvg: a global model from which one local step leads to a good personal one.

Source
    Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach, NeurIPS 2020 (key
    fallah2020perfedavg). Algorithm 1; FO and HF of section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Local
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.parts.finetune import plain_training
from fedkeel.method.roles import FineTuning, GradientRule
from fedkeel.tree import Tree


@dataclass(frozen=True)
class PerFedAvg(GradientRule, FineTuning):
    r"""Descends on the loss after one step of gradient descent.

    .. math::
        u = \theta - \alpha \nabla F(\theta; D),\quad
        g = \nabla F(u; D')\ \bigl[-\ \alpha\,\tfrac{1}{2\delta}
        (\nabla F(\theta + \delta \nabla F(u;D'); D'')
        - \nabla F(\theta - \delta \nabla F(u;D'); D''))\bigr]
    The bracket, a product with the Hessian, is there where order = ``hessian_free``. D, D' and D''
    are the first, second and last part of the mini-batch, of equal size but for the last ones.

    Source: fallah2020perfedavg, Algorithm 1; section 4 for both approximations.

    Args:
        alpha: learning rate of the inner step, >= 0. The outer one is ``local.lr``.
        order: ``first`` leaves the Hessian out.
        delta: step of the difference quotient, > 0.
    Sent: nothing beyond the model.
    State: none.
    Cost: two gradients on halves of each mini-batch; with the Hessian four on thirds.
    Laws: with alpha = 0 it is FedAvg on the second half of each mini-batch.
    Deviations: the paper draws D, D' and D'' independently. A mini-batch of too few examples for
        its parts uses the last one that has any for the others. The personal model of a client is
        one step of the inner rate on all its training examples. PFLlib's public code takes one
        rate for both steps, leaves a short last mini-batch out, and trains twice in each round.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("perfedavg(alpha=0.05)").gradient_rule.order
        'first'
    """

    alpha: float = param(0.01, ge=0.0)
    order: Literal["first", "hessian_free"] = "first"
    delta: float = param(1e-3, gt=0.0)

    name: ClassVar[str] = "perfedavg"
    paper: ClassVar[str] = "fallah2020perfedavg"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.EXAMPLE_LOSSES})
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient of the loss after the inner step."""
        first, second, *rest = _divided(step, 2 if self.order == "first" else 3)
        inner = tree.add(params, first.grad(params), -self.alpha)
        gradient = second.grad(inner)
        for third in rest:
            above = third.grad(tree.add(params, gradient, self.delta))
            below = third.grad(tree.add(params, gradient, -self.delta))
            scale = -self.alpha / (2.0 * self.delta)
            gradient = tree.add(gradient, tree.sub(above, below), scale)
        return gradient

    def fine_tuning(self, local: Local) -> Local:
        """Return the settings of one step on all examples."""
        settings = plain_training(local, None, 1, self.alpha)
        return settings.model_copy(update={"batch_size": "all", "accumulate": 1})


def _divided(step: Step, parts: int) -> list[Step]:
    """Return steps on the parts of a step's batch: others' examples count as padding.

    So the parts are the same where the batch is padded.
    """
    real = step.batch.real(step.network.dtype)  # [B]
    place, size = real.cumsum(0) - 1.0, (real.sum() / parts).ceil()
    weights: list[Tensor] = []
    for part in range(parts):
        weight = real * ((place >= part * size) & (place < (part + 1) * size))
        weights.append(torch.where(weight.any(), weight, weights[-1]) if weights else weight)
    return [replace(step, batch=replace(step.batch, weight=weight)) for weight in weights]
