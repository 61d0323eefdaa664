"""FedAMP: each client is drawn to a mixture of the models of clients that are like it.

Source
    Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021 (key
    huang2021fedamp). Algorithm 1, the formulas for u and for w in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import torch
from fedkeel.method.context import Arrival, Floats, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import (
    Broadcast,
    ClientState,
    LocalStart,
    Penalty,
    ReceivedModel,
    ServerOptimiser,
)
from fedkeel.solve.span import Span, combine
from fedkeel.tree import State, Tree, leaf, leaves


@dataclass(frozen=True)
class FedAMP(ReceivedModel, LocalStart, Penalty, ClientState, Broadcast, ServerOptimiser):
    r"""Sends each client a mixture of all clients' models, and draws the client's own model to it.

    .. math::
        u_k &= \Bigl(1 - \sum_{j\ne k} a_{kj}\Bigr) w_k + \sum_{j\ne k} a_{kj} w_j, \qquad
        a_{kj} = \frac\alpha\sigma\, e^{-\lVert w_k - w_j\rVert^2/\sigma} \\
        w_k &\leftarrow \operatorname*{arg\,min}_w\; F_k(w)
        + \frac\lambda{2\alpha}\lVert w - u_k\rVert^2

    so that clients with similar models draw each other, and others do not. :math:`w_k` is the
    client's personal model, at which its next round begins. It is for few clients that all take
    part, such as hospitals.

    Source: huang2021fedamp, Algorithm 1.

    Args:
        alpha: step size of the mixture, > 0.
        sigma: squared distance of two models over which the attention falls to 1/e, > 0.
            ``fedamp.distance`` of a round is the mean over pairs, by which it can be chosen.
        lam: lambda, >= 0; lambda / alpha is the weight of the proximal term, in units of 1 /
            learning rate.
    Sent: a model of its own to each client, in place of the global one; it sends the difference.
    State: the model of each client, at the client and at the server: C models, which the server
        keeps in memory. Their mean is the server's model.
    Cost: one pass over the C models for their distances, one for each mixture, twice a round.
    Laws: lam = 0 is local training on only the client's examples. Where all models are far apart
        (sigma is small), u is the client's own model of the round before.
    Deviations: where the attention that a client pays to others adds up to more than 1, it is
        scaled to 1 and counted, so that u stays between the models; the paper chooses alpha that
        small. The paper minimises exactly; here it is the configured local training, as in the
        public codes. A client that has not taken part pays attention and receives none.
        Running statistics of batch normalisation stay at the clients. A federation of nodes is
        refused, as it sends one message to all.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("fedamp(alpha=0.5, lam=0.05)").receiver.pull
        0.1
    """

    alpha: float = param(0.5, gt=0.0)
    sigma: float = param(10.0, gt=0.0)
    lam: float = param(0.05, ge=0.0)

    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "huang2021fedamp"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.SEPARATE_UPDATES}
    )
    breaks: ClassVar[frozenset[Capability]] = frozenset({Capability.LINEAR_ACCUMULATION})
    traits: ClassVar[Traits] = Traits(
        is_personal_model=True, keeps_statistics=True, sends_rows=True
    )

    def received(self, sent: Tree, arrival: Arrival) -> Tree:
        """Return u, the client's row of the message."""
        client = arrival.client_info.client
        return {name: rows[client] for name, rows in leaves(arrival.broadcast, "u").items()}

    def local_start(self, received: Tree, arrival: Arrival) -> Tree:
        """Return the client's own model; u where it takes part for the first time."""
        return leaves(arrival.client_state, "w")

    @property
    def pull(self) -> float:
        """Return lambda / alpha."""
        return self.lam / self.alpha

    def penalty_gradient(self, params: Tree, step: Step) -> Tree:
        """Return lambda / alpha (w - u)."""
        return tree.map(lambda w, u: self.pull * (w - u), params, step.start)

    def init_client(self, start: Tree) -> State:
        """Return u, the received model."""
        return {"w": dict(start)}

    def next_client(self, round: Round) -> State:
        """Return w."""
        return {"w": dict(round.end)}

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return the global model for each of the C clients, none of which has taken part."""
        count, like = population.clients, next(iter(params.values()))
        models = {name: t.expand(count, *t.shape).clone() for name, t in params.items()}
        return {"w": models, "seen": like.new_zeros(count)}

    def message(self, state: State) -> State:
        """Return u of each client, tensors [C, ...]."""
        mix, _ = self._mixture(state)
        return {"u": {name: combine(mix, rows) for name, rows in leaves(state, "w").items()}}

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the mean of the clients' models, and the models: u and what was added to it."""
        mix, limited = self._mixture(cohort.state)
        cohort.log("limited", limited)
        here, added = torch.from_numpy(cohort.clients), updates.materialise()
        models: Tree = {}
        for name, rows in leaves(cohort.state, "w").items():
            begun = combine(mix[cohort.clients], rows)
            models[name] = rows.index_copy(0, here.to(rows.device), begun + added[name])
        seen = leaf(cohort.state, "seen").clone()
        seen[here.to(seen.device)] = 1.0
        known = seen.double().cpu().numpy()
        squares = squared_distances(models)[np.ix_(known > 0.0, known > 0.0)]
        pairs = max(len(squares) * (len(squares) - 1), 1)
        cohort.log("distance", squares.sum() / pairs)
        mean = Span(models).sum(known / known.sum())
        return mean, {"w": models, "seen": seen}

    def _mixture(self, state: State) -> tuple[Floats, int]:
        """Return [C, C] the shares of the models in each u, and how many clients were limited."""
        seen = leaf(state, "seen").double().cpu().numpy()
        attention = np.exp(-squared_distances(leaves(state, "w")) / self.sigma) * seen
        attention *= self.alpha / self.sigma
        np.fill_diagonal(attention, 0.0)
        total = attention.sum(axis=1)
        attention /= np.maximum(total, 1.0)[:, None]
        return attention + np.diag(1.0 - attention.sum(axis=1)), int((total > 1.0).sum())


def squared_distances(models: Tree) -> Floats:
    """Return [C, C] squared distances of models [C, ...]."""
    centred = {name: rows - rows.mean(dim=0) for name, rows in models.items()}
    gram = Span(centred).gram(list(centred))
    squares = np.diagonal(gram)
    return np.asarray(np.maximum(squares[:, None] + squares[None] - 2.0 * gram, 0.0))
