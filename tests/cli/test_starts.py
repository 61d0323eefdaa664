"""What a command imports before it answers: torch, which takes seconds, only where it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedkeel
from each import each
from fedkeel.method.registry import REGISTRY

CALL = """
import sys

from fedkeel.cli import main

sys.argv = ["fedkeel", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(end.code, file=sys.stderr)
print("imported", *(name for name in ("torch", "flwr", "ray", "plotly") if name in sys.modules))
"""

EXPERIMENT = """
name = "start"
method = "fedavg"
rounds = 2
data = { source = "digits" }
model = { name = "mlp" }
local = { lr = 0.1, epochs = 1 }
partition = { kind = "iid", clients = 4 }
"""


def python(code: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A process of Python that imports the package that is tested."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fedkeel.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def called(*words: str, folder: Path) -> tuple[str, str]:
    """What a command prints in a process of its own, and what it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    printed, _, imported = done.stdout.rpartition("imported")
    return printed + done.stderr, imported.strip()


@each(
    "words",
    [
        ["--help"],
        ["methods"],
        ["methods", "fedavg"],
        ["methods", "fedmuon", "--json"],
        ["methods", "fedprox+gcfed", "--bibtex"],
        ["methods", "fedprx"],
        ["run", "--help"],
    ],
)
def test_methods_are_described_without_torch(words: list[str], tmp_path: Path) -> None:
    printed, imported = called(*words, folder=tmp_path)
    assert len(printed) > 100
    assert imported == ""


@each(
    ("wrong", "said"),
    [
        ("rouns = 2", "no key 'rouns'"),
        ("seed = 'one'", "'seed' cannot be used"),
        ("seed = -1", "'seed' cannot be used"),
        ("method = 'fedprx'", "There is no method 'fedprx'"),
        ("method = 'fedprox(nu=1)'", "fedprox has no hyper-parameter 'nu'"),
        ("method = 'fedprox(mu=-1)'", "`mu` of fedprox must be a float >= 0. Got -1."),
        ("method = 'momentum+addition'", "puts 2 parts in the slot 'server optimiser'"),
    ],
)
def test_a_mistake_in_an_experiment_is_told_without_torch(
    wrong: str, said: str, tmp_path: Path
) -> None:
    text = EXPERIMENT.replace('method = "fedavg"\n', "") if "method" in wrong else EXPERIMENT
    (tmp_path / "wrong.toml").write_text(f"{wrong}\n{text}")
    for command in ("run", "check"):
        printed, imported = called(command, "wrong.toml", folder=tmp_path)
        assert said in printed
        assert printed.rstrip().endswith("2")
        assert imported == ""


@each("command", ["compare", "tune"])
def test_a_method_of_a_comparison_is_refused_without_torch(command: str, tmp_path: Path) -> None:
    (tmp_path / "right.toml").write_text(EXPERIMENT)
    words = ("right.toml", "--methods", "fedavg, local, fedprx")
    printed, imported = called(command, *words, folder=tmp_path)
    assert "There is no method 'fedprx'" in printed
    assert imported == ""


def test_a_right_experiment_imports_torch(tmp_path: Path) -> None:
    """The tests above would see it."""
    (tmp_path / "right.toml").write_text(EXPERIMENT)
    printed, imported = called("check", "right.toml", folder=tmp_path)
    assert "everything fits together" in printed
    assert "torch" in imported


def test_a_method_of_ones_own_is_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedkeel.method.parts.fedprox import FedProx\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FedProx):\n"
        "    name = 'mine'\n"
    )
    printed, imported = called("methods", "mine:Mine(mu=0.5)", "--json", folder=tmp_path)
    [part] = json.loads(printed[: printed.rindex("]") + 1])
    assert (part["name"], part["parameters"][0]["value"]) == ("mine", 0.5)
    assert "torch" in imported


def test_a_run_imports_the_parts_of_its_method_only(tmp_path: Path) -> None:
    code = (
        "import sys; from fedkeel.method.grammar import parse; parse('fedprox+gcfed');"
        "print(*(name.split('.')[-1] for name in sys.modules if '.method.parts.' in name))"
    )
    names = python(code, folder=tmp_path).stdout.split()
    assert {"fedprox", "gcfed"} <= {*names}
    assert len(names) < 8 < len(REGISTRY)


def test_what_stands_for_torch_is_torch() -> None:
    import torch

    from fedkeel.base import lazy

    assert lazy.torch.sub is torch.sub
    assert lazy.F.relu is torch.nn.functional.relu
    assert isinstance(torch.zeros(1), lazy.Tensor)
    assert not isinstance(1.0, lazy.Tensor)
    with pytest.raises(AttributeError, match="no_such_name"):
        lazy.torch.no_such_name  # noqa: B018
