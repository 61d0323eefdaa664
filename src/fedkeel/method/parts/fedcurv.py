"""FedCurv: hold each parameter where it matters to the other clients.

Source
    Shoham et al., Overcoming Forgetting in Federated Learning on Non-IID Data, 2019 (key
    shoham2019fedcurv). Section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.method.context import Outcome, Population, Round, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Broadcast, ClientState, Penalty, ServerState, Upload
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class FedCurv(Penalty, ClientState, Upload, Broadcast, ServerState):
    r"""Adds the squared distances to the other clients' models, weighted by their curvature.

    .. math::
        F_k(\theta) + \lambda\sum_{j\ne k}(\theta-\theta_j)^\top
        \mathrm{diag}(I_j)\,(\theta-\theta_j)

    where theta_j is the last local model of client j and I_j the mean over its examples of the
    squared gradient of the loss there, the diagonal of the empirical Fisher information. Only the
    sums of I_j and of I_j theta_j are sent.

    Source: shoham2019fedcurv, section 3.

    Args:
        lam: lambda, >= 0. FedReg's tables have 1e-5 to 1e-3.
        memory: whose terms count: those of all ``clients`` that have taken part so far, without the
            client's own terms (the paper, where all take part in every round); or those of the
            clients of the last ``round`` (FedReg's code), with the client's own terms.
    Sent: two models down, the sums; two models up, what changed in the client's terms, or one, I_k,
        with memory = ``round``, where the server makes the other itself.
    State: the sums at the server, two models; the client's own terms, two models, none with
        memory = ``round``.
    Cost: two passes over the parameters for each step; at the end of a round the gradient of each
        of the client's examples, which for linear layers takes as long as those of batches.
    Laws: lambda = 0 is FedAvg, bit for bit; so is the first round. A client alone has no
        penalty, but with memory = ``round``. The gradient at theta is that of the sum of the
        others' terms.
    Deviations: FedReg's code ignores clients that did not take part in the last round. OpenFL's
        code squares gradients of batches, not of examples. Examples are in evaluation mode. The
        curvature differs between parameters, so the path length of local training ignores it: its
        gradient counts like any other. With memory = ``round`` the server computes a local model as
        the global one plus the update, which is wrong where another part sends a different model or
        changes the update (FedNova, CGC). Batch normalisation with local statistics has no gradient
        of single examples: such a run is refused when it is prepared.

    Example:
        >>> import fedkeel
        >>> sorted(need.name for need in fedkeel.parse("fedcurv").objective.penalties[0].needs)
        ['LOSS_BY_EXAMPLE', 'STABLE_CLIENTS']
    """

    lam: float = param(1e-3, ge=0.0)
    memory: Literal["clients", "round"] = "clients"

    name: ClassVar[str] = "fedcurv"
    paper: ClassVar[str] = "shoham2019fedcurv"

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        """Clients that can be found again, where they keep their own terms; else their models.

        And a loss whose gradient can be taken of each example, for the Fisher information.
        """
        kept = self.memory == "clients"
        clients = Capability.STABLE_CLIENTS if kept else Capability.PER_CLIENT_UPDATES
        return frozenset({clients, Capability.LOSS_BY_EXAMPLE})

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The server holds sums of terms; the changes of terms are only added up."""
        return Traits(server_holds_sum=True, needs_only_sum=self.memory == "clients")

    @property
    def pull(self) -> float:
        """Return 0: it pulls on every parameter with another strength."""
        return 0.0

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return 2 lambda (U theta - V)."""
        u, v = tree.leaves(step.broadcast, "u"), tree.leaves(step.broadcast, "v")
        if self.memory == "clients":
            u = tree.sub(u, tree.leaves(step.client_state, "u"))
            v = tree.sub(v, tree.leaves(step.client_state, "v"))
        return tree.map(lambda p, u, v: 2.0 * self.lam * (u * p - v), params, u, v)

    def init_client(self, start: Tree) -> State:
        """Return terms of 0."""
        return _nothing(start) if self.memory == "clients" else {}

    def next_client(self, round: Round) -> State:
        """Return I_k and I_k theta_k at the local model."""
        if self.memory == "round":
            return {}
        u = fisher(round)
        return {"u": u, "v": tree.map(torch.mul, u, round.end)}

    def upload(self, round: Round) -> State:
        """Return what has changed in the client's terms, or only I_k."""
        if self.memory == "round":
            return {"u": fisher(round)}
        return {
            name: tree.sub(
                tree.leaves(round.new_state, name), tree.leaves(round.client_state, name)
            )
            for name in ("u", "v")
        }

    def init_server(self, params: Tree, population: Population) -> State:
        """Return sums of nothing."""
        return _nothing(params)

    def message(self, state: State) -> State:
        """Return U and V."""
        return state

    def next_server(self, outcome: Outcome) -> State:
        """Return U and V after the round."""
        uploads, state = outcome.cohort.uploads, outcome.cohort.state
        u = tree.leaves(uploads, "u")
        if self.memory == "clients":
            v = tree.leaves(uploads, "v")
            return {
                name: tree.map(torch.add, tree.leaves(state, name), tree.sum_rows(new))
                for name, new in (("u", u), ("v", v))
            }
        rows = outcome.updates.rows  # as they came
        return {
            "u": tree.sum_rows(u),
            "v": tree.map(lambda u, w, d: (u * (w + d)).sum(dim=0), u, outcome.start, rows),
        }


def fisher(round: Round) -> Tree:
    """Return the mean over a client's examples of the squared gradient of the task's loss."""
    from fedkeel.method.per_example import sum_squared_grads

    step = round.all_examples_step()
    count = step.batch.real(step.network.dtype).sum()
    sums = sum_squared_grads(step.network, round.end, step.buffers, step.batch)
    return tree.map(lambda t: t / count, sums)


def _nothing(params: Tree) -> State:
    return {"u": tree.zeros_like(params), "v": tree.zeros_like(params)}
