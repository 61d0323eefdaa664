"""A loss that is a weighted mean is recorded as that of all examples at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.engine.choose import evaluation
from fedkeel.errors import ModelError
from toys import held, of_sizes, prepared

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0])
LOSSES = {
    "class weights": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
    "smoothed": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "ignored": nn.CrossEntropyLoss(ignore_index=0),
    "mean": nn.CrossEntropyLoss(),
}
SIZES = [30, 7, 50]
EXAMPLES = sum(SIZES)


def made(loss: nn.Module, kind: str, size: int) -> fk.Result:
    """Train three clients for a round, and evaluate in batches of `size`."""
    return fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(5, 3), loss=loss),
        clients=of_sizes(*SIZES),
        test=held(60),
        rounds=1,
        local=fk.Local(lr=0.1, steps=1, batch_size="all"),
        engine=fk.Engine(kind=kind, workers=2 if kind == "workers" else 1),
        evaluation=fk.Evaluation(batch_size=size),
        progress=False,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_all_examples_at_once(name: str) -> None:
    loss = LOSSES[name]
    recorded = {
        (kind, size): made(loss, kind, size).rows[-1]
        for kind, size in [
            ("sequential", 1000),
            ("sequential", 7),
            ("workers", 7),
            ("vectorized", 7),
        ]
    }
    model = nn.Linear(5, 3)
    model.load_state_dict(made(loss, "sequential", 50).state_dict())
    test, clients = held(60), of_sizes(*SIZES).data
    with torch.no_grad():
        expected = float(loss(model(test.x), test.y))
        parts = zip(clients.x.split(SIZES), clients.y.split(SIZES), strict=True)
        by_client = [float(loss(model(x), y)) for x, y in parts]
    for row in recorded.values():
        assert row.test is not None
        assert row.per_client is not None
        assert row.test["loss"] == pytest.approx(expected, rel=1e-5)
        assert row.per_client["loss"] == pytest.approx(by_client, rel=1e-5)
    assert recorded["sequential", 7].test == recorded["workers", 7].test
    assert recorded["sequential", 7].per_client == recorded["workers", 7].per_client


def test_too_many_outputs_to_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, sums = 8 * (3 + 1) * EXAMPLES, 8 * 8 * 2  # of 8 rows: shards, clients
    monkeypatch.setattr(evaluation, "LARGEST_EVALUATION", kept + sums - 1)
    clients = of_sizes(*SIZES)
    with pytest.raises(ModelError, match=r"got 2\.8 KB for 87 examples"):
        prepared(clients=clients, per_round=3, loss=LOSSES["mean"])
    prepared(clients=clients, per_round=3, loss=nn.CrossEntropyLoss(reduction="none"))
    monkeypatch.setattr(evaluation, "LARGEST_EVALUATION", kept + sums)
    prepared(clients=clients, per_round=3, loss=LOSSES["mean"])
