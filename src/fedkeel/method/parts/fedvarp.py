"""FedVARP: the last updates of absent clients take the place of those they did not send.

Source
    Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation in
    Federated Learning, UAI 2022 (key jhunjhunwala2022). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeel import tree
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, RoundCohort
from fedkeel.method.part import Traits
from fedkeel.method.roles import Reduction, ServerState, Table
from fedkeel.solve.span import Span
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedVARP(Reduction, Table, ServerState):
    r"""Corrects the mean of all clients' last updates by what this round's clients changed.

    .. math::
        \Delta &= \eta\Bigl(y + \frac1K\sum_{k\in S}(\Delta_k/\eta - y_k)\Bigr) \\
        y &\leftarrow y + \frac1C\sum_{k\in S}(\Delta_k/\eta - y_k), \qquad
        y_k \leftarrow \Delta_k/\eta

    so that y is the mean of the y_k of all C clients, also of those that have not taken part.

    Source: jhunjhunwala2022, Algorithm 1. The server's step size is `addition(lr=...)`.

    Args:
        memory: what is remembered: the update over the learning rate eta of its round, a sum of
            ``gradient`` values (the paper), or the ``update`` itself (GC-Fed's public code). The
            same while the learning rate stays what it is.
    Sent: nothing beyond the model.
    State: y_k of each client and y, at the server: C + 1 models, starting at 0.
    Cost: two passes over the K updates and the K memories.
    Laws: with all clients in each round, and in the first round, it is FedAvg. On quadratics its
        fixed point is that of FedAvg with all clients, whoever takes part; FedAvg keeps moving.
    Deviations: the paper divides by the number of local steps too, which is the same where all
        clients make equally many; `fednova` does so for unequal work. Clients count equally,
        whatever `weights` says, because the mean over absent clients does so.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedvarp+addition(lr=0.5)").reduction.name
        'fedvarp'
    """

    memory: Literal["gradient", "update"] = "gradient"

    name: ClassVar[str] = "fedvarp"
    paper: ClassVar[str] = "jhunjhunwala2022"
    weights: ClassVar[Weights | None] = "uniform"
    traits: ClassVar[Traits] = Traits(uses_weights=False)

    def unit(self, cohort: RoundCohort) -> float:
        """Return what updates are divided by before they are remembered."""
        return cohort.lr if self.memory == "gradient" else 1.0

    def changes(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the sum over the round's clients of what changed in their memories."""
        count = len(updates)
        fresh = updates.sum(np.full(count, 1.0 / self.unit(cohort)))
        return tree.sub(fresh, Span(tree.leaves(cohort.rows, "y")).sum(np.ones(count)))

    def reduce(self, updates: Span, cohort: RoundCohort) -> Tree:
        """Return the corrected mean."""
        changes = self.changes(updates, cohort)
        mean = tree.add(tree.leaves(cohort.state, "y"), changes, 1.0 / len(updates))
        return tree.scale(mean, self.unit(cohort))

    def init_row(self, params: Tree) -> State:
        """Return y_k = 0."""
        return {"y": tree.zeros_like(params)}

    def next_rows(self, outcome: Outcome) -> State:
        """Return the clients' new memories."""
        share = 1.0 / self.unit(outcome.cohort)
        return {"y": tree.scale(outcome.updates.materialise(), share)}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return y = 0."""
        return {"y": tree.zeros_like(params)}

    def next_server(self, outcome: Outcome) -> State:
        """Return the mean memory of all C clients."""
        cohort = outcome.cohort
        changes = self.changes(outcome.updates, cohort)
        memory = tree.leaves(cohort.state, "y")
        return {"y": tree.add(memory, changes, 1.0 / cohort.population.clients)}
