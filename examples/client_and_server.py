"""A method with both halves: `-s method=client_and_server:MeanDrift`."""

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.roles import (
    Broadcast,
    Capability,
    ClientState,
    GradientTransform,
    ServerState,
    Upload,
    param,
)
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class MeanDrift(GradientTransform, ClientState, Upload, Broadcast, ServerState):
    r"""Moves each gradient from the client's own last direction towards the cohort's.

    .. math::
        g \leftarrow g + \rho\,(d - d_k), \qquad
        d_k \leftarrow \text{mean gradient of this round}, \qquad
        d \leftarrow \tfrac1K \sum_k d_k

    Source: this file. It is SCAFFOLD's idea with two simplifications: d is the mean over the last
        cohort alone, and rho weakens the correction.

    Args:
        rate: rho in [0, 1], strength of the correction.
    Sent: d down and d_k up, one model each.
    State: d_k for each client and d at the server, one model each, starting at 0.
    Cost: two passes over the parameters for each step.
    Laws: rate = 0 is FedAvg, bit for bit.
    Deviations: none.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("client_and_server:MeanDrift(rate=0.2)").parts[0].rate
        0.2
    """

    rate: float = param(0.5, ge=0.0, le=1.0)

    name: ClassVar[str] = "mean_drift"
    paper: ClassVar[str] = ""
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})

    # at the client

    def init_client(self, start: Tree) -> State:
        """Return d_k = 0, for a client that takes part for the first time."""
        return {"direction": tree.zeros_like(start)}

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return g + rho (d - d_k)."""
        ours = tree.leaves(step.client_state, "direction")
        theirs = tree.leaves(step.broadcast, "direction")
        return tree.add(grads, tree.sub(theirs, ours), self.rate)

    def next_client(self, round: Round) -> State:
        """Return the mean gradient of this round as d_k."""
        return {"direction": round.mean_grad()}

    def upload(self, round: Round) -> State:
        """Send d_k."""
        return round.new_state

    # at the server

    def init_server(self, params: Tree, population: Population) -> State:
        """Return d = 0."""
        return {"direction": tree.zeros_like(params)}

    def message(self, state: State) -> State:
        """Send d."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return the mean of the cohort's directions, which come with a leading axis K."""
        uploads = tree.leaves(outcome.cohort.uploads, "direction")
        return {"direction": tree.map(lambda rows: rows.mean(dim=0), uploads)}
