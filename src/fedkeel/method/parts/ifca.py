"""IFCA: several models at the server, of which each client trains the one that fits it best.

Source
    Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020 (key
    ghosh2020ifca). Algorithm 1, with model averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedkeel import tree
from fedkeel.base.lazy import Tensor, torch
from fedkeel.base.rng import generator
from fedkeel.config import Weights
from fedkeel.method.context import Arrival, Population, Round, RoundCohort, Step
from fedkeel.method.part import Capability, Traits, param
from fedkeel.method.roles import Broadcast, Carry, ReceivedModel, ServerOptimiser, Upload
from fedkeel.solve.span import Span
from fedkeel.task.batch import batch_mean
from fedkeel.tree import State, Tree, leaf

PIECE = 1000
"""Examples of which the loss is computed at a time."""


@dataclass(frozen=True)
class IFCA(ReceivedModel, Carry, Upload, Broadcast, ServerOptimiser):
    r"""Has a model for each cluster; a client trains the one with the least loss on its examples.

    .. math::
        j_k = \operatorname*{arg\,min}_{j}\; F_k(\theta_j^t),\qquad
        \theta_j^{t+1} = \theta_j^t + \operatorname*{mean}_{k:\,j_k = j} \Delta_k

    where the update is the difference to the model that the client has chosen. No server knows in
    advance which clients belong together. The chosen model is also the client's personal model.

    Source: ghosh2020ifca, Algorithm 1, model averaging.

    Args:
        clusters: number of models, >= 1.
        spread: s, how far apart the models begin, >= 0. Model j begins at theta + s (theta_j -
            theta), where theta_j has the entries of each tensor of theta in another order: at 1 the
            models are as good as drawn anew, and at 0 they are equal. Take less for a model that
            is trained already.
    Sent: all models to each client; which one it has chosen, as 0 and 1 for each model, back.
    State: all models but the first one, which is the global model, at the server.
    Cost: a forward pass of each model over all examples of the client in each round, and in each
        evaluation of the clients.
    Laws: clusters = 1 is FedAvg, bit for bit, and so is the first round with spread = 0: of equal
        losses the first counts. A model that nobody has chosen stays as it is. As long as nobody
        changes, each cluster is FedAvg of its own clients.
    Deviations: the paper draws each model anew, or starts several times and keeps the best start.
        Where a shuffle changes nothing, as with a last layer of zeros, all models predict the same,
        and everybody chooses the first one. The loss of all examples counts, by the task's loss in
        evaluation mode, also where another part replaces that loss; the paper allows a subset. The
        paper's other form sends gradients, and is `local.steps = 1` with all examples. Running
        statistics of batch normalisation stay at the clients.

    Example:
        >>> import fedkeel
        >>> fedkeel.parse("ifca(clusters=4)+fedprox").receiver.clusters
        4
    """

    clusters: int = param(2, ge=1)
    spread: float = param(1.0, ge=0.0)

    name: ClassVar[str] = "ifca"
    paper: ClassVar[str] = "ghosh2020ifca"
    weights: ClassVar[Weights | None] = "uniform"
    needs: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PER_CLIENT_UPDATES, Capability.SEPARATE_UPDATES}
    )
    traits: ClassVar[Traits] = Traits(is_personal_model=True, keeps_statistics=True)

    def received(self, sent: Tree, arrival: Arrival) -> Tree:
        """Return the model with the least loss, and note which one it is."""
        if self.clusters == 1:
            arrival.noted["chosen"] = next(iter(sent.values())).new_ones(1)
            return sent
        models, step = self._models(sent, arrival.broadcast), arrival.all_examples_step()
        losses = torch.stack([mean_loss(step, model) for model in models])
        best = losses.nan_to_num(nan=torch.inf).argmin()
        arrival.noted["chosen"] = torch.nn.functional.one_hot(best, len(models)).to(losses.dtype)
        return models[int(best)]

    def init_carry(self, start: Tree, client_state: State) -> State:
        """Return which model was chosen."""
        return {"chosen": leaf(client_state, "chosen")}

    def next_carry(self, before: Tree, carry: State) -> State:
        """Return which model was chosen: steps do not change it."""
        return carry

    def upload(self, round: Round) -> State:
        """Return which model was chosen, [clusters] of 0 and 1."""
        return {"chosen": leaf(round.carry, "chosen")}

    def init_optimiser(self, params: Tree, population: Population) -> State:
        """Return all models but the first one, tensors [clusters - 1, ...]."""
        return self._others([self._begun(params, j) for j in range(self.clusters)])

    def message(self, state: State) -> State:
        """Return all models but the first one."""
        return state

    def apply(
        self, params: Tree, update: Tree, updates: Span, cohort: RoundCohort
    ) -> tuple[Tree, State]:
        """Return the models, each with the mean update of the clients that have chosen it."""
        chosen = leaf(cohort.uploads, "chosen").argmax(dim=1).cpu().numpy()
        models = self._models(params, cohort.state)
        for j, model in enumerate(models):
            is_here = chosen == j
            cohort.log(f"clients_{j}", float(is_here.sum()))
            if is_here.any():
                weights = np.where(is_here, cohort.weights, 0.0)
                weights = weights if is_here.all() else weights / weights.sum()
                models[j] = tree.add(model, updates.sum(weights))
        return models[0], self._others(models)

    def _begun(self, params: Tree, number: int) -> Tree:
        """Return where a model begins."""
        if number == 0:
            return params
        draw = generator(0, self.name, number)

        def moved(tensor: Tensor) -> Tensor:
            order = torch.from_numpy(draw.permutation(tensor.numel())).to(tensor.device)
            shuffled = tensor.reshape(-1)[order].reshape(tensor.shape)
            return tensor + self.spread * (shuffled - tensor)

        return tree.map(moved, params)

    def _models(self, first: Tree, others: State) -> list[Tree]:
        """Return all models, the first one and those of [clusters - 1, ...]."""
        rows = {} if self.clusters == 1 else tree.leaves(others, "models")
        return [first, *({k: t[j] for k, t in rows.items()} for j in range(self.clusters - 1))]

    def _others(self, models: list[Tree]) -> State:
        """Return all models but the first one as tensors [clusters - 1, ...]."""
        return {} if self.clusters == 1 else {"models": dict(tree.stack(models[1:]))}


def mean_loss(step: Step, model: Tree) -> Tensor:
    """Return [] the mean task loss of a model over the examples of a step, in evaluation mode."""
    total = count = torch.zeros((), dtype=step.network.dtype)
    for piece, weight in step.pieces(PIECE):
        losses = step.network.task_losses(piece.output(model).returned, piece.batch.y)
        total, count = total + weight * batch_mean(losses, piece.batch), count + weight
    return total / count
