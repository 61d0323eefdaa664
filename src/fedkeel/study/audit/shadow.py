"""Membership inference with runs of the attacker's own, on halves of the clients' examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedkeel.base.rng import generator
from fedkeel.data.federation import Federation
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.method.context import Floats, Ints
from fedkeel.runner.prepare import prepare
from fedkeel.study.audit.membership import Bools, Separation, confidences, lira_scores, separation
from fedkeel.study.audit.observation import overhear_model


def half_of_each_client(federation: Federation, random: np.random.Generator) -> Federation:
    """Return a federation with a random half of each client's examples, one at least."""
    kept: list[Ints] = []
    for client in range(len(federation)):
        rows = federation.client(client)
        number = max((len(rows) + 1) // 2, 1) if len(rows) else 0
        kept.append(np.sort(random.permutation(rows)[:number]))
    offsets = np.concatenate([[0], np.cumsum([len(rows) for rows in kept])]).astype(np.int64)
    return replace(
        federation,
        rows=np.concatenate(kept).astype(np.int64),
        offsets=offsets,
        holdout_rows=None,
        holdout_offsets=None,
    )


def lira(
    prepared: Prepared,
    round: int,
    runs: int,
    seed: int,
    on_run: Callable[[int], None] = lambda _: None,
) -> Separation:
    """Return how well likelihood ratios tell members, each run being the target once.

    Args:
        prepared: the run that is attacked; the runs have its settings, each with another seed,
            which decides its initial model, batches, cohorts and noise.
        round: rounds that each run makes.
        runs: number of runs.
        seed: seed of the halves.
        on_run: called with the number of each run that is done.
    """
    federation = prepared.setup.federation
    x, y = federation.data.x, federation.data.y
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise TypeError("several tensors by name")
    every = np.sort(federation.rows)
    index = torch.from_numpy(every)
    confidence: list[Floats] = []
    members: list[Bools] = []
    for run in range(runs):
        part = half_of_each_client(federation, generator(seed, "audit.shadow", run))
        ingredients = _with_clients(prepared.ingredients, part)
        # the attacker knows neither the seed nor, so, the noise that it decides
        settings = prepared.settings.model_copy(update={"seed": prepared.settings.seed + run})
        shadow = prepare(settings, ingredients)
        params, buffers = overhear_model(shadow, round)
        network = shadow.setup.training.network
        buffers = buffers or network.buffers
        confidence.append(confidences(network, params, buffers, x[index], y[index]))
        members.append(np.isin(every, part.rows))
        on_run(run + 1)
    scores, truth = lira_scores(np.stack(confidence), np.stack(members))
    return separation(scores[truth], scores[~truth])


def _with_clients(ingredients: Ingredients, clients: Federation) -> Ingredients:
    return replace(ingredients, clients=lambda seed: clients)
