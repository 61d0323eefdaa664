"""FedUV: scores as spread out, and features as evenly scattered, as those of IID data.

Source
    Son et al., FedUV: Uniformity and Variance for Heterogeneous Federated Learning, CVPR 2024 (key
    son2024feduv). The section on the two regularisers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import LossTerm
from fedkeel.task.batch import Output
from fedkeel.tree import Tree

ROUNDING = 64.0
"""Squared distances below this many units of rounding of the norms count as 0."""


@dataclass(frozen=True)
class FedUV(LossTerm):
    r"""Adds a term for each class's probabilities that vary little, and one for features nearby.

    .. math::
        \frac{\lambda}{Y}\sum_{c} \max\bigl(0,\; Y^{-1/2} - \mathrm{std}(p_c)\bigr)
        + \mu\,\mathop{\mathrm{mean}}_{i<j}\; e^{-d_{ij} / m}, \qquad
        d_{ij} = \lVert z_i - z_j\rVert^2

    where p_c are the probabilities of class c in the batch, with their unbiased standard deviation,
    z the inputs of the classifier, and m the median of the d_ij that are not 0: the lower one of
    the two in the middle.

    Source: son2024feduv, the section on the regularisers of variance and of uniformity; their
        scales, and m, are the public code's.

    Args:
        lam: lambda, weight of the variance, >= 0. 2.5 in the public code.
        mu: weight of the uniformity, >= 0. 0.5 in the public code.
    Sent: nothing beyond the model.
    State: none.
    Cost: products of B x B features and a sort of B (B - 1) / 2 numbers for each step.
    Laws: lam = 0 and mu = 0 is FedAvg, bit for bit. One-hot probabilities of balanced classes have
        no variance term, for three classes or more. Shifting, turning or scaling all features
        changes nothing. A batch of one example has no term.
    Deviations: the public code's standard deviation of one example is not a number. Features that
        agree to rounding have distance 0. Y is the number of scores.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("feduv(mu=0.1)").objective.terms[0].lam
        2.5
    """

    lam: float = param(2.5, ge=0.0)
    mu: float = param(0.5, ge=0.0)

    name: ClassVar[str] = "feduv"
    paper: ClassVar[str] = "son2024feduv"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.FEATURES, Capability.CLASSES})
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.EXAMPLE_LOSSES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted terms of the batch, []."""
        real = step.batch.real(output.logits.dtype)  # [B]
        features = cast(Tensor, output.features)  # FEATURES
        spread = narrowness(torch.softmax(output.logits, dim=1), real)
        return self.lam * spread + self.mu * closeness(features, real)


def narrowness(shares: Tensor, real: Tensor) -> Tensor:
    """Return [] the mean over the classes of what the standard deviation lacks of Y^(-1/2).

    Args:
        shares: [B, Y] probabilities.
        real: [B] 1 for a real example, 0 for padding.
    """
    count, rows = real.sum(), real[:, None]
    centred = rows * (shares - (rows * shares).sum(dim=0) / count)
    variance = centred.square().sum(dim=0) / (count - 1.0).clamp(min=1.0)
    varies = variance > 0.0  # elsewhere a square root has no gradient
    deviation = torch.where(varies, torch.where(varies, variance, 1.0).sqrt(), 0.0)
    lacking = (shares.shape[1] ** -0.5 - deviation).clamp(min=0.0).mean()
    return torch.where(count > 1.0, lacking, 0.0)


def closeness(features: Tensor, real: Tensor) -> Tensor:
    """Return [] the mean over the pairs of examples of exp(-d / m).

    Args:
        features: [B, F].
        real: [B] 1 for a real example, 0 for padding.
    """
    count, rows = real.sum(), real[:, None]
    centred = rows * (features - (rows * features).sum(dim=0) / count)
    i, j = torch.triu_indices(len(features), len(features), 1, device=features.device)
    products = centred @ centred.T
    sizes = products.diagonal()
    d = sizes[i] + sizes[j] - 2.0 * products[i, j]
    pairs = real[i] * real[j]
    rounding = ROUNDING * torch.finfo(d.dtype).eps
    apart = (pairs > 0.0) & (d > rounding * (sizes[i] + sizes[j]))
    if len(d) == 0:
        return sizes.new_zeros(())
    ordered = torch.where(apart, d, torch.inf).sort().values
    middle = (apart.sum() - 1).clamp(min=0) // 2
    median = torch.where(apart.any(), ordered.gather(0, middle[None])[0], 1.0)
    near = torch.exp(-torch.where(apart, d, 0.0) / median)
    return (pairs * near).sum() / pairs.sum().clamp(min=1.0)
