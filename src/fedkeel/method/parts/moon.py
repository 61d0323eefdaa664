"""MOON: keep the features near the received model's and away from the client's last ones.

Source
    Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021 (key li2021moon). Eq. (3),
    Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedkeel import tree
from fedkeel.base.lazy import F, Tensor, torch
from fedkeel.method.context import Round, Step
from fedkeel.method.part import Capability, param
from fedkeel.method.roles import ClientState, LossTerm
from fedkeel.task.batch import Output
from fedkeel.tree import State, Tree


@dataclass(frozen=True)
class Moon(LossTerm, ClientState):
    r"""Adds a contrastive loss between the received model's features and the client's last ones.

    .. math:: -\mu\log\frac{e^{\cos(z, z_t)/\tau}}
        {e^{\cos(z, z_t)/\tau} + e^{\cos(z, z_k)/\tau}}

    where z are the features of an example: the inputs of the classifier; z_t those of the received
    model, and z_k those of the client's local model after the last round in which it took part.

    Source: li2021moon, Eq. (3), Algorithm 1.

    Args:
        mu: weight of the term, >= 0. The paper tunes {0.1, 1, 5, 10}.
        tau: temperature, > 0; 0.5 in the paper.
    Sent: nothing beyond the model.
    State: the last local model for each client, one model.
    Cost: forward passes of the received model and of the last local model for each step.
    Laws: mu = 0 is FedAvg, bit for bit. A client's first round is FedAvg's, to rounding: its last
        model is then the received one, and the term is log 2 for all features.
    Deviations: the paper's features are the outputs of a projection head of two layers, which it
        adds to the network: add one before the classifier to have the same. A client that takes
        part for the first time has no last model; the public code gives it the initial one, which
        the server would have to send to it: here it is the received one, in round 1 the same. The
        public code can keep several last models of a client; here it is one. With
        batch normalisation the last model uses the received model's statistics.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("moon(mu=5.0)+momentum").expression
        'moon(mu=5.0)+momentum'
    """

    mu: float = param(1.0, ge=0.0)
    tau: float = param(0.5, gt=0.0)

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "li2021moon"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.FEATURES})

    def loss_term(self, output: Output, params: Tree, step: Step) -> Tensor:
        """Return the weighted contrastive loss of each example."""
        network, buffers = step.network, step.network.copy_buffers(step.received)
        with torch.no_grad():
            past = tree.leaves(step.client_state, "last")
            last = network.output(past, buffers, step.batch, train=False)
        near, far = (
            F.cosine_similarity(_features(output), _features(other), dim=1)
            for other in (step.teacher(), last)
        )
        return -self.mu * F.logsigmoid((near - far) / self.tau)

    def init_client(self, start: Tree) -> State:
        """Return the received model, for a client that has no last one."""
        return {"last": dict(start)}

    def next_client(self, round: Round) -> State:
        """Return the local model after the last step."""
        return {"last": dict(round.end)}


def _features(output: Output) -> Tensor:
    return cast(Tensor, output.features)  # FEATURES
