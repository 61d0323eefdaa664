"""Gradient clipping: no local gradient is longer than a bound.

Source
    Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, ICML 2013
    (key pascanu2013). Algorithm 1.
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
class Clip(GradientTransform):
    r"""Shortens each local gradient to a norm of at most c, over the whole model.

    .. math:: g \leftarrow \min(1,\; c / \lVert g\rVert)\; g

    Source: pascanu2013, Algorithm 1.

    Args:
        norm: c, the largest norm allowed, > 0, in units of the gradient. FedDyn, FedMLB and FedACG
            are run with 10 in their public codes.
    Sent: nothing beyond the model.
    State: none.
    Cost: two passes over the gradient for each step.
    Laws: keeps the direction; idempotent; a bound above every norm is FedAvg, bit for bit. With it,
        a penalty (FedProx, FedDyn) no longer shortens the path that FedNova and SCAFFOLD divide by,
        also where the bound is not reached, because the effect of clipping on the path is not
        computed.
    Deviations: it acts last, after penalties, corrections and projections, and before weight decay
        and momentum. FedDyn's public code clips its linear term too, but not its proximal term,
        which is weight decay there. Nothing is added to the norm before dividing.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("feddyn+clip(norm=5.0)").expression
        'feddyn+clip(norm=5.0)'
    """

    norm: float = param(10.0, gt=0.0)

    name: ClassVar[str] = "clip"
    paper: ClassVar[str] = "pascanu2013"
    gradient_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return the gradient, shortened where it is too long."""
        return tree.clip(grads, self.norm)
