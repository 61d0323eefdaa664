"""DP-SGD: local steps with a bound on the influence of each example, and with noise.

Source
    Abadi et al., Deep Learning with Differential Privacy, CCS 2016 (key abadi2016). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import GradientRule
from fedkeel.tree import Tree


@dataclass(frozen=True)
class DPSGD(GradientRule):
    r"""Clips the gradient of each example and adds Gaussian noise to their sum.

    .. math:: g \leftarrow \frac1B\Bigl(\sum_{b=1}^B \min\bigl(1,\, c/\lVert g_b\rVert\bigr)\, g_b
        + \sigma c\, z\Bigr), \qquad z \sim \mathcal N(0, I)

    with norms over the whole model and fresh noise in every step.

    Source: abadi2016, Algorithm 1. FedReg's Table 4 compares with it at c = 1 and sigma from 0.001
        to 0.05.

    Args:
        norm: c, the largest norm allowed, > 0, in units of the gradient.
        sigma: size of the noise, >= 0, in units of c.
        clipped: what is clipped to the norm c: the gradient of each ``example`` (the paper), or the
            mean gradient of the ``batch``, which does not bound the influence of one example.
        noise_on: what the noise is added to: the ``sum`` of the gradients (the paper), or their
            ``mean``, which is B times as much.
    Sent: nothing beyond the model.
    State: none.
    Cost: one gradient for each example: B models in memory at once.
    Laws: without noise, a bound above every norm is FedAvg up to rounding; replacing one example
        moves g by 2 c / B at most, with clipped = ``batch`` by 2 c. Without noise
        and penalties g is no longer than c. The noise in g is sigma c z / B, with noise_on =
        ``mean`` sigma c z.
    Deviations: without the setting `privacy` nothing is accounted for, and noise as small as
        FedReg's gives no useful privacy. The paper draws each example with a fixed probability and
        divides by the expected number, as here with local.sampling = ``poisson``; other batches are
        those of any method, and B is the number of examples in each. Penalties are added to g as
        they are. What other parts compute or send of the data (Mime's gradients,
        say) is neither clipped nor noisy. The noise of a run can be computed from its seed.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("dpsgd(norm=1.0, sigma=0.05)+fedprox").gradient_rule.sigma
        0.05
    """

    norm: float = param(1.0, gt=0.0)
    sigma: float = param(0.01, ge=0.0)
    clipped: Literal["example", "batch"] = "example"
    noise_on: Literal["sum", "mean"] = "sum"

    name: ClassVar[str] = "dpsgd"
    paper: ClassVar[str] = "abadi2016"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.EXAMPLE_LOSSES, Capability.NOISE}
    )

    def gradient(self, params: Tree, step: Step) -> Tree:
        """Return the mean of the clipped gradients, with noise, and the penalties' gradients."""
        examples = step.example_grads(params)  # [B, ...]
        rows = (g.square().reshape(len(g), g.shape[1:].numel()) for g in examples.values())
        squares = torch.stack([row.sum(1) for row in rows])
        lengths = squares.sum(dim=0).sqrt()  # [B]
        weight = step.batch.weight
        real = torch.ones_like(lengths) if weight is None else weight.to(lengths.dtype)
        count = real.sum() if step.batch.expected is None else step.batch.expected
        if self.clipped == "example":
            real = real * self._factor(lengths)
        grads = tree.map(lambda g: torch.einsum("b,b...->...", real, g) / count, examples)
        if self.clipped == "batch":
            grads = tree.clip(grads, self.norm)
        size = self.sigma * self.norm / (count if self.noise_on == "sum" else 1.0)
        grads = tree.add(grads, step.noise, size)
        for penalty in step.objective.penalties:
            grads = tree.add(grads, penalty.penalty_gradient(params, step.view(penalty.name)))
        return grads

    def _factor(self, lengths: Tensor) -> Tensor:
        """Return what gradients of these lengths are multiplied by."""
        return (self.norm / lengths).clamp(max=1.0)
