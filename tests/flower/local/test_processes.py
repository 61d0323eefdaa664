"""A SuperLink and SuperNodes as real processes end with the bits of the sequential engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from commands import rows
from fedkeel.config import load
from fedkeel.flower.apps import ORPHAN_SECONDS
from fedkeel.flower.local.federation import shared_configs
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.method.round_values import Server
from fedkeel.records.folder import RunFolder
from fedkeel.runner.checkpoint import packed
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from toys import alive, eventually, living

pytestmark = pytest.mark.processes

DOZEN = [
    "scaffold+gcfed+momentum",
    "feddyn+moon+fedntd",
    "gradma+fedprox+topk(fraction=0.2)",
    "fednova+fedcurv+mime",
]
"""A dozen methods, those with state among them, three by three to save processes."""


def same_as_sequential(toy: Path, out: Path, words: list[str]) -> None:
    """Compare the model and the server's memory of a finished run, bit by bit."""
    chosen = load(toy, words)
    here = start(prepare(chosen, gather(chosen)))
    saved = RunFolder(out).load()
    assert saved is not None
    params = packed(Server(here.params, here.buffers, {}))
    assert params
    for name, array in params.items():
        assert np.array_equal(saved.arrays[name], array), name
    far, near = RunFolder(out).rows(), here.rows
    assert [(row.clients, row.train_loss, row.test) for row in far] == [
        (row.clients, row.train_loss, row.test) for row in near
    ]


def ended(out: Path) -> bool:
    folder = RunFolder(out)
    return folder.exists() and folder.read_run().status != "running"


def test_a_dozen_methods_end_with_the_same_bits(
    federation: FlowerProcesses, app: Path, toy: Path, patience: float, tmp_path: Path
) -> None:
    """They run at the same time, and each one's clients keep what is theirs."""
    for number, method in enumerate(DOZEN):
        config = {"out": str(tmp_path / str(number)), "settings": f"method={method}"}
        federation.submit(app, config)
    for number in range(len(DOZEN)):
        out = tmp_path / str(number)
        assert eventually(lambda out=out: ended(out), 30 * patience), federation.tail("superlink")
    for number, method in enumerate(DOZEN):
        found = RunFolder(tmp_path / str(number))
        assert found.read_run().status == "finished", found.read_run().message
        assert found.read_run().engine.kind == "flower"
        assert [row.faults for row in found.rows()] == [{}] * 3
        same_as_sequential(toy, tmp_path / str(number), [f"method={method}"])


HOSTILE = """\
import json
import time
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    messages = [Message(RecordDict(), node, "query.describe") for node in nodes]
    reasons = [reply.error.reason for reply in grid.send_and_receive(messages)]
    out = Path(str(context.run_config["out"]))
    out.with_suffix(".part").write_text(json.dumps(reasons))
    out.with_suffix(".part").rename(out)
"""
"""A server that looks at no setting, and asks the nodes."""


def test_a_server_runs_no_command_on_a_node(
    federation: FlowerProcesses, app: Path, patience: float, tmp_path: Path
) -> None:
    hostile, marker, out = tmp_path / "app", tmp_path / "marker", tmp_path / "reasons"
    shutil.copytree(app, hostile)
    (hostile / "federation" / "server.py").write_text(HOSTILE)
    settings = f"model.name=os:system; model.args={{command='touch {marker}'}}"
    federation.submit(hostile, {"out": str(out), "settings": settings})
    assert eventually(out.exists, 9 * patience), federation.tail("superlink")
    reasons = json.loads(out.read_text())
    assert len(reasons) == 2
    for reason in reasons:
        assert "names code that is not installed on this node: model.name = 'os:system'" in reason
    assert not marker.exists()


@contextmanager
def frozen(federation: FlowerProcesses) -> Iterator[None]:
    """Stop the nodes for a moment: no run can end in it."""
    pids = [pid for number in range(2) for pid in federation.find(f"node-{number}")]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_server_and_superlink_killed(
    federation: FlowerProcesses, app: Path, toy: Path, patience: float, tmp_path: Path
) -> None:
    """SCAFFOLD, whose clients keep something, goes on with the same bits after both."""
    out, words = tmp_path / "run", ["method=scaffold", "rounds=6"]
    config = {"out": str(out), "settings": ";".join(words), "resume": True}

    def under_way(count: int) -> None:
        assert eventually(lambda: rows(out) >= count, 9 * patience), federation.tail("superlink")

    federation.submit(app, config)
    under_way(2)
    with frozen(federation):
        apps = federation.find("superlink", "flwr-serverapp")
        assert len(apps) == 1
        os.kill(apps[0], signal.SIGKILL)
        assert eventually(lambda: not alive(apps[0]))
        assert RunFolder(out).read_run().status == "running"
    federation.submit(app, config)
    under_way(rows(out) + 1)
    with frozen(federation):
        assert federation.find("superlink", "flwr-serverapp")
        federation.stop("superlink")
        assert federation.find("superlink") == []
        assert RunFolder(out).read_run().status == "running"
        assert rows(out) < 7
        federation.start_link()
    federation.submit(app, config)
    assert eventually(lambda: ended(out), 18 * patience), federation.tail("superlink")
    assert RunFolder(out).read_run().status == "finished", RunFolder(out).read_run().message
    same_as_sequential(toy, out, words)


def test_the_apps_end_with_a_superlink_that_is_killed(
    app: Path, patience: float, tmp_path: Path
) -> None:
    """Nobody asks them to: they see it; then the run can be gone on with."""
    out, nodes = (
        tmp_path / "run",
        [f'{one} state="{tmp_path / "state"}"' for one in shared_configs(1)],
    )
    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, {"out": str(out), "settings": "rounds=1000"})
        assert eventually(lambda: rows(out) >= 2, 9 * patience), federation.tail("superlink")
        (server,) = federation.find("superlink", "flwr-serverapp")
        os.kill(federation.find("superlink", "flower-superlink")[0], signal.SIGKILL)
        assert eventually(lambda: not federation.is_alive("superlink"))
        assert eventually(lambda: not alive(server), 2 * ORPHAN_SECONDS + patience)
        assert RunFolder(out).read_run().status == "interrupted"
        with RunFolder(out).alone():  # nobody holds it any more
            pass
    assert living(tmp_path) == []


def test_nothing_is_left_of_a_federation(app: Path, patience: float, tmp_path: Path) -> None:
    """Also of its helpers in sessions of their own, in the middle of a run."""
    out, nodes = (
        tmp_path / "run",
        [f'{one} state="{tmp_path / "state"}"' for one in shared_configs(1)],
    )
    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, {"out": str(out), "settings": "rounds=1000"})
        assert eventually(lambda: rows(out) >= 1, 9 * patience), federation.tail("superlink")
        names = ("flower-superlink", "flower-superexec", "flwr-serverapp", "flower-supernode")
        seen = living(tmp_path)
        assert all(any(name in words for words in seen) for name in names), seen
    assert living(tmp_path) == []
    assert RunFolder(out).read_run().status == "running"  # it was killed, and can be gone on with
