"""MIFA: the mean over all clients, where absent ones count with their last update.

Source
    Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability, NeurIPS
    2021 (key gu2021mifa). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, RoundCohort
from fedkeel.method.part import Traits
from fedkeel.method.roles import Reduction, ServerState, Table
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class MIFA(Reduction, Table, ServerState):
    r"""Takes the mean of all clients' last updates, each in units of its own learning rate.

    .. math::
        G_k \leftarrow \Delta_k/\eta_t \;\;(k\in S), \qquad
        \Delta = \frac{\eta_t}{C}\sum_{k=1}^C G_k

    Source: gu2021mifa, Algorithm 1. GradMA's MIFAM is `mifa+momentum`.

    Args:
        start: what happens until every client has taken part once; in the paper all do in the first
            round. ``seen`` takes the mean over the clients that have taken part. ``wait`` leaves
            the model unchanged, for ever if one client never takes part; the first step is then the
            mean over all C clients, all of them trained from the initial model. ``no_wait`` counts
            absent clients as 0, so that early steps are short.
    Sent: nothing beyond the model.
    State: G_k of each client and their sum, at the server: C + 1 models, starting at 0, and the
        number of clients that have taken part.
    Cost: two passes over the K updates and the K memories.
    Laws: with all clients in each round it is FedAvg. With ``no_wait`` the first round is FedAvg's,
        K/C times as long. On quadratics its fixed point is that of FedAvg with all clients, whoever
        takes part.
        A round in which nobody replies makes a step too, along the mean of the last updates.
    Deviations: the authors' public code also waits, then asks all clients for an update at once and
        steps in the next round; here ``wait`` uses the updates of the rounds before, the last one
        of each client. Its other trainer is ``no_wait``. The paper's learning rate falls as 1 / t.
        Clients count equally, whatever `weights` says.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("mifa+momentum(beta=0.5)").reduction.start
        'seen'
    """

    start: Literal["seen", "wait", "no_wait"] = "seen"

    name: ClassVar[str] = "mifa"
    paper: ClassVar[str] = "gu2021mifa"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(uses_weights=False, counts_absent=True)

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the mean of all clients' last updates, as `start` says before all are known."""
        memory = self._remember(updates, cohort)
        clients, seen = cohort.population.clients, int(tree.leaf(memory, "seen"))
        cohort.log("seen", seen)
        count = max(seen, len(updates)) if self.start == "seen" else clients
        if count == 0 or (self.start == "wait" and seen < clients):
            return tree.zeros_like(tree.leaves(memory, "sum"))
        return tree.scale(tree.leaves(memory, "sum"), cohort.lr / count)

    def init_row(self, params: Tree) -> State:
        """Return G_k = 0."""
        return {"G": tree.zeros_like(params)}

    def next_rows(self, outcome: Outcome) -> State:
        """Return the clients' new G_k."""
        fresh = outcome.updates.materialise()
        return {"G": tree.scale(fresh, 1.0 / outcome.cohort.lr)}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return a sum of 0, which has no terms."""
        return {"sum": tree.zeros_like(params), "seen": torch.zeros((), dtype=torch.int64)}

    def next_server(self, outcome: Outcome) -> State:
        """Return the sum of all G_k, and how many clients were there."""
        return self._remember(outcome.updates, outcome.cohort)

    def _remember(self, updates: Span, cohort: RoundCohort) -> State:
        """Return the sum of all G_k after this round, and how many clients were there."""
        count = len(updates)
        fresh = updates.sum(np.full(count, 1.0 / cohort.lr))
        old = Span(tree.leaves(cohort.rows, "G")).sum(np.ones(count))
        total = tree.add(tree.leaves(cohort.state, "sum"), tree.sub(fresh, old))
        return {
            "sum": total,
            "seen": tree.leaf(cohort.state, "seen") + int((~cohort.is_known).sum()),
        }
