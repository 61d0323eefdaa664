"""FedSOL: local gradients where the received model's knowledge is least disturbed.

Source
    Lee et al., FedSOL: Stabilized Orthogonal Learning with Proximal Restrictions in Federated
    Learning, CVPR 2024 (key lee2024fedsol). Section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import GradientRule
from fedkeel.task.batch import Output
from fedkeel.tree import Tree

ROUNDING = 64.0
"""Probabilities that differ by no more than this many units of their rounding count as equal."""


@dataclass(frozen=True)
class FedSOL(GradientRule):
    r"""Takes the gradient where the local model has moved away from the received one's outputs.

    .. math::
        g &= \nabla\,\mathrm{KL}\bigl(\mathrm{softmax}(z^t/T)\,\big\|\,\mathrm{softmax}(z/T)\bigr),
        \qquad e = \rho\,\frac{g}{\lVert g\rVert}\odot a \\
        g &\leftarrow \nabla f(\theta + e)

    on the same mini-batch, where z are the local model's scores and z^t those of the received one.
    The adaptive a is abs(theta - theta^t), normalised along the first axis of each tensor; the
    fixed one is 1.

    Source: lee2024fedsol, section 4; the public code for a.

    Args:
        rho: length of the perturbation, >= 0, in units of the parameters; 1 in the public code.
        adaptive: whether parameters are moved in proportion to how far they are from the received
            ones.
        temperature: T, > 0; 3 in the public code.
    Sent: nothing beyond the model.
    State: none.
    Cost: two gradients and a forward pass of the received model for each step.
    Laws: rho = 0 is FedAvg, bit for bit; so is a first step, in which theta = theta^t, of a network
        that is the same in training and in evaluation. The fixed perturbation has length rho
        wherever the outputs differ.
    Deviations: in a first step g is only rounding error, which the public code's fixed variant
        scales to a random perturbation of length rho. Here probabilities that differ by rounding
        count as equal; where all are equal there is no perturbation. The public code divides by the
        norm + 1e-12; here nothing is added. The divergence is not multiplied by T^2; only its
        direction counts. The public code can leave the classifier or
        the body unperturbed; its shipped settings perturb both. The loss that is recorded, and the
        batch statistics, are those of the perturbed model.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedsol(rho=2.0, adaptive=False)").gradient_rule.rho
        2.0
    """

    rho: float = param(1.0, ge=0.0)
    adaptive: bool = True
    temperature: float = param(3.0, gt=0.0)

    name: ClassVar[str] = "fedsol"
    paper: ClassVar[str] = "lee2024fedsol"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.CLASSES})
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the gradient at the perturbed model."""
        away = self._slope(params, step)
        length = tree.factor_to(self.rho, away)
        if not self.adaptive:
            return step.grad(tree.add(params, away, length))

        def moved(w: Tensor, away: Tensor, start: Tensor) -> Tensor:
            return w + away * _shares(w - start, length)

        return step.grad(tree.map(moved, params, away, step.start))

    def _slope(self, params: Tree, step: Step) -> Tree:
        """Return the gradient of the divergence, exactly 0 where the models agree to rounding.

        By the scores it is a difference of probabilities. So the scores are multiplied with that
        difference as with a constant, which has the same gradient.
        """
        theirs = torch.softmax(step.teacher().logits / self.temperature, dim=1)
        rounding = ROUNDING * torch.finfo(theirs.dtype).eps

        def pushed(output: Output) -> Tensor:
            ours = torch.softmax(output.logits.detach() / self.temperature, dim=1)
            apart = ours - theirs
            significant = apart.abs() > rounding * torch.maximum(ours, theirs)
            apart = torch.where(significant, apart, 0.0) / self.temperature
            return (apart * output.logits).sum(dim=1)

        return step.grad_of(params, pushed)


def _shares(moved: Tensor, length: Tensor) -> Tensor:
    """Return the absolute values, of this length along the first axis; 0 where nothing has moved.

    Args:
        moved: [a, ...] by how much each entry has moved.
        length: [] which their norm along the first axis is to have.
    """
    size = torch.linalg.vector_norm(moved, dim=0, keepdim=True)
    return moved.abs() * torch.where(size > 0.0, length / size, 0.0)
