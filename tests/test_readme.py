"""The README says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from commands import call
from fedkeel.method.registry import REGISTRY, lookup

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)
"""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_is_the_one_that_is_tested() -> None:
    example = (ROOT / "examples" / "own_model_and_data.py").read_text(encoding="utf-8")
    assert example.split('"""\n\n', 1)[1] == block("python")
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_experiment_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 3)), random.choice(["well", "ill"], 120)
    lines = [
        f"{a},{b},{c},{label},{'north' if i % 3 else 'south'}"
        for i, ((a, b, c), label) in enumerate(zip(x, y, strict=True))
    ]
    Path("hospital.csv").write_text("\n".join(["age,dose,size,label,hospital", *lines]))
    Path("my_net.py").write_text(NET)
    Path("experiment.toml").write_text(block("toml"))
    done = call("run", "experiment.toml", "-s", "rounds=2", "-s", "engine.kind=sequential", "-q")
    assert done.code == 0, done.err
    assert "fedprox" in done.out


def test_every_method_is_named_and_every_name_is_there() -> None:
    rows = README.split("| family | methods |")[1].split("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)[`.]", row)}
    assert {name for name in named if lookup(name) is None} == set()
    assert set(REGISTRY) - named == set()
