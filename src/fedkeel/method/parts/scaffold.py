"""SCAFFOLD: control variates that correct each client's drift.

Source
    Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
    (key karimireddy2020). Algorithm 1, Eq. (3)-(5), option II.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Weights
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Capability, Traits
from fedkeel.method.roles import Broadcast, ClientState, GradientTransform, ServerState, Upload
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class Scaffold(GradientTransform, ClientState, Upload, Broadcast, ServerState):
    r"""Adds the server's control variate to the gradient and subtracts the client's.

    .. math::
        \theta &\leftarrow \theta - \eta\,(g - c_k + c) \\
        c_k^+ &= c_k - c + (\theta^t - \theta_k) / (\eta\tilde K) \\
        c &\leftarrow c + \tfrac1C \sum_{k} (c_k^+ - c_k)

    Source: karimireddy2020, Algorithm 1 with option II. The server's step size is
        `addition(lr=...)`.
    Sent: c down and c_k^+ - c_k up, one model each beyond the model.
    State: c_k for each client and c at the server, one model each, starting at 0.
    Cost: two passes over the parameters for each step.
    Laws: on heterogeneous quadratics with unequal local work its fixed point is the optimum of the
        clients' mean loss, whatever `weights` says: clients count equally in c. One round of all
        clients from c = 0 moves the model as FedAvg does.
    Deviations: the paper divides by eta K, which is wrong under local momentum; K~ is the length of
        the local path, equal to K without momentum. (GC-Fed's public code hard-codes K~ for
        momentum 0.9, whatever the momentum is.)

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffold").weights
        'uniform'
    """

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "karimireddy2020"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(
        takes_stale_updates=True,
        server_holds_sum=True,
        from_last_round_only=True,
        needs_only_sum=True,
    )

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return g - c_k + c."""
        ours, theirs = tree.leaves(step.client_state, "c"), tree.leaves(step.broadcast, "c")
        return tree.sub(grads, tree.sub(ours, theirs))  # the same in each step

    def init_client(self, start: Tree) -> State:
        """Return c_k = 0."""
        return {"c": tree.zeros_like(start)}

    def next_client(self, round: Round) -> State:
        """Return c_k^+."""
        ours, theirs = tree.leaves(round.client_state, "c"), tree.leaves(round.broadcast, "c")
        return {"c": tree.map(torch.add, tree.sub(ours, theirs), round.mean_grad())}

    def upload(self, round: Round) -> State:
        """Return c_k^+ - c_k."""
        return {
            "c": tree.sub(tree.leaves(round.new_state, "c"), tree.leaves(round.client_state, "c"))
        }

    def init_server(self, params: Tree, population: Population) -> State:
        """Return c = 0."""
        return {"c": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Return c."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return c, moved by the mean change over all C clients."""
        cohort = outcome.cohort
        changes = tree.leaves(cohort.uploads, "c")
        share = 1.0 / cohort.population.clients
        old = tree.leaves(cohort.state, "c")
        return {"c": tree.map(lambda c, changes: c + share * changes.sum(dim=0), old, changes)}
