"""The process of a node that trains on a device: kept from message to message, and replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from commands import EXPERIMENT, experiment
from fedkeel.config import load
from fedkeel.engine.prepared import Prepared
from fedkeel.errors import RunError
from fedkeel.flower.apps import client_app
from fedkeel.flower.node import device_process
from fedkeel.flower.protocol import DESCRIBE, NodeDescription
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, run_on_nodes
from toys import alive, deadline, eventually

pytestmark = pytest.mark.skipif(not device_process.is_supported(), reason="needs Linux")

MINE = """\
import os
import signal
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(6, classes)
        self.folder = Path(__file__).parent

    def forward(self, x):
        if (self.folder / "kill").exists():
            (self.folder / "kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.folder / "hang").exists():
            time.sleep(1000)
        return self.layer(x)
"""

COMPILED = {"device": "cpu", "engine": "vectorized"}


@dataclass
class AppNode:
    """A node that answers as Flower's process for a message does."""

    file: Path
    config: dict[str, str | int]
    ttl: float = 600.0

    def ask(self, kind: str, content: RecordDict | None = None) -> Message:
        context = Context(1, 1, dict(self.config), RecordDict(), {})
        message = Message(content or RecordDict(), 1, kind, ttl=self.ttl)
        return client_app(self.file)(message, context)

    def reply(self, kind: str, content: RecordDict) -> RecordDict:
        reply = self.ask(kind, content)
        if reply.has_error():
            raise RunError(reply.error.reason)
        return reply.content


def processes(name: str = "") -> list[int]:
    """Those that train on a device and serve a folder of this test."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if b"trainer_process" in words and str(device_process.FOLDER).encode() in words:
            found.append(int(place.name))
    return [pid for pid in found if alive(pid)]


@pytest.fixture(autouse=True)
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the SuperNode with which they end."""
    monkeypatch.setattr(device_process, "FOLDER", tmp_path / ("long" * 30) / "trainers")
    node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    monkeypatch.setattr(device_process, "owner", lambda: node.pid)
    InProcessGrid({})  # gives this process an identity
    with deadline(300):
        yield node
    node.kill()
    node.wait()
    assert eventually(lambda: not processes())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment with a model that kills its process, or hangs, when a file says so."""
    (tmp_path / "mine.py").write_text(MINE)
    text = EXPERIMENT.replace('"toy.npz"', f'"{tmp_path / "toy.npz"}"')
    text = text.replace('name = "mlp"\n\n[model.args]\nhidden = [8]', 'name = "mine:Net"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return experiment(tmp_path, text)


@pytest.fixture
def node(file: Path, tmp_path: Path) -> Callable[..., AppNode]:
    def make(number: int = 0, **more: str) -> AppNode:
        state = str(tmp_path / f"state-{number}")
        own = {"partition-id": number, "num-partitions": 2, "state": state, **COMPILED, **more}
        return AppNode(file, own)

    return make


@pytest.mark.processes
def test_one_process_answers_all_messages_of_a_node(
    file: Path, node: Callable[..., AppNode], tmp_path: Path
) -> None:
    """It has the model, the data and the compiled steps; the run is that of the same trainer."""
    made: Prepared = prepare(load(file), gather(load(file)))
    first, second = node(0), node(1)
    description = NodeDescription.read(first.ask(DESCRIBE).content)
    assert description.training.engine == "vectorized"
    (pid,) = processes()
    far = run_on_nodes(made, InProcessGrid({1: first, 2: second}))  # type: ignore[dict-item]
    assert [row.faults for row in far.rows] == [{}] * len(far.rows)
    assert pid in processes()
    assert len(processes()) == 2
    near = start(made)
    for name, tensor in near.params.items():
        torch.testing.assert_close(far.params[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_node_on_the_processor_has_no_such_process(node: Callable[..., AppNode]) -> None:
    reply = node(0, device="cpu", engine="auto").ask(DESCRIBE)
    assert NodeDescription.read(reply.content).training.is_plain
    assert not device_process.FOLDER.exists()


@pytest.mark.processes
def test_other_settings_policy_or_data_take_its_place(
    node: Callable[..., AppNode], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("")
    one = node(0, policy=str(policy))
    assert not one.ask(DESCRIBE).has_error()
    (before,) = processes()
    assert not one.ask(DESCRIBE).has_error()
    assert processes() == [before]
    policy.write_text('devices = ["cpu"]\nsecure_sums = true\n')
    refused = one.ask(DESCRIBE)
    assert "The policy of this site asks for secure sums" in refused.error.reason
    (after,) = processes()
    assert after != before
    assert not alive(before)


def test_one_that_is_killed_is_told_and_replaced(
    node: Callable[..., AppNode], tmp_path: Path
) -> None:
    one = node(0)
    (tmp_path / "kill").touch()
    reply = one.ask(DESCRIBE)
    assert "has ended in the middle of its work" in reply.error.reason
    assert "has ended in the middle of its work" in (tmp_path / "state-0/node.log").read_text()
    assert not one.ask(DESCRIBE).has_error()
    (pid,) = processes()
    os.kill(pid, signal.SIGKILL)  # between two messages: nobody notices
    assert not one.ask(DESCRIBE).has_error()


@pytest.mark.processes
def test_one_that_hangs_ends_before_the_message_expires(
    node: Callable[..., AppNode], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = node(0)
    assert not one.ask(DESCRIBE).has_error()  # it has started
    (pid,) = processes()
    (tmp_path / "hang").touch()
    os.utime(tmp_path / "toy.toml")  # it reads anew, and so calls the model
    one.ttl = 40.0
    began = time.monotonic()
    reply = one.ask(DESCRIBE)
    assert reply.has_error()
    assert time.monotonic() - began < 45
    assert eventually(lambda: not processes())
    assert pid not in processes()
    assert "in forward" in capfd.readouterr().err


def test_it_ends_with_the_supernode(
    node: Callable[..., AppNode], owner: subprocess.Popen[bytes]
) -> None:
    assert not node(0).ask(DESCRIBE).has_error()
    (pid,) = processes()
    owner.kill()  # and nobody has collected it yet
    assert eventually(lambda: not alive(pid))
    assert [file.suffix for file in device_process.FOLDER.iterdir()] == [".lock"]


def test_only_the_nodes_user_can_reach_it(node: Callable[..., AppNode]) -> None:
    """What comes through the socket is unpickled."""
    assert not node(0).ask(DESCRIBE).has_error()
    assert device_process.FOLDER.stat().st_mode & 0o077 == 0
