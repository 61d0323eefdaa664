"""FedAWA: aggregation weights that are trained at the server, on the updates themselves.

Source
    Shi et al., FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using
    Client Vectors, CVPR 2025 (key shi2025fedawa). Where no equation is named, the authors' public
    code was followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Outcome, Round, RoundCohort
from fedkeel.method.part import param
from fedkeel.method.roles import Reduction, Table, Upload
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import State, Tree

BETAS, EPS = (0.5, 0.999), 1e-8
"""Of the server's Adam, as in the authors' public code."""


@dataclass(frozen=True)
class FedAWA(Upload, Reduction, Table):
    r"""Moves the clients' weights towards updates that agree with the mean of all.

    .. math::
        L(\lambda) = \sum_k \lambda_k\, d(\theta^t, \theta_k)
            + \sum_k \lambda_k \Bigl\lVert \Delta_k - \sum_j\lambda_j\Delta_j \Bigr\rVert, \qquad
        \lambda_k = \frac{p_k e^{z_k}}{\sum_j p_j e^{z_j}}

    The server takes a few steps of Adam on the z_k of the round's clients, which begin at 0 and
    stay from round to round, and adds the mean with the weights lambda. p_k are the run's weights.

    Source: shi2025fedawa, Algorithm 1, the objective over the aggregation weights.

    Args:
        steps: steps of Adam in each round, >= 0. 1 in the public code.
        lr: learning rate of Adam, >= 0. 0.001 in the public code.
        distance: d between the sent and the local model: ``cosine`` is 1 - cosine, ``square`` the
            mean squared difference.
        form: ``weights`` is as written above. ``public`` is as the authors' public code has it:
            lambda is the softmax of p_k + z_k, so it begins near equal weights, and the mean is
            taken with the weights before the last step of Adam, so that one step acts in the next
            round only.
    Sent: one number up, the distance.
    State: z_k of each client, one number, at the server.
    Cost: the inner products of the K updates.
    Laws: lr = 0 or steps = 0 is FedAvg. One client is FedAvg. Of clients with equal models and
        shares none gains weight. Each small step lowers L.
    Deviations: where not all clients take part, each keeps its own z_k; in the public code they
        stay with the place in the cohort. Adam begins anew in each round, as there.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedawa(steps=5)").reduction.lr
        0.001
    """

    steps: int = param(1, ge=0)
    lr: float = param(0.001, ge=0.0)
    distance: Literal["cosine", "square"] = "cosine"
    form: Literal["weights", "public"] = "weights"

    name: ClassVar[str] = "fedawa"
    paper: ClassVar[str] = "shi2025fedawa"

    def upload(self, round: Round) -> State:
        """Return the distance of the local model from the one that was received."""
        if self.distance == "square":
            far = tree.dot(round.update, round.update) / tree.numel(round.update)
        else:
            far = _cosine_distance(round.start, tree.add(round.start, round.update))
        return {"distance": far}

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean with the trained weights."""
        shares, _ = self._trained(updates, cohort)
        cohort.log("change", float(0.5 * np.abs(shares - cohort.weights).sum()))
        return updates.sum(shares)

    def init_row(self, params: Tree) -> State:
        """Return z_k = 0."""
        device = next(iter(params.values())).device
        return {"z": torch.zeros((), dtype=torch.float64, device=device)}

    def next_rows(self, outcome: Outcome) -> State:
        """Return the clients' new z_k."""
        _, z = self._trained(outcome.updates, outcome.cohort)
        return {"z": torch.from_numpy(z).to(tree.leaf(outcome.cohort.rows, "z").device)}

    def _trained(self, updates: Span, cohort: RoundCohort) -> tuple[Floats, Floats]:
        """Return [K] the weights of the mean, and [K] z."""
        z = tree.leaf(cohort.rows, "z").double().cpu().numpy()
        far = tree.leaf(cohort.uploads, "distance").double().cpu().numpy()
        gram = updates.gram(cohort.names)
        shares = before = self._shares(z, cohort)
        m, v = np.zeros_like(z), np.zeros_like(z)
        for s in range(1, self.steps + 1):
            before = shares
            g = _gradient(shares, far, gram)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
            size = np.sqrt(v / (1 - BETAS[1] ** s)) + EPS
            z = z - self.lr * m / (1 - BETAS[0] ** s) / size
            shares = self._shares(z, cohort)
        return (before if self.form == "public" else shares), z

    def _shares(self, z: Floats, cohort: RoundCohort) -> Floats:
        """Return [K] lambda."""
        first: Floats = np.exp(cohort.weights) if self.form == "public" else cohort.weights
        raised = first * np.exp(z)
        return np.asarray(raised / raised.sum())


def _gradient(shares: Floats, far: Floats, gram: Floats) -> Floats:
    """Return [K] the gradient of L by z; a distance of 0 counts as flat, as in torch."""
    towards = gram @ shares
    square = np.diagonal(gram) - 2.0 * towards + shares @ towards
    length = np.sqrt(np.maximum(square, 0.0))
    inverse = np.divide(shares, length, out=np.zeros_like(length), where=length > 0.0)
    by_share = far + length + inverse.sum() * towards - gram @ inverse
    return np.asarray(shares * (by_share - shares @ by_share))


def _cosine_distance(a: Tree, b: Tree) -> Tensor:
    """Return [] 1 - cos(a, b), in a form without cancellation; 1 where a vector is zero."""
    sizes = [tree.norm(v) for v in (a, b)]
    is_zero = sizes[0] * sizes[1] == 0.0
    first, second = (torch.where(is_zero, 1.0, size) for size in sizes)
    apart = tree.sub(tree.scale(a, 1.0 / first), tree.scale(b, 1.0 / second))
    return torch.where(is_zero, 1.0, 0.5 * tree.dot(apart, apart))
