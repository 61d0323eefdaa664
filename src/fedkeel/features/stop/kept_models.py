"""The clients' own models, which a run leaves when it is finished."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkeel.engine.base import ServerModel, TrainingEngine, TrainingSetup
from fedkeel.engine.prepared import Prepared
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.round_values import Server
from fedkeel.records.client_models import client_files
from fedkeel.tree import Tree, nbytes

MOST_BYTES = 256 * 1024**2
"""Bytes of all clients' models together that are kept without being asked for."""


def client_models(
    engine: TrainingEngine, prepared: Prepared, server: Server
) -> Iterator[tuple[str, Tree]]:
    """Yield the file of each client that has a model of its own, and the state dict of the module.

    A client that has never taken part has none where it would have untrained parameters.

    Args:
        engine: keeps what clients keep.
        prepared: the run.
        server: after the last round.
    """
    if not _are_kept(prepared) or not getattr(engine, "has_client_models", True):
        return
    setup = prepared.setup
    names = setup.federation.names or [str(k) for k in range(len(setup.federation))]
    files = client_files(names)
    model = ServerModel.of(prepared.plan, server)
    training, plan = setup.training, prepared.plan
    keeps = (
        bool(training.personal) or plan.local_model is not None or bool(training.network.buffers)
    )
    are_sent = plan.receiver is not None and not keeps and not plan.client_states
    for client in range(len(setup.federation)):
        if prepared.is_whole or are_sent or engine.client_state(client) is not None:
            network = setup.of(client).training.network
            yield files[client], network.state_dict(*engine.personal_model(setup, model, client))


def _are_kept(prepared: Prepared) -> bool:
    """Return whether the run leaves its clients' models."""
    choice, plan = prepared.settings.engine.client_models, prepared.plan
    is_same = prepared.is_whole and not plan.has_personal_models
    if choice == "none" or is_same or plan.personal_prediction is not None:
        return False
    return choice == "all" or _bytes_of_all(prepared.setup) <= MOST_BYTES


def _bytes_of_all(setup: TrainingSetup) -> int:
    """Return the bytes of all clients' models together."""

    def size(training: ClientTraining) -> int:
        return nbytes(dict(training.network.initial_state()))

    clients, own = len(setup.federation), size(setup.training)
    if setup.others is None:
        return own * clients
    sizes = np.array([own, *map(size, setup.others.trainings)])
    return int(sizes[setup.others.of_client].sum())
