"""A SuperLink and SuperNodes as real processes end with the bits of the sequential engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from commands import rows
from fedkeel.config import load
from fedkeel.experiment.checkpoint import packed
from fedkeel.experiment.execute import start
from fedkeel.experiment.prepare import gather, prepare
from fedkeel.flower.processes import Federation
from fedkeel.method.server import Server
from fedkeel.records import RunFolder
from toys import eventually

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
    federation: Federation, app: Path, toy: Path, tmp_path: Path
) -> None:
    """They run at the same time, and each one's clients keep what is theirs."""
    for number, method in enumerate(DOZEN):
        config = {"out": str(tmp_path / str(number)), "settings": f"method={method}"}
        federation.submit(app, config)
    for number in range(len(DOZEN)):
        out = tmp_path / str(number)
        assert eventually(lambda out=out: ended(out), 300), federation.tail("superlink")
    for number, method in enumerate(DOZEN):
        found = RunFolder(tmp_path / str(number))
        assert found.read_run().status == "finished", found.read_run().message
        assert found.read_run().engine["kind"] == "flower"
        assert [row.faults for row in found.rows()] == [{}] * 3
        same_as_sequential(toy, tmp_path / str(number), [f"method={method}"])


def serverapps(run: Path) -> list[int]:
    """The processes of ServerApps."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                words = (place / "cmdline").read_bytes()
            except OSError:
                continue
            if b"flwr-serverapp" in words:
                found.append(int(place.name))
    return found


def test_server_and_superlink_killed(
    federation: Federation, app: Path, toy: Path, tmp_path: Path
) -> None:
    """SCAFFOLD, whose clients keep something, goes on with the same bits after both."""
    out, words = tmp_path / "run", ["method=scaffold", "rounds=3"]
    config = {"out": str(out), "settings": ";".join(words), "resume": True}
    federation.submit(app, config)
    assert eventually(lambda: rows(out) >= 2, 120), federation.tail("superlink")
    time.sleep(0.5)  # the checkpoint is written after the row
    for pid in serverapps(out):
        os.kill(pid, signal.SIGKILL)
    assert not ended(out)
    federation.submit(app, config)
    assert eventually(lambda: rows(out) >= 3, 120), federation.tail("superlink")
    time.sleep(0.5)
    if not ended(out):
        federation.stop("superlink")
        federation.start_link()
        federation.submit(app, config)
    assert eventually(lambda: ended(out), 120), federation.tail("superlink")
    assert RunFolder(out).read_run().status == "finished"
    same_as_sequential(toy, out, words)
