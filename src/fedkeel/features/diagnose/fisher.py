"""Empirical Fisher information: which parameters a client's examples and earlier ones hold fast."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.base.dispatch import grad
from fedkeel.base.values import Values, count_of, map_values, rows_of
from fedkeel.engine.base import TrainingSetup
from fedkeel.features.diagnose.measured import RoundDiagnostics, mean
from fedkeel.features.diagnose.models import ModelState
from fedkeel.features.diagnose.observed_round import ObservedRound, some
from fedkeel.method.context import Ints
from fedkeel.task.batch import Batch
from fedkeel.task.losses import bce, cross_entropy, poisson, token_cross_entropy
from fedkeel.tree import Tree

ROUNDS = 10
"""Rounds before, whose clients' examples are the previous data."""

LIKELIHOODS = frozenset({cross_entropy, token_cross_entropy, bce, poisson})
"""Losses that are a negative log-likelihood, up to a factor and a constant."""

_AT_ONCE = 50
"""Examples whose gradients are taken at once."""


def fisher_information(setup: TrainingSetup, model: ModelState, x: Values, y: Values) -> Tensor:
    r"""Return [d] the mean of the squared gradients of each example's log-likelihood, in float64.

    .. math:: \frac{1}{|D|}\sum_{(x, y)} \left(\nabla_\theta\, y^T \log P_\theta(y \mid x)\right)^2

    Source: FedReg (Xu et al. 2022), Appendix B.3.

    Args:
        setup: the network and its loss, a negative log-likelihood.
        model: theta.
        x: inputs [N, ...].
        y: labels [N], or class probabilities [N, Y]; or what else the loss takes.
    """
    network = setup.training.network

    def loss(params: Tree, one_x: Values, one_y: Values) -> Tensor:
        batch = Batch(_one(one_x), _one(one_y))
        return network.loss(params, network.copy_buffers(model.buffers), batch, train=False)

    of_each = torch.func.vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    total: Tensor | float = 0.0
    for start in range(0, count_of(x), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        with warnings.catch_warnings():  # recurrent layers go one example at a time
            warnings.filterwarnings("ignore", message="There is a performance drop")
            slopes = of_each(model.params, rows_of(x, piece), rows_of(y, piece))
        squares = [slope.double().square().sum(dim=0).reshape(-1) for slope in slopes.values()]
        total = total + torch.cat(squares).cpu()
    return total / count_of(x) if isinstance(total, Tensor) else torch.zeros(0)


def _one(values: Values) -> Values:
    """Return an example as a batch of one."""
    return map_values(lambda tensor: tensor[None], values)


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation of two vectors [d]; NaN where one is constant."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def previous_rows(round: ObservedRound) -> Ints:
    """Return the rows of the training examples of the clients of the `ROUNDS` rounds before."""
    clients = sorted({client for row in round.rows[-ROUNDS:] for client in row.clients})
    federation = round.setup.federation
    return np.concatenate([federation.client(client) for client in clients] or [np.zeros(0, int)])


def measure_fisher(round: ObservedRound) -> RoundDiagnostics:
    """Return the Fisher information of each client after one local step, and its correlations.

    It is taken in the examples of the clients of the ten rounds before, in the client's own
    examples, and in the pseudo data of a method that makes them.
    """
    setup, most = round.setup, round.settings.examples
    rows = previous_rows(round)
    if not len(rows):
        return RoundDiagnostics()
    previous = some(setup.federation.data, rows, most, setup.seed)
    traces: dict[str, list[float]] = {}
    correlations: dict[str, dict[str, float]] = {}
    for client in round.clients.tolist():
        model = _after_one_step(round, client)
        current = some(setup.federation.data, setup.federation.client(client), most, setup.seed)
        sets = {"previous": (previous.x, previous.y), "own": (current.x, current.y)}
        sets |= _pseudo_data(round, client)
        by_data = {name: fisher_information(setup, model, x, y) for name, (x, y) in sets.items()}
        for name, values in by_data.items():
            traces.setdefault(name, []).append(float(values.sum()))
            if name != "previous":
                value = correlation(values, by_data["previous"])
                correlations.setdefault(name, {})[str(client)] = value
    numbers = {f"trace_{name}": mean(np.array(values)) for name, values in traces.items()}
    for name, by_client in correlations.items():
        numbers[f"correlation_{name}"] = mean(np.array([*by_client.values()]))
    return RoundDiagnostics(
        numbers, {f"correlation_{name}.client": values for name, values in correlations.items()}
    )


def _after_one_step(round: ObservedRound, client: int) -> ModelState:
    """Return the local model after one local step."""
    reply = round.observed.train(client, 1).reply
    buffers = reply.buffers or round.before.buffers
    return ModelState(tree.add(round.message.params, reply.update), buffers)


def _pseudo_data(round: ObservedRound, client: int) -> dict[str, tuple[Values, Values]]:
    """Return the pseudo data of a method that makes them, with their soft targets."""
    if not round.setup.training.plan.preparations:
        return {}
    for state in round.observed.prepared(client).values():
        x, y = state.get("pseudo_x"), state.get("pseudo_y")
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            few = slice(round.settings.examples)
            return {"pseudo": (x[few], y[few])}
    return {}
