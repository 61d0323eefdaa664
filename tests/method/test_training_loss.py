"""A part knows the training loss of a client's round: FedProx's own adaptive mu is ten lines."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import fedkeel as fk

ADAPTIVE = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedkeel import tree
from fedkeel.method.roles import Broadcast, GradientTransform, ServerState, Upload


@dataclass(frozen=True)
class AdaptiveProx(GradientTransform, Upload, Broadcast, ServerState):
    """FedProx whose mu grows by 0.1 where the loss has grown, and falls by 0.1 where it fell."""

    name: ClassVar[str] = "adaptive_prox"

    def transform_gradient(self, grads, params, step):
        pull = tree.sub(params, step.start)
        return tree.map(lambda g, p: g + step.broadcast["mu"] * p, grads, pull)

    def upload(self, round):
        return {"loss": round.loss}

    def init_server(self, params, population):
        like = next(iter(params.values()))
        return {"mu": like.new_tensor(0.3), "loss": like.new_tensor(torch.inf)}

    def message(self, state):
        return {"mu": state["mu"]}

    def next_server(self, outcome):
        before, loss = outcome.cohort.state, outcome.cohort.uploads["loss"].mean()
        mu = torch.where(loss < before["loss"], before["mu"] - 0.1, before["mu"] + 0.1).clamp(min=0)
        outcome.cohort.log("mu", mu)
        outcome.cohort.log("loss", loss)
        return {"mu": mu, "loss": loss}
'''


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("lr", [0.05, 6.0])
def test_fedprox_with_its_own_adaptive_mu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, lr: float
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "adaptive.py").write_text(ADAPTIVE)
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + 0.8 * x[:, 1] ** 2 > 0.3).long()
    torch.manual_seed(0)
    result = fk.run(
        "adaptive:AdaptiveProx",
        task=fk.Task(nn.Linear(3, 2)),
        clients=fk.from_clients({"a": (x[:20], y[:20]), "b": (x[20:40], y[20:40])}),
        test=(x[40:], y[40:]),
        rounds=6,
        local=fk.Local(lr=lr, epochs=2, batch_size=5),
        engine=fk.Engine(kind=engine, dtype="float64"),
    )
    monkeypatch.delitem(sys.modules, "adaptive")
    rows = result.rows[1:]
    losses = [row.train_loss for row in rows]
    assert [r.diagnostics["adaptive_prox.loss"] for r in rows] == pytest.approx(losses, rel=1e-12)
    mu, before, expected = 0.3, float("inf"), []
    for loss in losses:
        mu = max(0.0, mu + (-0.1 if loss < before else 0.1))
        before = loss
        expected.append(mu)
    assert [row.diagnostics["adaptive_prox.mu"] for row in rows] == pytest.approx(expected)
    steps = [after > before for before, after in pairwise(losses)]
    assert any(steps) == (lr > 1)  # both directions are tried
