"""The baselines: each client alone, and the examples of all in one place, are plain training."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.data import batches
from fedkeel.data.cohort import select
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import CompositionError, RunError
from fedkeel.features.baselines.training import pooled_work
from fedkeel.method.grammar import parse
from fedkeel.records.folder import BEST_MODEL, MODEL
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from toys import Net, federation, held, plain, prepared, same

ROUNDS = 3
LOCAL = fk.Local(
    lr=0.1,
    epochs=1,
    batch_size=4,
    momentum=0.9,
    nesterov=True,
    weight_decay=0.01,
    schedule=config.Schedule(kind="cosine"),
)
EACH = fk.Evaluation(batch_size=16, clients_every=1)


def run_of(method: str, **more: object) -> Prepared:
    values = {"rounds": ROUNDS, "local": LOCAL, "evaluation": EACH, "dtype": "float64"}
    return prepared(method, **{**values, **more})


class Plain:
    """A model that is trained only with torch; its optimiser goes on from round to round."""

    def __init__(self, ready: Prepared) -> None:
        self.module = Net().double()
        self.module.load_state_dict(ready.setup.training.network.params)
        self.optimiser = torch.optim.SGD(
            self.module.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.01
        )
        self.steps = 0

    def train(self, x: Tensor, y: Tensor, positions: list[np.ndarray], round: int) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = 0.1 * (1 + np.cos(np.pi * round / ROUNDS)) / 2
        for batch in positions:
            self.optimiser.zero_grad()
            nn.functional.cross_entropy(self.module(x[batch]), y[batch]).backward()
            self.optimiser.step()
        self.steps += len(positions)

    def loss(self, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.module(x.double()), y))


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-12


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
def test_centralised_is_plain_training_on_all_examples(kind: str) -> None:
    ready = run_of("centralised", kind=kind, workers=None if kind == "sequential" else 2)
    clients, local = ready.clients, ready.setup.training.local
    data, test, model = clients.data, held(), Plain(ready)
    x, y = data.x[clients.rows], data.y[clients.rows]
    result = start(ready)
    for round in range(ROUNDS):
        positions = batches.plan(local, len(x), 0, round, 0, model.steps)
        model.train(x, y, positions, round)
        row = result.rows[round + 1]
        assert close(row.test["loss"], model.loss(test.x, test.y))
        assert row.per_client is not None
        for k, loss in enumerate(row.per_client["loss"]):
            rows = clients.client(k)
            assert close(loss, model.loss(data.x[rows], data.y[rows]))
    for name, tensor in model.module.state_dict().items():
        assert (result.params[name] - tensor).abs().max() <= 1e-12
    assert sum(row.steps for row in result.rows) == model.steps


@pytest.mark.parametrize("kind", ["sequential", "workers", "vectorized"])
@pytest.mark.parametrize("per_round", [6, 2])
def test_local_is_plain_training_of_each_client_alone(kind: str, per_round: int) -> None:
    """In the rounds in which it would take part, on the batches that it would have."""
    workers = None if kind == "sequential" else 2
    ready = run_of("local", per_round=per_round, kind=kind, workers=workers)
    clients, test = ready.clients, held()
    data, models = clients.data, [Plain(ready) for _ in range(len(clients))]
    result = start(ready)
    for round in range(ROUNDS):
        chosen = select(fk.Cohort(clients=per_round), clients.sizes, 0, round).clients
        for k in chosen.tolist():
            rows = clients.client(k)
            positions = batches.plan(LOCAL, len(rows), 0, round, k)
            models[k].train(data.x[rows], data.y[rows], positions, round)
        row = result.rows[round + 1]
        assert row.clients == chosen.tolist()
        mean = statistics.fmean(model.loss(test.x, test.y) for model in models)
        assert close(row.test["loss"], mean)
        assert row.per_client is not None
        for k, loss in enumerate(row.per_client["loss"]):
            rows = clients.client(k)
            assert close(loss, models[k].loss(data.x[rows], data.y[rows]))


def test_each_client_is_measured_on_what_it_holds_out() -> None:
    whole = federation()
    divided = whole.hold_out(0.4, 0)
    for method in ("local", "centralised"):
        ready = run_of(method, clients=divided, rounds=1)
        columns = start(ready).rows[-1].per_client
        assert columns is not None
        assert columns["examples"] == np.diff(divided.holdout_offsets).tolist()
    alone = divided.only(2)
    offsets = divided.holdout_offsets
    assert alone.client(0).tolist() == divided.client(2).tolist()
    assert alone.holdout_rows.tolist() == divided.holdout_rows[offsets[2] : offsets[3]].tolist()
    together = divided.in_one_place()
    assert (len(together), together.sizes.tolist()) == (1, [divided.sizes.sum()])


def test_batch_normalisation_is_each_client_s_own() -> None:
    """Of clients with the same examples and batches the models are the same, buffers and all."""
    data = fk.dataset(held(12).x, held(12).y, classes=3)
    clients = fk.federation(data, [np.arange(12)] * 2)
    norm = {"model": lambda: Net(norm=True), "buffers": "average", "clients": clients}
    local = fk.Local(lr=0.1, steps=2, batch_size="all")
    alone = start(run_of("local", per_round=2, local=local, **norm))
    together = start(run_of("fedavg", per_round=2, local=local, **norm))
    for a, b in zip(alone.rows, together.rows, strict=True):
        assert close(a.test["loss"], b.test["loss"])


@pytest.mark.parametrize("method", ["local", "centralised"])
@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_baseline_goes_on_with_the_same_bits(tmp_path: Path, method: str, state: str) -> None:
    class Stops(Callback):
        def on_round_end(self, row: object, model: object) -> None:
            raise KeyboardInterrupt

    ready = run_of(method, state=state)
    whole = start(ready)
    for _ in range(ROUNDS - 1):
        with pytest.raises(KeyboardInterrupt):
            start(ready, tmp_path, resume=True, callbacks=[Stops()])
    result = start(ready, tmp_path, resume=True)
    assert same(result, whole)
    assert plain(start(ready, tmp_path)) == plain(whole)


def test_the_models_of_baselines(tmp_path: Path) -> None:
    result = start(run_of("centralised"), tmp_path / "one")
    assert (tmp_path / "one" / BEST_MODEL).exists()
    assert all(torch.equal(result.state_dict()[k], v) for k, v in result.params.items())
    result = start(run_of("local"), tmp_path / "many")
    again = start(run_of("local"), tmp_path / "many")
    assert not (tmp_path / "many" / MODEL).exists()
    for found in (result, again):
        assert found.record.best_model is None
        for model in (found.state_dict, found.best_state_dict):
            with pytest.raises(RunError, match="'local' has no single model"):
                model()


def test_nothing_is_sent() -> None:
    for method in ("local", "centralised"):
        result = start(run_of(method))
        assert all(row.bytes_down == row.bytes_up == {} for row in result.rows)
        assert result.record.estimate.down == result.record.estimate.up == {}
        assert (result.record.citations, result.record.bibtex) == ([], "")


@pytest.mark.parametrize(
    ("local", "cohort", "expected"),
    [
        # 3, 4 and 5 batches of 2 of clients of 5, 8 and 10
        ({"epochs": 1, "batch_size": 2}, {}, 12),
        ({"epochs": 3, "batch_size": 2}, {}, 36),
        ({"steps": 7, "batch_size": 2}, {}, 21),
        ({"steps": 7, "batch_size": 2}, {"clients": 2}, 14),
        ({"epochs": 2, "batch_size": "all"}, {}, 2),
        # one client a round, the mean over rounds; a half is rounded up
        ({"epochs": 1, "batch_size": 2}, {"clients": 1}, None),
    ],
)
def test_steps_of_all_clients_together(
    local: dict[str, object], cohort: dict[str, int], expected: int | None
) -> None:
    settings = config.Run(
        method="centralised",
        rounds=4,
        local=fk.Local(lr=0.1, **local),
        cohort=fk.Cohort(**cohort),
    )
    sizes = np.array([5, 8, 10])
    if expected is None:
        chosen = [int(select(settings.cohort, sizes, 0, t).clients[0]) for t in range(4)]
        expected = int(sum([3, 4, 5][k] for k in chosen) / 4 + 0.5)
    work = pooled_work(settings.local, settings, sizes)
    assert (work.steps, work.epochs, work.sampling) == (expected, None, "continue")
    assert work.batch_size == local["batch_size"]


@pytest.mark.parametrize("expression", ["local+fedprox", "fedprox+centralised", "local(mu=1)"])
def test_a_baseline_stands_alone(expression: str) -> None:
    with pytest.raises(CompositionError, match="is a baseline, not a method"):
        prepared(expression)
    with pytest.raises(CompositionError, match="by itself"):
        parse("local")
