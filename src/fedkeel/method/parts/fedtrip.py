"""FedTrip: near the received model, and away from the client's last one.

Source
    Li et al., FedTrip: A Resource-Efficient Federated Learning Method with Triplet Regularization,
    IPDPS 2023 (key li2023fedtrip).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Traits, param
from fedkeel.method.roles import Broadcast, ClientState, Penalty, ServerState
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedTrip(Penalty, ClientState, ServerState, Broadcast):
    r"""Adds a pull to the received model, and a push away from the client's last local model.

    .. math:: \frac\mu2\Bigl(\lVert\theta-\theta^t\rVert^2
        - \frac1{t-\tau_k}\lVert\theta-\theta_k\rVert^2\Bigr)

    where theta_k is the client's local model at the end of round tau_k, the last one in which it
    took part: the older it is, the weaker the push.

    Source: li2023fedtrip, the section on triplet regularisation; the weight 1 / (t - tau_k) is that
        of two public codes.

    Args:
        mu: weight of the term, >= 0, in units of 1 / learning rate.
    Sent: the number of the round, beyond the model.
    State: the last local model for each client, and the round in which it was made.
    Cost: two passes over the parameters for each step.
    Laws: mu = 0 is FedAvg. A client's first round is FedAvg's: it has no last model. In the round
        after one in which it took part, pull and push have the same weight, and the term is a
        constant force from the last model to the received one, of strength mu.
    Deviations: a public code gives a client that takes part for the first time the initial model as
        its last one; here there is no term then. FedNova leaves the term out of the length of the
        local path, since its pull differs from client to client.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedtrip(mu=0.2)+momentum").expression
        'fedtrip(mu=0.2)+momentum'
    """

    mu: float = param(0.4, ge=0.0)

    name: ClassVar[str] = "fedtrip"
    paper: ClassVar[str] = "li2023fedtrip"
    traits: ClassVar[Traits] = Traits(preserves_penalty_pull=False)

    @property
    def pull(self) -> float:
        """Return 0: in the round after one in which a client took part, nothing pulls."""
        return 0.0

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return mu (theta - theta_t) - mu / (t - tau) (theta - theta_k)."""
        last = tree.leaves(step.client_state, "last")
        now, then = cast(Tensor, step.broadcast["round"]), cast(Tensor, step.client_state["round"])
        push = self.mu / torch.where(then < 0, torch.ones_like(now), now - then)
        start, mu = step.start, self.mu
        return tree.map(lambda w, w0, last: mu * (w - w0) - push * (w - last), params, start, last)

    def init_client(self, start: Tree) -> State:
        """Return the received model, from which pull and push are the same, and no round, -1."""
        like = next(iter(start.values()), torch.zeros(()))
        return {"last": dict(start), "round": -like.new_ones(())}

    def next_client(self, round: Round) -> State:
        """Return the local model after the last step, and this round."""
        return {"last": dict(round.end), "round": round.broadcast["round"]}

    def init_server(self, params: Tree, population: Population) -> State:
        """Return the number of the first round."""
        return {"round": torch.zeros((), dtype=population.dtype)}

    def message(self, state: State) -> State:
        """Return the number of the round."""
        return dict(state)

    def next_server(self, outcome: Outcome) -> State:
        """Return the number of the next round."""
        return self.next_without_replies(outcome.cohort.state)

    def next_without_replies(self, state: State) -> State:
        """Return the number of the next round: one in which nobody replied counts too."""
        return {"round": cast(Tensor, state["round"]) + 1.0}
