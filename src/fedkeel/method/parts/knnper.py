"""kNN-Per: each client predicts by the global model and by its own nearest examples.

Source
    Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022 (key
    marfoq2022knnper). Algorithm 1, Eq. (6) to (8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import PersonalPrediction
from fedkeel.task.batch import Output


@dataclass(frozen=True)
class KNNPer(PersonalPrediction):
    r"""Mixes the probabilities of the model with those of the k nearest training examples.

    .. math::
        p(y \mid x) = \lambda\,\frac{\sum_{i \in N_k(x)} 1[y_i = y]\,e^{-d_i}}
        {\sum_{i \in N_k(x)} e^{-d_i}} + (1-\lambda)\,\mathrm{softmax}(z)_y,\quad
        d_i = \lVert f(x) - f(x_i) \rVert / s

    with f the features, the inputs of the head.

    Source: marfoq2022knnper, Algorithm 1, Eq. (6) to (8).

    Args:
        lam: share of the neighbours, in 0..1. The paper chooses it by client.
        k: number of neighbours, >= 1; all where a client has fewer examples.
        scale: s, > 0.
    Sent: nothing beyond the model.
    State: none: features are computed for each evaluation of the clients.
    Cost: one pass over each client's training examples whenever clients are evaluated.
    Laws: lam = 0 predicts as the global model does. A training example whose features no other
        has, with k = 1 and lam = 1, is predicted with its own label.
    Deviations: one lam for all clients. FL-bench mixes with scores in place of probabilities, and
        takes squared distances over the number of features.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("knnper(k=5)").personal_prediction.k
        5
    """

    lam: float = param(0.5, ge=0.0, le=1.0)
    k: int = param(10, ge=1)
    scale: float = param(1.0, gt=0.0)

    name: ClassVar[str] = "knnper"
    paper: ClassVar[str] = "marfoq2022knnper"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.CLASSES, Capability.FEATURES})

    def predict(self, output: Output, known: Output, targets: Tensor) -> Tensor:
        """Return the logarithm of the mixed probabilities."""
        exact = "donot_use_mm_for_euclid_dist"
        ours, theirs = cast(Tensor, output.features), cast(Tensor, known.features)  # FEATURES
        distance = torch.cdist(ours, theirs, compute_mode=exact)
        nearest, index = (distance / self.scale).topk(min(self.k, len(targets)), largest=False)
        shares = (-nearest).softmax(dim=1)  # [B, k]
        neighbours = torch.zeros_like(output.logits).scatter_add_(1, targets[index], shares)
        mixed = self.lam * neighbours + (1.0 - self.lam) * output.logits.softmax(dim=1)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()
