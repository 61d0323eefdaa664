"""The trained model: what is reported is what a user gets, from the result and from the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.runner.result import Result
from toys import federation, held

LOCAL = fk.Local(lr=0.1, epochs=2, batch_size=4, drop_last="single")


class Odd(nn.Module):
    """Frozen, tied and untrained tensors, drawn anew whenever it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 8)
        self.frozen.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(self.norm(self.frozen(x))).relu()
        return self.head(self.other(hidden).relu())


def accuracy(state: dict[str, Tensor], test: fk.Dataset) -> float:
    module = Odd()
    module.load_state_dict(state)
    with torch.no_grad():
        return float((module.eval()(test.x).argmax(1) == test.y).float().mean())


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_the_model_that_is_reported_can_be_loaded(kind: str, tmp_path: Path) -> None:
    test = held()

    def run() -> Result:
        return fk.run(
            "fedavg",
            task=fk.Task(Odd, buffers="average"),
            clients=federation(),
            test=test,
            rounds=3,
            local=LOCAL,
            engine=fk.Engine(kind=kind, workers=1),
            out=tmp_path / "run",
            progress=False,
        )

    for _ in range(2):  # made, and read from the folder
        result = run()
        assert accuracy(result.state_dict(), test) == pytest.approx(result.last)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert accuracy(saved, test) == pytest.approx(result.last)
