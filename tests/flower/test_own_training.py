"""Local training of one's own in a federation of real processes: the bits of the simulation."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from commands import EXPERIMENT, call, experiment, shell
from fedkeel.records.folder import RunFolder

MINE = """\
import random

import numpy as np
import torch


def train(model, data, round):
    optimiser = torch.optim.SGD(model.parameters(), lr=round.lr, momentum=0.5)
    for number, parameter in enumerate(model.parameters()):
        if round.state:
            optimiser.state[parameter]["momentum_buffer"] = round.state[str(number)]
    for x, y in data.batches:
        optimiser.zero_grad()
        loss = round.loss(model(x + 0.1 * torch.randn_like(x)), y)
        loss.backward()
        optimiser.step()
    for number, parameter in enumerate(model.parameters()):
        round.state[str(number)] = optimiser.state[parameter]["momentum_buffer"]
    return {"loss": loss, "drawn": random.random() + np.random.rand()}
"""


@pytest.mark.processes
def test_nodes_train_by_the_function_of_their_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_training.py").write_text(MINE)
    text = EXPERIMENT.replace('"toy.npz"', f'"{tmp_path / "toy.npz"}"')
    text = text.replace("[engine]", '[engine]\ndtype = "float64"').replace(
        "rounds = 4", "rounds = 3"
    )
    text = text.replace("[local]", '[local]\ntrain = "my_training:train"\nkeep_state = true')
    experiment(tmp_path, text + "\n[flower]\ndeadline_seconds = 600.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    done = shell(
        *("flower", "up", "toy.toml", "--out", "far", "--nodes", "2", "-s", "method=fedadam"),
        folder=tmp_path,
        seconds=400,
    )
    assert done.code == 0, done.err
    near = call("run", "toy.toml", "--out", "near", "-s", "method=fedadam", "-q")
    assert near.code == 0, near.err
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("far", "near"))
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    far_rows, rows = (RunFolder(tmp_path / name).rows() for name in ("far", "near"))
    assert [row.diagnostics for row in far_rows] == [row.diagnostics for row in rows]
    assert [row.faults for row in far_rows] == [{}] * 4
    drawn = [row.diagnostics["local_training.drawn"] for row in rows[1:]]
    assert len(set(drawn)) == 3
    assert np.isfinite(drawn).all()
    monkeypatch.delitem(sys.modules, "my_training")
