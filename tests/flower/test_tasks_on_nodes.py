"""Any task on data that stays on the nodes: its metrics are those of all examples together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn import metrics as sk

from fedkeel import config
from fedkeel.errors import FedkeelError
from fedkeel.flower.node.configuration import make_node
from fedkeel.flower.server.serve import RunOptions, serve
from in_process_grid import InProcessGrid

SOURCE = """
import numpy as np
import torch

def make(node):
    random = np.random.default_rng(node)
    x = random.normal(size=(20 + 10 * node, 3))
    return x, x @ [1.0, -2.0, 0.5] + node

def quantities0(): return make(0)
def quantities1(): return make(1)

def binary0(): return make(0)[0], (make(0)[1] > 0).astype(int)
def binary1(): return make(1)[0], (make(1)[1] > 0).astype(int)

def named0(): return named(0)
def named1(): return named(1)

def named(node):
    x, y = make(node)
    return {"a": x[:, :2], "b": x[:, 2:]}, {"y": y}

def error(output, y):
    return (output[:, 0] - y["y"]) ** 2

class Score(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(3, 1)
    def forward(self, x):
        return self.out(x)

class ByName(Score):
    def forward(self, a, b):
        return self.out(torch.cat([a, b], dim=1))
"""


def experiment(loss: str, metrics: list[str], model: str = "nodes_own:Score") -> config.Experiment:
    values = {
        "method": "fedprox",
        "rounds": 2,
        "local": {"lr": 0.05, "epochs": 1, "batch_size": 8},
        "data": {"source": "nodes"},
        "partition": {"kind": "nodes", "clients": 2},
        "model": {"name": model},
        "task": {"loss": loss, "metrics": metrics},
        "engine": {"dtype": "float64"},
        "flower": {"deadline_seconds": 5.0, "poll_seconds": 0.01},
    }
    return config.build(config.Experiment, values, "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes_own.py").write_text(SOURCE)
    return tmp_path


def grid_of(settings: config.Experiment, kind: str, folder: Path) -> InProcessGrid:
    return InProcessGrid(
        {
            100 + i: make_node(
                settings,
                {
                    "partition-id": i,
                    "num-partitions": 2,
                    "data": f"nodes_own:{kind}{i}",
                    "state": str(folder / "state"),
                },
            )
            for i in range(2)
        }
    )


def held_out(grid: InProcessGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the test examples of all nodes."""
    xs, ys = [], []
    for node in grid.nodes.values():
        clients = node.prepared.setup.federation
        rows = torch.from_numpy(clients.holdout_rows)
        xs.append(clients.data.x[rows])
        ys.append(clients.data.y[rows])
    return torch.cat(xs), torch.cat(ys)


def test_a_regression_is_measured_by_sums(folder: Path) -> None:
    settings = experiment("mse", ["mae", "rmse", "r2"])
    grid = grid_of(settings, "quantities", folder)
    result = serve(grid, settings, RunOptions(folder / "run"))
    assert result.record.status == "finished"
    x, y = held_out(grid)
    model = load_file(folder / "run" / "model.safetensors")
    found = (x @ model["out.weight"].T + model["out.bias"])[:, 0].numpy()
    test = result.rows[-1].test
    assert test is not None
    assert test.examples == len(y)
    assert test.values == pytest.approx(
        {
            "mae": sk.mean_absolute_error(y, found),
            "rmse": sk.mean_squared_error(y, found) ** 0.5,
            "r2": sk.r2_score(y, found),
            "loss": sk.mean_squared_error(y, found),
        },
        rel=1e-9,
    )
    assert result.best == min(value for _, value in result.scores("mae"))


def test_areas_of_all_nodes_are_not_means_of_theirs(folder: Path) -> None:
    settings = experiment("bce", ["auroc"])
    grid = grid_of(settings, "binary", folder)
    result = serve(grid, settings, RunOptions(folder / "run"))
    x, y = held_out(grid)
    model = load_file(folder / "run" / "model.safetensors")
    shares = (x @ model["out.weight"].T + model["out.bias"])[:, 0].sigmoid()
    exact = sk.roc_auc_score(y, (shares * 1000).long())
    assert result.scores("auroc")[-1][1] == pytest.approx(exact, rel=1e-12)


def test_inputs_and_targets_by_name(folder: Path) -> None:
    settings = experiment("nodes_own:error", [], "nodes_own:ByName")
    result = serve(grid_of(settings, "named", folder), settings, RunOptions(folder / "run"))
    losses = [value for _, value in result.scores("loss")]
    assert losses[-1] < losses[0]
    assert result.record.data.inputs == {"a": [2], "b": [1]}


def test_what_cannot_be_summed_is_refused(folder: Path) -> None:
    (folder / "nodes_own.py").write_text(
        SOURCE
        + "\ndef times0(): return make(0)[0], np.ones((20, 2))"
        + "\ndef times1(): return make(1)[0], np.ones((30, 2)) * 0.5\n"
    )
    settings = experiment("cox", ["concordance"])
    with pytest.raises(FedkeelError, match="'concordance' has to see all examples at once"):
        serve(grid_of(settings, "times", folder), settings, RunOptions(folder / "run"))
