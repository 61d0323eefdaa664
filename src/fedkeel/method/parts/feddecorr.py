"""FedDecorr: keep the features of a batch uncorrelated.

Source
    Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
    Learning, ICLR 2023 (key shi2023feddecorr). Section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from fedkeel.base.lazy import Tensor
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import LossTerm
from fedkeel.task.batch import Output
from fedkeel.tree import Tree

EPS = 1e-8
"""Added to variances that divide, as the public code does."""


@dataclass(frozen=True)
class FedDecorr(LossTerm):
    r"""Adds the mean squared correlation between different features of a batch.

    .. math:: \frac{\beta}{B}\cdot\frac{1}{F(F-1)}\sum_{i\ne j} (Z^\top Z)_{ij}^2

    where Z [B, F] are the inputs of the classifier, each feature standardised over the batch.

    Source: shi2023feddecorr, section 4, the regularisation term; its scale is the public code's.

    Args:
        beta: weight of the term, >= 0; 0.1 in the paper. Other public codes have 0.01 (FedACG) and
            0.001 (GC-Fed).
        scale: ``code``, as above: B times the mean squared correlation; or ``paper``: the squared
            Frobenius norm of the correlation matrix over F^2. Features are standardised with their
            unbiased variance, as in the public code, and the products divided by B: so both are
            ((B - 1)/B)^2 times that.
    Sent: nothing beyond the model.
    State: none.
    Cost: products of B x B features for each step.
    Laws: beta = 0 is FedAvg, bit for bit. Shifting a feature, or multiplying it by a number, does
        not change the term. A batch of one example has none.
    Deviations: the diagonal of the correlation matrix, which is constant, is left out of both
        scales. GC-Fed's CNN passes the flattened map of its last convolution as features; here they
        are what the head takes.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("feddecorr(beta=0.01)").objective.terms[0].scale
        'code'
    """

    beta: float = param(0.1, ge=0.0)
    scale: Literal["code", "paper"] = "code"

    name: ClassVar[str] = "feddecorr"
    paper: ClassVar[str] = "shi2023feddecorr"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.FEATURES})
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.EXAMPLE_LOSSES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted term of the batch, []."""
        z = cast(Tensor, output.features)  # FEATURES
        weight = step.batch.weight
        real = z.new_ones(len(z)) if weight is None else weight  # [B]
        count, rows = real.sum(), real[:, None]
        centred = rows * (z - (rows * z).sum(dim=0) / count)
        variance = centred.square().sum(dim=0) / (count - 1.0).clamp(min=1.0)
        standard = centred / (variance + EPS).sqrt()
        # the squared entries of Z'Z and of ZZ' have the same sum
        every = (standard @ standard.T).square().sum()
        diagonal = standard.square().sum(dim=0).square().sum()
        features = z.shape[1]
        if self.scale == "code":
            return self.beta * (every - diagonal) / (max(features * (features - 1), 1) * count)
        return self.beta * (every - diagonal) / (features**2 * count**2)
