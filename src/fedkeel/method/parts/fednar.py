"""FedNAR: gradient and weight decay are shortened together.

Source
    Li et al., FedNAR: Federated Optimization with Normalized Annealing Regularization, NeurIPS 2023
    (key li2023fednar).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Step
from fedkeel.method.part import Stage, Traits, param
from fedkeel.method.roles import GradientTransform
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedNAR(GradientTransform):
    r"""Adds the weight decay to the gradient, and shortens their sum to a norm of at most c.

    .. math:: g \leftarrow \min\Bigl(1,\; \frac{c}{\lVert g + \lambda\theta\rVert}\Bigr)
        (g + \lambda\theta)

    with the norm over the whole model. So the weight decay is weaker where gradients are long.

    Source: li2023fednar, the section on FedNAR: gradient and weight decay are clipped together; as
        its public code has it.

    Args:
        decay: lambda, the weight decay, >= 0. It takes the place of `local.weight_decay`, which
            should be 0: that one is added after the sum is shortened.
        norm: c, the largest norm allowed, > 0, in units of the gradient.
    Sent: nothing beyond the model.
    State: none.
    Cost: three passes over the parameters for each step.
    Laws: decay = 0 is `clip(norm=c)`, bit for bit. With a bound above every norm it is FedAvg with
        a weight decay of lambda. No step of plain gradient descent is longer than c times the
        learning rate.
    Deviations: the paper's title speaks of annealing: the factor of each step weakens the decay. A
        decay that falls from round to round besides, by a schedule, is not here. Weight decay acts
        on all parameters, also on those that no gradient reaches. The public code adds 1e-6 to the
        norm; here nothing is added.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold+fednar(decay=0.1, norm=5.0)").expression
        'scaffold+fednar(decay=0.1, norm=5.0)'
    """

    decay: float = param(0.01, ge=0.0)
    norm: float = param(10.0, gt=0.0)

    name: ClassVar[str] = "fednar"
    paper: ClassVar[str] = "li2023fednar"
    gradient_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return gradient and weight decay, shortened where they are too long together."""
        return tree.clip(tree.add(grads, params, self.decay), self.norm)
