"""FedALA: each client learns which entries of its head to take from the global model.

Source
    Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023
    (key zhang2023fedala). Algorithm 1, Eq. (4) and (5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedkeel.method.context import Arrival, Round
from fedkeel.method.part import Capability, param
from fedkeel.method.parts.fedper import head_or
from fedkeel.method.roles import ClientState, LocalStart
from fedkeel.tree import State, Tree, leaves


@dataclass(frozen=True)
class FedALA(LocalStart, ClientState):
    r"""Begins at a mixture of the client's last model and the received one, entry by entry.

    .. math::
        \theta^{t,0}_k = \theta_k + W \odot (\theta^t - \theta_k),\qquad
        W \leftarrow \mathrm{clip}\bigl(W - \eta\,\nabla F_k(\theta^{t,0}_k) \odot
        (\theta^t - \theta_k),\,0,\,1\bigr)

    in the adapted layers; the others are those of the received model. The mixture is also the
    client's personal model.

    Source: zhang2023fedala, Algorithm 1, Eq. (4) and (5).

    Args:
        adapt: the adapted layers: comma-separated names of sub-modules or parameters, ``*`` for any
            text; "" for the head.
        lr: eta, learning rate of W, > 0. The paper has 1.
        steps: steps of W in each round, >= 0.
    Sent: nothing beyond the model.
    State: the last local model of each client.
    Cost: `steps` gradients on all examples of the client in each round, and in each evaluation of
        the clients.
    Laws: steps = 0 is FedAvg. A client that takes part for the first time begins at the received
        model.
    Deviations: W begins at 1 in each round, and each of its steps takes all examples of the client.
        The paper keeps W from round to round, and takes mini-batches of a share of the examples: as
        many as settle the loss in the second round, then one pass.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedala(steps=2)").local_start.lr
        1.0
    """

    adapt: str = param("")
    lr: float = param(1.0, gt=0.0)
    steps: int = param(10, ge=0)

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "zhang2023fedala"
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    is_personal_model: ClassVar[bool] = True

    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Return the mixture after the steps of W."""
        if self.steps == 0:
            return received
        step, last = arrival.all_examples_step(), leaves(arrival.client_state, "end")
        adapted = head_or(self.adapt, step.network.layout, self.name)
        change = {k: v - last[k] for k, v in received.items() if k in adapted}
        weights = {k: torch.ones_like(v) for k, v in change.items()}
        start = received
        for _ in range(self.steps):
            grads = step.task_grad(start, step.batch)
            weights = {
                k: (w - self.lr * grads[k] * change[k]).clamp(0.0, 1.0) for k, w in weights.items()
            }
            mixed = {k: last[k] + w * change[k] for k, w in weights.items()}
            start = {**received, **mixed}
        return start

    def init_client(self, start: Tree) -> State:
        """Return the received model."""
        return {"end": dict(start)}

    def next_client(self, round: Round) -> State:
        """Return the local model."""
        return {"end": dict(round.end)}
