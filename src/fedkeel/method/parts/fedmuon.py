"""FedMuon: local steps of unit length in every singular direction, with the bias corrected.

Source
    Takezawa et al., FedMuon: Federated Learning with Bias-corrected LMO-based Optimization, 2025,
    arXiv 2509.26337 (key takezawa2025fedmuon). Algorithm 1. Another method of the same name is by
    Liu et al. (arXiv 2510.27403); it is not this one. Muon itself is by Jordan et al., 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.config import Local, Weights
from fedkeel.method.context import Outcome, Population, Round, RoundCohort
from fedkeel.method.local_optimiser import LocalOptimiser, decayed, descend
from fedkeel.method.part import Stage, Traits, param
from fedkeel.method.roles import (
    AggregateTransform,
    Broadcast,
    ClientOptimiser,
    ClientState,
    ServerState,
    Upload,
)
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree

QUINTIC = (3.4445, -4.775, 2.0315)
"""Coefficients of Muon's iteration, which brings singular values into about 0.7 to 1.2."""


def polar(matrix: Tensor, iterations: int, size: Tensor | float = 0.0) -> Tensor:
    """Return the orthogonal factor U V' of a matrix U S V', of any shape with an axis of rows.

    Directions without a singular value have no part in it, so that of 0 is 0. What only rounding
    has made counts as 0: a whole matrix no longer than its share of `size`, and, in an SVD, values
    below the root of the type's rounding, relative to the largest.

    Args:
        matrix: [rows, ...], taken as [rows, columns]; a vector is divided by its length.
        iterations: steps of Muon's iteration, which is approximate; 0 computes it by an SVD.
        size: [] length of the longest of the terms of which the matrix is the sum.

    >>> polar(torch.tensor([[2.0, 0.0], [0.0, 0.5]]), iterations=0).round(decimals=6).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> polar(torch.tensor([[2.0, 0.0], [0.0, 1e-9]]), iterations=0).round(decimals=6).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    flat = matrix.reshape(len(matrix), -1) if matrix.ndim > 1 else matrix
    rounding = torch.finfo(matrix.dtype).eps
    length = torch.linalg.vector_norm(flat)
    negligible = 8 * max(flat.shape, default=1) * rounding * size
    if matrix.ndim < 2:
        unit = matrix / torch.where(length > 0.0, length, 1.0)
        return torch.where(length > negligible, unit, 0.0)
    if iterations == 0:
        left, values, right = torch.linalg.svd(flat, full_matrices=False)
        is_there = (values > rounding**0.5 * values.amax()) & (length > negligible)
        exact: Tensor = (left * is_there) @ right
        return exact.reshape(matrix.shape)
    is_tall = flat.shape[0] > flat.shape[1]
    x: Tensor = flat.mT if is_tall else flat
    x = torch.where(length > negligible, x / (torch.linalg.matrix_norm(x) + 1e-12), 0.0)
    a, b, c = QUINTIC
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).reshape(matrix.shape)


@dataclass(frozen=True)
class Muon(LocalOptimiser):
    """Steps along the orthogonal factor of the momentum, to which a constant is added.

    Args:
        alpha: weight of the fresh gradient in the momentum.
        iterations: as in `polar`.
        weight_decay: lambda, decoupled.
        no_decay: parameters without weight decay.
    """

    alpha: float
    iterations: int
    weight_decay: float
    no_decay: frozenset[str]

    def init(self, params: Tree) -> State:
        """Return a momentum of 0 and a constant of 0."""
        return {name: tree.zeros_like(params) for name in ("m", "offset")}

    def step(
        self, params: Tree, grads: Tree, state: State, lr: float | Tensor
    ) -> tuple[Tree, State]:
        """Return parameters and state after one step."""
        offset, m = tree.leaves(state, "offset"), tree.leaves(state, "m")
        m = tree.map(lambda g, m: torch.lerp(m, g, self.alpha), grads, m)
        direction = tree.map(self._polar_of_sum, m, offset)
        direction = decayed(direction, params, self.weight_decay, self.no_decay)
        return descend(params, direction, lr), {"m": m, "offset": offset}

    def _polar_of_sum(self, m: Tensor, offset: Tensor) -> Tensor:
        size = torch.maximum(torch.linalg.vector_norm(m), torch.linalg.vector_norm(offset))
        return polar(m + offset, self.iterations, size)


@dataclass(frozen=True)
class FedMuon(ClientOptimiser, ClientState, Upload, AggregateTransform, Broadcast, ServerState):
    r"""Orthogonalises the local momentum, less the client's last one and plus the mean of all.

    .. math::
        m_k &\leftarrow (1-\alpha)m_k + \alpha g, \qquad
        \theta \leftarrow \theta - \eta\,\mathrm{polar}(m_k - c_k + c) \\
        \theta^{t+1} &= \theta^t + \tfrac1C\sum_{k\in S}\Delta_k, \qquad
        c_k \leftarrow m_k, \qquad c = \tfrac1C\sum_k c_k

    polar(U S V') is U V' for each matrix, and for each vector the vector over its length. A client
    keeps m_k from round to round. polar is not linear: without c and c_k the mean of the clients'
    steps is not a step along the mean gradient, and more clients do not mend it.

    Source: takezawa2025fedmuon, Algorithm 1.

    Args:
        alpha: weight of the fresh gradient, in (0, 1].
        iterations: steps of Muon's iteration for polar, >= 0; 5 in Muon. 0 computes it by an SVD,
            exactly and more slowly.
        corrected: whether c and c_k act; without them this is local Muon.
    Sent: c down and the change of c_k up, one model each beyond the model.
    State: c_k for each client, which is its momentum, and c at the server; one model each, starting
        at 0.
    Cost: for each step and matrix of n rows, n no larger than the columns, about 15 n^2 products of
        each column; two passes over the parameters.
    Laws: the first round is local Muon's, and so are all rounds of one client. Each step changes
        each matrix by eta in every singular direction that the gradient has, and in no other: a
        layer without a gradient stays. With all clients the model is the mean of theirs.
    Deviations: followed by a public re-implementation (HiraNayak/FedMuon), not by the authors'
        code. Absent clients count with an update of 0, as there, so that the step is K / C times
        the mean. Tensors of more than two axes are taken as matrices of their first axis, as in
        Muon. In an SVD, singular values that are rounding, below its root relative to the largest,
        have no direction; in theory every one above 0 has. Weight decay is decoupled. No update is
        scaled by the shape of its matrix.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedmuon(alpha=0.05)").client_optimiser.iterations
        5
    """

    alpha: float = param(0.1, gt=0.0, le=1.0)
    iterations: int = param(5, ge=0)
    corrected: bool = True

    name: ClassVar[str] = "fedmuon"
    paper: ClassVar[str] = "takezawa2025fedmuon"
    weights: ClassVar[Weights | None] = "uniform"
    aggregate_stage: ClassVar[Stage] = Stage.LIMIT
    traits: ClassVar[Traits] = Traits(server_holds_sum=True, needs_only_sum=True)

    def local_optimiser(self, local: Local, no_decay: frozenset[str]) -> LocalOptimiser:
        """Return Muon."""
        return Muon(self.alpha, self.iterations, local.weight_decay, no_decay)

    def start_optimiser(self, initial: State, broadcast: State, client_state: State) -> State:
        """Return the client's momentum, and c - c_k."""
        m = tree.leaves(client_state, "m")
        if not self.corrected:
            return {"m": m, "offset": initial["offset"]}
        return {"m": m, "offset": tree.sub(tree.leaves(broadcast, "c"), m)}

    def init_client(self, start: Tree) -> State:
        """Return a momentum of 0."""
        return {"m": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return the momentum."""
        return {"m": tree.leaves(round.optimiser, "m")}

    def upload(self, round: Round) -> State:
        """Return how the momentum has changed."""
        old, new = tree.leaves(round.client_state, "m"), tree.leaves(round.new_state, "m")
        return {"c": tree.sub(new, old)}

    def transform_aggregate(self, update: Tree, updates: Span, cohort: RoundCohort) -> Tree:
        """Return K / C times the mean."""
        return tree.scale(update, len(cohort.clients) / cohort.population.clients)

    def init_server(self, params: Tree, population: Population) -> State:
        """Return c = 0."""
        return {"c": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return c."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return c, moved by the mean change over all C clients."""
        cohort = outcome.cohort
        changes, old = tree.leaves(cohort.uploads, "c"), tree.leaves(cohort.state, "c")
        share = 1.0 / cohort.population.clients
        return {"c": tree.map(lambda c, changes: c + share * changes.sum(dim=0), old, changes)}
