"""FedSAM: local steps along the gradient at the worst point nearby.

Source
    Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022 (key
    qu2022fedsam), section 4. The step is from Foret et al., Sharpness-Aware Minimization for
    Efficiently Improving Generalization, ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Step
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import GradientRule
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedSAM(GradientRule):
    r"""Takes the gradient a fixed distance uphill of the local model.

    .. math:: g \leftarrow \nabla f\Bigl(\theta +
        \rho\,\frac{\nabla f(\theta)}{\lVert\nabla f(\theta)\rVert}\Bigr)

    with both gradients on the same mini-batch and the norm over the whole model.

    Source: qu2022fedsam, section 4. MoFedSAM of the same paper is `fedcm+fedsam`, whose alpha is
        the paper's beta; FedGAMMA (dai2023fedgamma) is `scaffold+fedsam`. Both have names of their
        own, `mofedsam` and `fedgamma`.

    Args:
        rho: length of the step uphill, >= 0, in units of the parameters. Public codes have 0.05
            (FedDecorr) and 0.5 (FedSOL).
    Sent: nothing beyond the model.
    State: none.
    Cost: two gradients for each step.
    Laws: rho = 0 is FedAvg, bit for bit. On a loss that is linear between the two points the
        gradient is the same; on a quadratic it is longer along the Hessian.
    Deviations: no constant is added to the norm: where the gradient is exactly zero, there is no
        step uphill. Penalties are part of f at both points; weight decay and momentum are not.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedsam(rho=0.1)").gradient_rule.rho
        0.1
    """

    rho: float = param(0.05, ge=0.0)

    name: ClassVar[str] = "fedsam"
    paper: ClassVar[str] = "qu2022fedsam"
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient at the point uphill."""
        uphill = step.grad(params)
        return step.grad(tree.add(params, uphill, tree.factor_to(self.rho, uphill)))
