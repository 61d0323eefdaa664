"""FedInit: each client begins a step away from where it ended.

Source
    Sun et al., Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
    Initialization, NeurIPS 2023 (key sun2023fedinit). Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Arrival, Round
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import ClientState, LocalStart
from fedkeel.tree import State, Tree, leaves


@dataclass(frozen=True)
class FedInit(LocalStart, ClientState):
    r"""Begins local training beyond the received model, away from the client's last local model.

    .. math::
        \theta_k^{t,0} = \theta^t + \beta\,(\theta^t - \theta_k^{t'})

    with :math:`\theta_k^{t'}` the end of the client's last round.

    Source: sun2023fedinit, Algorithm 1 (relaxed initialisation).

    Args:
        beta: length of the step, >= 0. The paper has 0.1 or less.
    Sent: nothing beyond the model.
    State: the last local model of each client.
    Cost: one pass over the parameters in each round.
    Laws: beta = 0 is FedAvg. A client that takes part for the first time begins at the received
        model.
    Deviations: the authors' code averages how far clients have moved from where they began; here,
        as in the paper's algorithm, it is where they end. There a client that has never taken part
        has the initial model as its last one, and so begins beyond the received one at once; here
        it begins at that, as all clients do in the paper, where all take part in the first round.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedinit(beta=0.05)").local_start.beta
        0.05
    """

    beta: float = param(0.1, ge=0.0)

    name: ClassVar[str] = "fedinit"
    paper: ClassVar[str] = "sun2023fedinit"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})

    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Return the relaxed start."""
        last = leaves(arrival.client_state, "end")
        return tree.map(lambda w, last: w + self.beta * (w - last), received, last)

    def init_client(self, start: Tree) -> State:
        """Return the received model."""
        return {"end": dict(start)}

    def next_client(self, round: Round) -> State:
        """Return the local model."""
        return {"end": dict(round.end)}
