"""How the baselines `local` and `centralised` train."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkeel import config
from fedkeel.data import batches
from fedkeel.data.cohort import select
from fedkeel.errors import counted
from fedkeel.features.baselines.declaration import BaselinesDeclaration
from fedkeel.method.context import Ints
from fedkeel.method.local_training import ClientTraining
from fedkeel.records.baselines import LOCAL


def goes_on(training: ClientTraining) -> ClientTraining:
    """Return local training whose optimiser goes on from round to round."""
    return replace(training, local=training.local.model_copy(update={"keep_state": True}))


def shares_nothing(training: ClientTraining) -> ClientTraining:
    """Return local training of which nothing is shared."""
    network = training.network
    buffers = "local" if network.buffers else training.buffers
    return replace(training, personal=frozenset(network.names), buffers=buffers)


def pooled_work(local: config.Local, settings: config.Run, sizes: Ints) -> config.Local:
    """Return how the examples of all clients are trained on in one place.

    Batches have the size of a client's, and one pass over all examples follows another. A round
    makes as many steps as the clients of a round make together: the mean over the run's rounds,
    rounded. Where a batch has all examples of a client, it has those of all clients here, so a
    round makes as many steps as one client, which takes as many examples.

    Args:
        local: how clients train.
        settings: of the run.
        sizes: [C] number of examples of each client.
    """
    kinds, kind_of_client = np.unique(sizes, return_inverse=True)
    steps = np.array([batches.count_steps(local, int(n)) if n else 0 for n in kinds])
    steps_of_client, total = steps[kind_of_client], 0.0
    for round in range(settings.rounds):
        clients = select(settings.cohort, sizes, settings.seed, round).clients
        of_round = steps_of_client[clients[sizes[clients] > 0]]
        if len(of_round):
            total += of_round.mean() if local.batch_size == "all" else of_round.sum()
    per_round = max(1, round_half_up(total / settings.rounds))
    return local.model_copy(update={"epochs": None, "steps": per_round, "sampling": "continue"})


def round_half_up(value: float) -> int:
    """Return the nearest whole number, the upper one of two."""
    return int(np.floor(value + 0.5))


def described(method: str, local: config.Local) -> str:
    """Return a baseline in words, one line each.

    Args:
        method: its name.
        local: how its clients train, or the one place.
    """
    lines = [f"baseline {method}: {BaselinesDeclaration.baselines[method]}"]
    if method != LOCAL:
        steps = counted(local.steps or 0, "step")
        size = "all examples" if local.batch_size == "all" else f"batches of {local.batch_size}"
        lines.append(f"  a round: {steps}, {size}, one pass over all examples after another")
    lines.append("  the local optimiser goes on from round to round; nothing is sent")
    return "\n".join(lines)
