"""Parts of users that look at a batch as a whole: every engine gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fedkeel.engine.prepared import Prepared
from fedkeel.engine.vectorized.facts import establish
from fedkeel.runner.start import start
from toys import Net, of_sizes, prepared

PARTS = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from fedkeel import tree
from fedkeel.method.roles import *

class Mine:
    paper: ClassVar[str] = ""

@dataclass(frozen=True)
class Term(Mine, LossTerm):
    how: str = "mean"
    name: ClassVar[str] = "my_term"
    def loss_term(self, output, params, step):
        squares = output.logits.square().mean(dim=1)
        if self.how == "mean":
            return 0.3 * squares.mean()
        if self.how == "weighted":
            real = step.batch.real(squares.dtype)
            return 0.3 * (real * squares).sum() / real.sum()
        return 0.3 * squares

@dataclass(frozen=True)
class Share(Mine, GradientTransform, ClientState):
    "Counts the examples of a batch, and adds by their number what it has kept: zero at first."
    how: str = "count"
    name: ClassVar[str] = "share"
    gradient_stage: ClassVar[Stage] = Stage.CORRECT
    def transform_gradient(self, grads, params, step):
        scale = {"count": len(step.batch.y), "inputs": step.batch.x.mean() + 1.0}[self.how]
        return {k: g + 0.1 * scale * step.client_state["last"][k] for k, g in grads.items()}
    def init_client(self, start):
        return {"last": tree.zeros_like(start)}
    def next_client(self, round):
        return {"last": tree.sub(round.end, round.start)}

@dataclass(frozen=True)
class Ready(Mine, Preparation, GradientTransform):
    name: ClassVar[str] = "ready"
    pairing: ClassVar[str] = "example"
    gradient_stage: ClassVar[Stage] = Stage.CORRECT
    def prepare(self, examples, step):
        x = examples.x.flatten(1)
        return {"far": (x - x.mean(dim=0)).square().mean(dim=1)}
    def transform_gradient(self, grads, params, step):
        far = (step.prepared["far"] * step.batch.real(torch.float64)).sum()
        return {k: g * (1.0 + far) for k, g in grads.items()}
"""
SEEN = [
    "mine:Term(how='mean')",
    "mine:Term(how='mean')+fedprox",
    "mine:Share(how='count')",
    "mine:Share(how='inputs')",
    "mine:Ready",
]
UNSEEN = ["mine:Term(how='weighted')", "mine:Term(how='each')", "feddecorr", "fedavg"]


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)


def ready(method: str, model: Callable[[], nn.Module] = Net, **engine: object) -> Prepared:
    return prepared(
        method, model, clients=of_sizes(9, 4, 13, 11, 3, 6), dtype="float64", workers=1, **engine
    )


FAST = ("mine:Term(how='mean')", "mine:Share(how='count')", "mine:Ready", "fedavg")
SLOW = [m for m in (*SEEN, *UNSEEN) if m not in FAST]


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *((method, Net) for method in FAST),
        *(pytest.param(method, Net, marks=pytest.mark.slow) for method in SLOW),
        *(
            pytest.param(method, partial(Net, dropout=0.3), marks=pytest.mark.slow)
            for method in (*SEEN, *UNSEEN)
        ),
    ],
)
def test_engines_agree(method: str, model: Callable[[], nn.Module]) -> None:
    one = start(ready(method, model))
    for chunk in (1, 3):
        other = start(ready(method, model, kind="vectorized", parallel_clients=chunk))
        for name, tensor in one.params.items():
            torch.testing.assert_close(other.params[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method", [*FAST, *(pytest.param(method, marks=pytest.mark.slow) for method in SLOW)]
)
def test_only_what_would_see_padding_goes_without(method: str) -> None:
    p = ready(method, kind="vectorized", parallel_clients=3)
    assert establish(p.setup).pads == (method in UNSEEN)
    assert not start(p).record.engine.reasons
