"""FedProto across networks of different depths, from Tan et al. 2022, Eq. (3), (6) and (7)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

import fedkeel as fk
from fedkeel.engine.base import ClientJob
from fedkeel.engine.client_inputs import batch_plans
from fedkeel.engine.prepared import Prepared
from fedkeel.method.context import Message
from fedkeel.runner.start import start
from papers.numpy_layers import Layers, Stack, gradient, layers_of, moved, outputs
from papers.numpy_net import softmax
from toys import federation, prepared

LR, ROUNDS, FEATURES, CLASSES = 0.2, 4, 6, 3
DEEP = {"deep": fk.ClientNetwork(partial(Stack, 5, 4, FEATURES, CLASSES), clients=[1, 2, 5])}


def run_of(method: str, **options: object) -> Prepared:
    return prepared(
        method,
        partial(Stack, 5, FEATURES, CLASSES),
        others=DEEP,
        rounds=ROUNDS,
        local=fk.Local(lr=LR, epochs=2, batch_size=4),
        dtype="float64",
        client_models="all",
        **options,
    )


def batches(run: Prepared, client: int, round: int, steps: int) -> Iterator[np.ndarray]:
    """The rows of each mini-batch, which the engine draws."""
    message, job = Message({}, {}, {}, round, LR), ClientJob(0, client, steps)
    rows = run.setup.federation.client(client)
    return (rows[positions] for positions in batch_plans(run.setup, message, [job])[0])


def restated(run: Prepared, cohorts: list[list[int]], lam: float) -> dict[int, Layers]:
    """The clients' models after rounds of these cohorts."""
    data = run.setup.federation.data
    x, y = data.x.numpy(), data.y.numpy()
    models: dict[int, Layers] = {}
    prototypes: dict[int, np.ndarray] = {}
    for t, cohort in enumerate(cohorts):
        found: dict[int, list[np.ndarray]] = {}
        for k in cohort:
            layers = models.get(k) or layers_of(run.setup.of(k).training.network.params)
            for rows in batches(run, k, t, 0):
                labels = y[rows]
                inputs, scores = outputs(layers, x[rows])
                features = inputs[-1]
                near = [prototypes.get(c, f) for c, f in zip(labels, features, strict=True)]
                d_features = 2.0 * lam * (features - np.stack(near)) / features.size
                d_scores = (softmax(scores) - np.eye(CLASSES)[labels]) / len(labels)
                layers = moved(layers, gradient(layers, x[rows], d_scores, d_features), LR)
            models[k] = layers
            own = run.setup.federation.client(k)
            features = outputs(layers, x[own])[0][-1]
            for c in np.unique(y[own]):
                found.setdefault(int(c), []).append(features[y[own] == c].mean(axis=0))
        prototypes |= {c: np.mean(rows, axis=0) for c, rows in found.items()}
    return models


@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_clients_of_two_depths_follow_the_paper(lam: float) -> None:
    run = run_of(f"fedproto(lam={lam})")
    result = start(run)
    models = restated(run, [row.clients for row in result.rows[1:]], lam)
    depths = {len(layers) for layers in models.values()}
    assert depths == {2, 3}
    for k, layers in models.items():
        state = list(result.client_model(str(k)).values())
        expected = [array for layer in layers for array in layer]
        for tensor, array in zip(state, expected, strict=True):
            np.testing.assert_allclose(tensor.numpy(), array, rtol=0, atol=1e-10)


def test_each_kind_of_network_learns_of_the_other() -> None:
    """Clients of one network end elsewhere where those of the other one send other prototypes."""
    clients = federation()
    with_others, without = (
        start(run_of("fedproto(lam=5.0)", clients=clients, cohort=cohort))
        for cohort in (fk.Cohort(), fk.Cohort(new_clients=(1, 2, 5)))
    )
    for k in ("0", "3", "4"):
        a, b = with_others.client_model(k), without.client_model(k)
        assert max(float((a[name] - b[name]).abs().max()) for name in a) > 1e-3
