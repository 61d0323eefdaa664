"""Drift, conflict and participation: what the updates of a round say by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedkeel import tree
from fedkeel.features.diagnose.measured import RoundDiagnostics, by_layer, mean
from fedkeel.features.diagnose.observed_round import ObservedRound
from fedkeel.features.diagnose.updates import (
    conflict_share,
    cosines,
    cosines_with_mean,
    distances_to_mean,
    gradient_diversity,
    gram,
    mean_norm,
    norms,
    pairwise,
)
from fedkeel.method.server_round import raw_weights
from fedkeel.tree import Tree


def measure_drift(round: ObservedRound) -> RoundDiagnostics:
    """Return how far the local models move, from the received model, their mean and the new model.

    ``norm`` is the mean norm of the K updates, ``norm_of_mean`` that of their weighted mean,
    ``to_mean`` the mean distance of the local models to their weighted mean, ``to_server`` that to
    the global model after the round, and ``diversity`` the gradient diversity of the updates.
    """
    matrix, p = gram(round.updates), round.p
    lengths = norms(matrix)
    step = tree.sub(round.after.params, round.message.params)
    to_server = norms(gram({k: u - step[k] for k, u in round.updates.items()}))
    numbers = {
        "norm": mean(lengths),
        "norm_of_mean": mean_norm(matrix, p),
        "to_mean": mean(distances_to_mean(matrix, p)),
        "to_server": mean(to_server),
        "diversity": gradient_diversity(matrix, p),
    }
    clients = map(str, round.clients.tolist())
    breakdowns = {
        "norm.client": dict(zip(clients, lengths.tolist(), strict=True)),
        "norm.layer": by_layer(round.updates, lambda part: mean(norms(gram(part)))),
        "diversity.layer": by_layer(round.updates, lambda part: gradient_diversity(gram(part), p)),
    }
    return RoundDiagnostics(numbers, breakdowns)


def measure_conflict(round: ObservedRound) -> RoundDiagnostics:
    """Return the angles between the updates of a round.

    ``share`` is the share of pairs with a negative inner product, ``cosine`` the mean cosine of
    pairs and ``cosine_min`` the least one, ``cosine_with_mean`` the mean cosine of an update with
    the weighted mean of all.
    """
    matrix, p = gram(round.updates), round.p
    pairs = pairwise(cosines(matrix))
    numbers = {
        "share": conflict_share(matrix),
        "cosine": mean(pairs),
        "cosine_min": float(np.nanmin(pairs.numpy())) if pairs.isfinite().any() else math.nan,
        "cosine_with_mean": mean(cosines_with_mean(matrix, p)),
    }
    breakdowns = {
        "share.layer": by_layer(round.updates, lambda part: conflict_share(gram(part))),
        "cosine.layer": by_layer(round.updates, _mean_cosine),
    }
    return RoundDiagnostics(numbers, breakdowns)


def _mean_cosine(part: Mapping[str, Tensor]) -> float:
    return mean(pairwise(cosines(gram(part))))


def measure_participation(round: ObservedRound) -> RoundDiagnostics:
    """Return how far the mean update of the cohort is from that of all clients.

    The clients that did not take part are trained from the same message and their own state, and
    leave no trace. ``distance`` is the norm of the difference of the two weighted means,
    ``relative`` the same over the norm of the mean over all clients, ``cosine`` the cosine between
    the two.

    Source: GC-Fed (the paper of `gcfed`), Figure 1(b).
    """
    of_cohort, of_all = _mean_of(round.updates, round.p), _mean_of_all(round)
    return RoundDiagnostics(
        _compared(of_cohort, of_all),
        {"relative.layer": by_layer(of_all, lambda part: _compared(of_cohort, part)["relative"])},
    )


def _mean_of(updates: Mapping[str, Tensor], p: Tensor) -> Tree:
    """Return the weighted mean of updates [K, ...], in float64."""
    return {k: torch.tensordot(p.to(u.device), u.double(), dims=1) for k, u in updates.items()}


def _mean_of_all(round: ObservedRound) -> Tree:
    """Return the weighted mean of the updates of all clients."""
    setup = round.setup
    rows = {client: row for row, client in enumerate(round.clients.tolist())}
    total: Tree = {k: u[0].double() * 0.0 for k, u in round.updates.items()}
    weight = 0.0
    for client in np.flatnonzero(setup.federation.sizes).tolist():
        size = setup.federation.sizes[[client]]
        trained = None if client in rows else round.observed.train(client)
        if trained is None:
            update = {k: u[rows[client]] for k, u in round.updates.items()}
            processed = round.processed[[rows[client]]]
        else:
            if not bool(trained.reply.finite):
                continue
            update, processed = trained.reply.update, np.array([trained.examples])
        share = float(raw_weights(setup.training.plan.weights, size, processed)[0])
        total = {k: t + share * update[k].double() for k, t in total.items()}
        weight += share
    return tree.scale(total, 1.0 / weight)


def _compared(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """Return how far `a` is from `b`, on the tensors of `b`."""
    difference = math.sqrt(sum(float((a[k] - v).square().sum()) for k, v in b.items()))
    length = math.sqrt(sum(float(v.square().sum()) for v in b.values()))
    other = math.sqrt(sum(float(a[k].square().sum()) for k in b))
    product = sum(float((a[k] * v).sum()) for k, v in b.items())
    return {
        "distance": difference,
        "relative": difference / length if length else math.nan,
        "cosine": product / (length * other) if length and other else math.nan,
    }
