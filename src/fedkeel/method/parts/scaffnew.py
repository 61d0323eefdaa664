"""Scaffnew, or ProxSkip: local gradient steps with control variates, and averaging now and then.

Source
    Mishchenko et al., ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
    Acceleration! Finally!, ICML 2022 (key mishchenko2022proxskip). Algorithm 2, Scaffnew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.config import Local, Weights
from fedkeel.method.context import Round, Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import ClientState, GradientTransform, LocalWork
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class Scaffnew(LocalWork, GradientTransform, ClientState):
    r"""Takes 1/p steps along g - h_k, then moves h_k towards the gradient that is left.

    .. math::
        \theta_k &\leftarrow \theta_k - \eta\,(g_k - h_k) \quad\text{in } 1/p \text{ steps} \\
        \theta^{t+1} &= \tfrac1C\sum_k \theta_k, \qquad
        h_k \leftarrow h_k + \frac{p}{\eta}(\theta^{t+1} - \theta_k)

    The client makes the last step when it receives the new model, so that nothing is sent beyond
    the model: SCAFFOLD sends twice as much.

    Source: mishchenko2022proxskip, Algorithm 2.

    Args:
        p: share of the steps after which clients send, in (0, 1]: a round has 1/p steps, rounded,
            whatever the run asks for. The theory's best value is the root of mu / L, the inverse
            of the condition number.
    Sent: nothing beyond the model.
    State: h_k and the last local model for each client, two models, and one number. The h_k start
        at 0, and their sum stays 0.
    Cost: three passes over the parameters for each step.
    Laws: p = 1 is synchronous gradient descent: one step along the clients' mean gradient. With all
        clients in each round its fixed point, also with full-batch steps of unequal number, is the
        optimum of the clients' mean loss. The first round is FedAvg's.
    Deviations: in the paper a coin that all clients share says after each step whether they send,
        so a round has 1/p steps in the mean; here it has that many each time. All clients have to
        take part in each round, as in the paper: one that was away moves its h_k by what others did
        meanwhile, the sum is no longer 0, and the fixed point is no longer the optimum (`scaffold`
        bears absences). With local momentum p / eta is divided by the length of the path over its
        number of steps. Where the learning rate changes, eta is that of the round of the steps.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("scaffnew(p=0.2)").work(fedkeel.Local(lr=0.1, epochs=1)).steps
        5
    """

    p: float = param(0.1, gt=0.0, le=1.0)

    name: ClassVar[str] = "scaffnew"
    paper: ClassVar[str] = "mishchenko2022proxskip"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.LINEAR_ACCUMULATION, Capability.FRESH_UPDATES, Capability.ONE_MODEL}
    )

    def work(self, local: Local) -> Local:
        """Return the settings with 1/p steps."""
        return local.model_copy(update={"epochs": None, "steps": round(1.0 / self.p)})

    def transform_gradient(self, grads: Tree, params: Tree, step: Step) -> Tree:
        """Return g - h_k."""
        h = _variate(step.client_state, step.start)
        return tree.sub(grads, h)

    def init_client(self, start: Tree) -> State:
        """Return h_k = 0, as if the client had ended at the model that it receives."""
        like = next(iter(start.values()))
        return {
            "h": tree.zeros_like(start),
            "end": dict(start),
            "rate": torch.zeros((), dtype=like.dtype, device=like.device),
        }

    def next_client(self, round: Round) -> State:
        """Return the h_k of this round, the local model, and p / eta for the step to come."""
        like = next(iter(round.start.values()))
        rate = self.p * round.steps / (round.lr * round.path_length)
        return {
            "h": _variate(round.client_state, round.start),
            "end": dict(round.end),
            "rate": torch.as_tensor(rate, dtype=like.dtype, device=like.device),
        }


def _variate(state: State, received: Tree) -> Tree:
    """Return h_k after its step towards the received model."""
    h, end, rate = tree.leaves(state, "h"), tree.leaves(state, "end"), tree.leaf(state, "rate")
    return tree.map(lambda h, w, end: h + rate * (w - end), h, received, end)
