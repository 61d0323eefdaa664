"""FedRCL: pull features of one class together at several levels, but not too close.

Source
    Seo, Kim, Kim and Han, Relaxed Contrastive Learning for Federated Learning, CVPR 2024 (key
    seo2024fedrcl). The sections on the relaxed loss and on its levels. Its contrastive part is that
    of Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, Eq. (2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.base.lazy import Tensor, torch
from fedkeel.errors import CompositionError
from fedkeel.method.context import Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import LossTerm
from fedkeel.task.batch import Output
from fedkeel.tree import Tree


@dataclass(frozen=True)
class FedRCL(LossTerm):
    r"""Adds a contrastive loss of the classes at each level, and a penalty on pairs too similar.

    .. math::
        \frac{\mu}{L}\sum_{l=1}^{L}\Bigl(-\frac{1}{|P_i|}\sum_{j\in P_i}
        \log\frac{e^{s_{ij}/\tau}}{\sum_{k\ne i} e^{s_{ik}/\tau}}
        + \beta\log\Bigl(1 + \sum_{j\in P_i,\; s_{ij} > \lambda} e^{(s_{ij} - 1)/\tau}\Bigr)\Bigr)

    for each example i of a batch, where s_ij is the cosine of the features of i and j at level l,
    and P_i are the other examples of its class.

    Source: seo2024fedrcl, the sections on the relaxed contrastive loss and on its levels.

    Args:
        mu: weight of the term, >= 0. 1 in the public code.
        tau: temperature, > 0. 0.05 in the public code.
        beta: weight of the penalty, >= 0. 1 in the public code.
        lam: lambda, the cosine above which two examples of a class are too similar. 0.7 in the
            public code.
        levels: blocks of the network whose outputs are the features, separated by commas, e.g.
            ``"layer3,layer4"``. "" takes every block before the classifier that has a matrix or a
            filter, as the paper does: in ResNet-18 the stem and the four stages.
    Sent: nothing beyond the model.
    State: none.
    Cost: products of B x B features for each level and step.
    Laws: mu = 0 is FedAvg, bit for bit. An example without another one of its class has no term.
        With lam >= 1 or beta = 0 it is the supervised contrastive loss, to rounding. Scaling the
        features of an example changes nothing.
    Deviations: of a map of features [B, C, H, W] the mean over the positions counts, as in the
        public code; other features are flattened. A block's output is taken as it is, before an
        activation that the network applies to it. In the public code a positive pair is compared
        only with pairs of different classes, may be an example with itself, and is one for each
        example: the least similar one of its class; the penalty has the cosine -1 for a pair that
        is not too similar, and counts that of one pair. An example whose features are all 0 has the
        cosine 0 with all others. Of class probabilities the most probable class counts.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedrcl(lam=0.8)+momentum").expression
        'fedrcl(lam=0.8)+momentum'
    """

    mu: float = param(1.0, ge=0.0)
    tau: float = param(0.05, gt=0.0)
    beta: float = param(1.0, ge=0.0)
    lam: float = param(0.7, ge=-1.0)
    levels: str = ""

    name: ClassVar[str] = "fedrcl"
    paper: ClassVar[str] = "seo2024fedrcl"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.HEAD, Capability.BLOCKS, Capability.CLASSES}
    )
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.EXAMPLE_LOSSES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted term of each example, the mean over the levels, [B]."""
        labels, real = step.batch.labels, step.batch.real(output.logits.dtype)
        if labels.ndim == 2:
            labels = labels.argmax(dim=1)
        terms = [
            relaxed_contrast(cosines(z), labels, real, self.tau, self.beta, self.lam)
            for z in self._features(output)
        ]
        return self.mu * torch.stack(terms).mean(dim=0)

    def _features(self, output: Output) -> list[Tensor]:
        """Return the features of each level, [B, F]."""
        names = [name.strip() for name in self.levels.split(",")] if self.levels else output.levels
        missing = [name for name in names if name not in output.levels]
        if missing or not names:
            raise CompositionError(
                f"fedrcl: the network returns nothing at the level {missing[0]!r}."
                if missing
                else "fedrcl: the network has no level before its classifier.",
                expected=f"some of {', '.join(output.levels)}"
                if output.levels
                else "a block with a matrix or a filter before the classifier",
                do="name other blocks, e.g. fedrcl(levels='layer3,layer4')"
                if output.levels
                else "use another network, or drop fedrcl",
            )
        every = [output.levels[name] for name in names]
        return [z.flatten(2).mean(dim=2) if z.ndim > 3 else z.flatten(1) for z in every]


def cosines(features: Tensor) -> Tensor:
    """Return [B, B] the cosines of features [B, F]; 0 where one of them is all 0."""
    squares = features.square().sum(dim=1, keepdim=True)
    is_zero = squares == 0.0  # where a square root has no gradient
    units = features * torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squares).rsqrt())
    return units @ units.T


def relaxed_contrast(
    s: Tensor, labels: Tensor, real: Tensor, tau: float, beta: float, lam: float
) -> Tensor:
    """Return [B] the relaxed contrastive loss of each example.

    Args:
        s: [B, B] cosines.
        labels: [B].
        real: [B] 1 for a real example, 0 for padding.
        tau: temperature.
        beta: weight of the penalty.
        lam: cosine above which a pair of one class is penalised.
    """
    is_real = real > 0.0
    others = is_real[:, None] & is_real & ~torch.eye(len(s), dtype=torch.bool, device=s.device)
    positive = others & (labels[:, None] == labels)
    count = positive.sum(dim=1)
    # an example without others has no logarithm of their sum: it gets that of all, which is unused
    compared = others | ~others.any(dim=1, keepdim=True)
    sums = torch.where(compared, s / tau, -torch.inf).logsumexp(dim=1)
    pulls = torch.where(positive, s / tau, 0.0).sum(dim=1) / count.clamp(min=1)
    too_near = torch.where(positive & (s > lam), s - 1.0, -torch.inf)
    penalty = torch.exp(too_near / tau).sum(dim=1).log1p()
    return torch.where(count > 0, sums - pulls, 0.0) + beta * penalty
