"""FedALA: each client learns which entries of its head to take from the global model.

Source
    Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023
    (key zhang2023fedala). Algorithm 1, Eq. (4) and (5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel import tree
from fedkeel.method.context import Round, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.parts.fedper import head_or
from fedkeel.method.roles import Carry, ClientState, SteppedStart
from fedkeel.task.parameter_names import ParameterLayout
from fedkeel.tree import State, Tree, leaf, leaves


@dataclass(frozen=True)
class FedALA(SteppedStart, Carry, ClientState):
    r"""Begins at a mixture of the client's last model and the received one, entry by entry.

    .. math::
        \theta^{t,0}_k = \theta_k + W_k \odot (\theta^t - \theta_k),\qquad
        W_k \leftarrow \mathrm{clip}\bigl(W_k - \eta\,\nabla F_k(\theta^{t,0}_k) \odot
        (\theta^t - \theta_k),\,0,\,1\bigr)

    in the adapted layers; the others are those of the received model. W_k is 1 at first and stays
    from round to round. Each of its steps takes a mini-batch. The mixture is also the client's
    personal model.

    Source: zhang2023fedala, Algorithm 1, Eq. (4) and (5).

    Args:
        adapt: the adapted layers: comma-separated names of sub-modules or parameters, ``*`` for any
            text; "" for the head.
        lr: eta, learning rate of W, > 0. The paper has 1.
        passes: passes over the client's examples in which W is trained in each round, >= 0. The
            paper has 1.
        first: passes in a client's second round, >= 0. It is the first one in which the client has
            a model of its own, so W has to settle.
    Sent: nothing beyond the model.
    State: the last local model of each client, W, and the number of its rounds: two models.
    Cost: `passes` over all examples of the client in each round, and in each evaluation of the
        clients; in its second round `first`.
    Laws: passes = first = 0 is FedAvg. A client that takes part for the first time begins at the
        received model.
    Deviations: the paper trains W in the second round until it converges; its public code does so
        for at least 11 passes, until the loss of the last mini-batches varies little. The paper
        takes a random 80 % of the examples; here it is all of them, in mini-batches of the size of
        local training, each of every n-th example in stored order.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedala(passes=2)").local_start.lr
        1.0
    """

    adapt: str = param("")
    lr: float = param(1.0, gt=0.0)
    passes: int = param(1, ge=0)
    first: int = param(11, ge=0)

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "zhang2023fedala"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(is_personal_model=True)

    def start_steps(self, client_state: State, batches: int) -> int:
        """Return the steps of W in all passes of a round; none in a client's first one."""
        rounds = int(leaf(client_state, "rounds"))
        passes = self.first if rounds == 1 else self.passes
        return batches * passes if rounds else 0

    def init_start(self, received: Tree, client_state: State, layout: ParameterLayout) -> State:
        """Return W of the adapted layers, and by how much the received model differs there."""
        last, adapted = leaves(client_state, "end"), head_or(self.adapt, layout, self.name)
        change = {k: v - last[k] for k, v in received.items() if k in adapted}
        return {"W": tree.pick(leaves(client_state, "W"), change), "change": change}

    def start_step(self, state: State, received: Tree, step: Step) -> State:
        """Return W after a step along the gradient at the mixture."""
        change = leaves(state, "change")
        grads = step.task_grad(_mixture(state, received), step.batch, change.keys())
        mixing = tree.map(
            lambda w, g, c: (w - self.lr * g * c).clamp(0.0, 1.0), leaves(state, "W"), grads, change
        )
        return {**state, "W": mixing}

    def end_start(self, state: State, received: Tree, client_state: State) -> tuple[Tree, State]:
        """Return the mixture, and W of all layers."""
        weights = {**leaves(client_state, "W"), **leaves(state, "W")}
        return _mixture(state, received), {"W": weights}

    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return W, as the start of the round has left it."""
        return {"W": leaves(client_state, "W")}

    def next_carry(self, before: Tree, carry: State) -> State:
        """Return W: the steps of local training do not change it."""
        return carry

    def init_client(self, start: Tree) -> State:
        """Return the received model, W = 1 and no rounds."""
        like = next(iter(start.values()))
        ones = tree.full_like(start, 1.0)
        return {"end": dict(start), "W": ones, "rounds": like.new_zeros(())}

    def next_client(self, round: Round) -> State:
        """Return the local model, W and the number of rounds."""
        rounds = leaf(round.client_state, "rounds") + 1.0
        return {"end": dict(round.end), "W": round.carry["W"], "rounds": rounds}


def _mixture(state: State, received: Tree) -> Tree:
    """Return the mixture of a client's last model and the received one."""
    back = tree.map(lambda w, c: (1.0 - w) * c, leaves(state, "W"), leaves(state, "change"))
    return {k: v - back[k] if k in back else v for k, v in received.items()}
