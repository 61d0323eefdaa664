"""FedAU: clients that take part seldom count more, by the length of their absences.

Source
    Wang and Ji, A Lightweight Method for Tackling Unknown Participation Statistics in Federated
    Averaging, ICLR 2024 (key wang2024fedau). Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, RoundCohort
from fedkeel.method.part import param
from fedkeel.method.roles import Reduction, Table
from fedkeel.solve.span import Floats, Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedAU(Reduction, Table):
    r"""Weights each update by the mean interval between its client's participations.

    .. math::
        \Delta = \frac1C\sum_{k\in S} \omega_k\Delta_k, \qquad
        \omega_k = \text{mean of the client's intervals so far}

    An interval is the number of rounds from one participation to the next, or from the start to the
    first one. The mean interval estimates one over the probability that the client takes part.

    Source: wang2024fedau, Algorithm 1 and, for the weights, Algorithm 2.

    Args:
        cutoff: the paper's K: longest interval in rounds, >= 1; a longer absence counts as several
            intervals of K. 50 in the paper. A small one has less variance and more bias.
    Sent: nothing beyond the model.
    State: three whole numbers for each client, at the server.
    Cost: one pass over the K updates.
    Laws: with all clients in each round it is FedAvg, and so is cutoff = 1 but for a step that is
        K / C times as long. Where each client takes part every T_k-th round, starting in round T_k,
        the weight is T_k from its second time on, so that in the mean all clients count equally.
    Deviations: where clients do not count equally (`weights`), each update has its weight times
        K omega_k / C. An interval is used from the next round on, as in the paper.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedau(cutoff=10)").reduction.cutoff
        10
    """

    cutoff: int = param(50, ge=1)

    name: ClassVar[str] = "fedau"
    paper: ClassVar[str] = "wang2024fedau"
    weights: ClassVar[Weights | None] = "uniform"

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the weighted sum."""
        total, count, _ = self._intervals(cohort)
        omega: Floats = np.where(count > 0, total / np.maximum(count, 1), 1.0)
        cohort.log("weight", float(omega.mean()))
        return updates.sum(cohort.weights * omega * (len(updates) / cohort.population.clients))

    def init_row(self, params: Tree) -> State:
        """Return no intervals; the first one begins before the first round."""
        device = next(iter(params.values())).device

        def count_of(value: int) -> torch.Tensor:
            return torch.tensor(value, dtype=torch.int64, device=device)

        return {"total": count_of(0), "count": count_of(0), "last": count_of(-1)}

    def next_rows(self, outcome: Outcome) -> State:
        """Return the intervals with the one that ends in this round."""
        cohort = outcome.cohort
        total, count, rest = self._intervals(cohort)
        values = {
            "total": total + rest + 1,
            "count": count + 1,
            "last": np.full_like(count, cohort.round),
        }
        device = tree.leaf(cohort.rows, "last").device
        return {k: torch.from_numpy(v).to(device) for k, v in values.items()}

    def _intervals(self, cohort: RoundCohort) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [K] sum and number of the intervals before this round, and rounds missed since."""
        rows = {k: tree.leaf(cohort.rows, k).cpu().numpy() for k in ("total", "count", "last")}
        missed = cohort.round - 1 - rows["last"]
        cut = missed // self.cutoff
        total = rows["total"] + cut * self.cutoff
        return total, rows["count"] + cut, missed - cut * self.cutoff
