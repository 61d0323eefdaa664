"""Clients of FedALA begin side by side, as they would one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel.base.rng import generator
from fedkeel.engine.vectorized.begun import BEGUN, stepped_start
from fedkeel.engine.vectorized.starts import Starts
from fedkeel.records.rows import RoundRecord


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.relu(self.body(x))))


def run(kind: str, method: str, task: fk.Task | None = None, **options: object) -> fk.Result:
    """Six clients of unequal size, whose scores are measured in each round."""
    rng = generator(0, "starts")
    y = rng.integers(0, 4, size=240)
    x = rng.normal(size=(4, 8))[y] + rng.normal(size=(240, 8))
    clients = fk.dirichlet(x[:200], y[:200], clients=6, alpha=0.4, seed=0, min_size=8)
    torch.manual_seed(0)
    engine = {"parallel_clients": 6} if kind == "vectorized" else {}
    return fk.run(
        method,
        task=task or fk.Task(net()),
        clients=clients.hold_out(0.25, seed=0),
        test=(x[200:], y[200:]),
        rounds=4,
        local=fk.Local(lr=0.1, epochs=1, batch_size=7),
        evaluation=fk.Evaluation(model="personal", every=1),
        engine=fk.Engine(kind=kind, dtype="float64", **{**engine, **options}),
        progress=False,
    )


def losses(rows: list[RoundRecord]) -> np.ndarray:
    return np.array([row.personal["loss"] for row in rows if row.personal])


@each(
    "method",
    [
        "fedala(lr=5.0, first=3)",
        "fedala(adapt='*', lr=4.0, passes=2)",
        "fedala(adapt='2', lr=5.0)+fedper(keep='0')",
        "fedala(passes=0, first=1)+momentum",
    ],
)
def test_side_by_side_is_as_one_by_one(method: str) -> None:
    """The clients make 1 to 11 steps of their own, so some of them end while others go on."""
    one, several = run("sequential", method), run("vectorized", method)
    assert several.record.engine.reasons == []
    for name, tensor in one.params.items():
        assert float((tensor - several.params[name]).abs().max()) < 1e-12, name
    assert np.abs(losses(one.rows) - losses(several.rows)).max() < 1e-12
    assert np.ptp(losses(one.rows)[:, 0]) > 1e-2


@pytest.mark.parametrize("most", [1, 4])
def test_groups_of_any_size_begin_alike(most: int) -> None:
    one, several = (
        run("sequential", "fedala(lr=5.0)"),
        run("vectorized", "fedala(lr=5.0)", parallel_clients=most),
    )
    for name, tensor in one.params.items():
        assert float((tensor - several.params[name]).abs().max()) < 1e-12, name
    assert np.abs(losses(one.rows) - losses(several.rows)).max() < 1e-12


def test_a_network_that_draws_begins_one_by_one() -> None:
    torch.manual_seed(0)
    task = fk.Task(Dropping())
    one, several = (run(kind, "fedala(lr=5.0)", task) for kind in ("sequential", "vectorized"))
    assert "a part asks for all examples of a client" in " ".join(several.record.engine.reasons)
    assert np.abs(losses(one.rows) - losses(several.rows)).max() < 1e-12


def test_what_cannot_begin_side_by_side_begins_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation too, where each start is then made when its model is."""
    from fedkeel.engine.compiler.errors import CannotCompile

    plain = run("sequential", "fedala(lr=5.0)")

    def refuse(*_: object) -> None:
        raise CannotCompile("it is refused here")

    monkeypatch.setattr(Starts, "of", refuse)
    refused = run("vectorized", "fedala(lr=5.0)")
    assert "it is refused here" in " ".join(refused.record.engine.reasons)
    assert np.abs(losses(plain.rows) - losses(refused.rows)).max() < 1e-12


def test_other_starts_are_left_as_they_are() -> None:
    from toys import prepared

    assert stepped_start(prepared("fedinit").setup) is None
    assert stepped_start(prepared("fedavg").setup) is None
    assert BEGUN == "begun"
