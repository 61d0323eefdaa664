"""FedExP: a longer server step where the clients' updates point different ways.

Source
    Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR
    2023 (key jhunjhunwala2023fedexp). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Round, RoundCohort
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import AggregateTransform, Upload
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedExP(Upload, AggregateTransform):
    r"""Multiplies the mean update by a factor that grows as the clients' updates cancel out.

    .. math::
        \eta_g = \max\Bigl(1,\;
            \frac{\sum_k p_k\lVert\Delta_k\rVert^2}{2\,(\lVert\Delta\rVert^2 + \epsilon)}\Bigr),
        \qquad \Delta \leftarrow \eta_g\Delta

    with Delta the aggregate of the updates Delta_k, and p_k = 1/K.

    Source: jhunjhunwala2023fedexp, Algorithm 1.

    Args:
        eps: epsilon, >= 0, in units of the squared update; the factor is smaller where it is large.
            The paper tunes it for each data set; a public code has 1e-3 for CIFAR and CINIC-10,
            and 0.1 for EMNIST.
    Sent: the squared norm of the update up, one number.
    State: none.
    Cost: one pass over the parameters for each client and round.
    Laws: the factor is at least 1, and 1 where the updates are equal: a single client trains as in
        FedAvg, bit for bit. With K orthogonal updates of one length and eps = 0 it is K / 2. Where
        clients project the model onto affine sets that meet, a step with a factor above 1 brings
        the squared distance to any common point down by 3/4 of
        (sum p_k |Delta_k|^2)^2 / |Delta|^2.
    Deviations: the paper reports the mean of the last two models as its result; here the model is
        the last one. Its public code weighs clients by their examples (`weights = "examples"`),
        multiplies eps by K and lets it fall with the square of the learning rate. Norms are those
        of the updates before a codec or a cohort transform changes them. The norm of a single
        client counts in full, also beside a robust reduction.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold+fedexp(eps=0.01)").expression
        'scaffold+fedexp(eps=0.01)'
    """

    eps: float = param(1e-3, ge=0.0)

    name: ClassVar[str] = "fedexp"
    paper: ClassVar[str] = "jhunjhunwala2023fedexp"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WHOLE_UPDATES})
    traits: ClassVar[Traits] = Traits(needs_only_sum=True)

    def upload(self, round: Round) -> State:
        """Return the squared norm of the update."""
        return {"norm2": tree.dot(round.update, round.update)}

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the aggregate times the factor."""
        norms2 = tree.leaf(cohort.uploads, "norm2").double().cpu()  # [K], or [G] sums
        weights = torch.from_numpy(cohort.weights)
        if len(norms2) == len(weights):
            mean = float((weights * norms2).sum())
        else:  # only sums are kept where clients count equally
            mean = float(norms2.sum()) / len(weights)
        length2 = sum(float(v.double().square().sum()) for v in update.values())
        below = 2.0 * (length2 + self.eps)
        factor = max(1.0, mean / below) if below > 0.0 else 1.0
        cohort.log("factor", factor)
        return tree.scale(update, factor)
