"""One federation of real processes for all tests that need no other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commands import EXPERIMENT, experiment
from fedkeel.config import load
from fedkeel.flower.export import export
from fedkeel.flower.local.federation import shared_configs
from fedkeel.flower.local.processes import FlowerProcesses


@pytest.fixture(scope="session")
def patience() -> float:
    """Seconds in which a node answers for certain, by how quick this machine is just now."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import fedkeel.flower.apps"], check=True)
    return max(20.0, 6 * (time.monotonic() - began))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose data every process finds, in float64."""
    folder = tmp_path_factory.mktemp("toy")
    text = EXPERIMENT.replace('"toy.npz"', f'"{folder / "toy.npz"}"')
    text = text.replace("[engine]", '[engine]\ndtype = "float64"').replace(
        "rounds = 4", "rounds = 2"
    )
    return experiment(folder, text + "\n[flower]\ndeadline_seconds = 600.0\n")


@pytest.fixture(scope="session")
def app(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported app of that experiment."""
    out = tmp_path_factory.mktemp("app") / "toy"
    export(load(toy), out)
    return out


CLIENT = """\
from pathlib import Path

from bad import app as make

app = make(Path(__file__).with_name("experiment.toml"))
"""


@pytest.fixture(scope="session")
def misbehaving(toy: Path) -> Callable[[Path, list[str]], None]:
    """Writes the app of that experiment, changed, with nodes that may misbehave: see `bad`."""

    def write(out: Path, words: list[str]) -> None:
        export(load(toy, words), out)
        (out / "federation" / "client.py").write_text(CLIENT)
        shutil.copyfile(Path(__file__).with_name("bad.py"), out / "bad.py")

    return write


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcesses]:
    """A SuperLink and two SuperNodes."""
    folder = tmp_path_factory.mktemp("federation")
    nodes = [f'{one} state="{folder / "state"}"' for one in shared_configs(2)]
    with FlowerProcesses(folder, nodes) as running:
        yield running
