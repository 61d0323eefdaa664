"""A run with low-rank adapters gives a model that is loaded, asked and written like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from commands import call

NETWORK = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.last = nn.Linear(shape[0], 8), nn.Linear(8, classes)

    def forward(self, x):
        return self.last(self.first(x).relu())
"""
EXPERIMENT = """\
rounds = 3
method = "METHOD"
[data]
source = "points.csv"
label = "side"
[partition]
kind = "iid"
clients = 2
[model]
name = "net_of_adapters:Net"
[model.lora]
rank = 2
layers = ["first"]
train = ["last"]
[local]
lr = 0.3
epochs = 1
batch_size = 10
[engine]
kind = "sequential"
"""


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.chdir(folder)
    x = np.random.default_rng(0).normal(size=(100, 2))
    lines = [f"{a:.3f},{b:.3f},{'left' if a > b else 'right'}" for a, b in x]
    Path("points.csv").write_text("\n".join(["a,b,side", *lines, ""]), encoding="utf-8")
    Path("net_of_adapters.py").write_text(NETWORK, encoding="utf-8")
    Path("e.toml").write_text(EXPERIMENT.replace("METHOD", method), encoding="utf-8")
    done = call("run", "e.toml", "--out", "run", "-q")
    assert done.code == 0, done.err


def test_it_answers_and_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, monkeypatch, "fedavg")
    model = fk.load("run")
    labels = model.predict("points.csv").labels
    truth = [line.split(",")[2] for line in Path("points.csv").read_text().split()[1:]]
    assert sum(a == b for a, b in zip(labels, truth, strict=True)) > 80
    state = model.module.state_dict()
    assert any(state[name].any() for name in state if "lora_B" in name)

    done = call("predict", "run", "points.csv")
    assert done.code == 0, done.err
    assert [line.split(",")[1] for line in done.out.splitlines()[1:]] == labels

    assert call("export", "run", "net.pt2").code == 0
    points = torch.randn(5, 2)
    assert torch.allclose(torch.export.load("net.pt2").module()(points), model.module(points))


def test_so_does_the_model_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, monkeypatch, "local")
    first, second = (fk.load("run", client=str(k)).module(torch.ones(1, 2)) for k in (0, 1))
    assert not torch.equal(first, second)
