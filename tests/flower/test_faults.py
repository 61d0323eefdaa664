"""Nodes that die, hang, come late or send nonsense: each round goes on, and says what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import rows
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from toys import eventually

pytestmark = pytest.mark.processes

Write = Callable[[Path, list[str]], None]

BAD = {0: "forgets:4", 1: "shape:0 nan:1 again:2 full:3 hangs:5", 2: "names:0 huge:1 late:2 dies:3"}


@pytest.fixture(scope="module")
def app(misbehaving: Write, patience: float, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported app, with nodes that may misbehave."""
    out = tmp_path_factory.mktemp("app") / "toy"
    words = ["method=scaffold", "rounds=7", "partition.clients=3", "cohort.clients=3"]
    words += [f"flower.deadline_seconds={patience}", "flower.quorum=0.3"]
    misbehaving(out, words)
    return out


def ended(folder: RunFolder) -> bool:
    return folder.exists() and folder.read_run().status != "running"


def faults(row: RoundRecord) -> dict[int, str]:
    return {client: words for words, clients in row.faults.items() for client in clients}


def test_everything_that_goes_wrong(app: Path, patience: float, tmp_path: Path) -> None:
    state, late = tmp_path / "state", patience + 2
    nodes = [
        f'partition-id={i} num-partitions=3 state="{state / str(i)}" bad="{way}" late={late}'
        for i, way in BAD.items()
    ]
    out = tmp_path / "run"
    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, {"out": str(out)})
        folder = RunFolder(out)
        assert eventually(lambda: rows(out) >= 6 or ended(folder), 20 * patience)
        assert rows(out) >= 6, folder.read_run().message
        assert eventually((state / "2" / "2" / "began-5").exists, 4 * patience)
        federation.stop("node-2")  # in the middle of the sixth round
        assert eventually(lambda: rows(out) >= 7, 4 * patience)
        federation.stop("node-0")
        federation.stop("node-1")
        assert eventually(lambda: folder.read_run().status == "failed", 4 * patience)
        found = folder.rows()
        record = folder.read_run()
        assert "Round 7 has no quorum" in record.message
        saved = folder.load()
        assert saved is not None
        assert saved.round == 6
        for number in range(3):
            federation.start_node(number)
        federation.submit(app, {"out": str(out), "resume": True})
        gone_on = eventually(lambda: folder.read_run().status == "finished", 12 * patience)
        assert gone_on, federation.tail("superlink")
        last = folder.rows()[-1]
    check(found)
    assert last.round == 7
    assert last.clients == [0, 1, 2]


def check(found: list[RoundRecord]) -> None:
    """Each round has what was good in it, and names what was not."""
    first, second, third, fourth, fifth, sixth = found[1:7]
    assert first.clients == [0]
    assert "has another shape or type" in faults(first)[1]
    assert "other tensors than it should" in faults(first)[2]
    assert (second.clients, second.excluded) == ([0], [1, 2])
    assert faults(second)[1] == "sent NaN or infinity"
    assert "times as large as the median" in faults(second)[2]
    assert third.clients == [0]
    assert "belongs to another round" in faults(third)[1]
    assert faults(third)[2] == "no reply before the deadline"
    assert third.dropped == [1, 2]
    assert 0 in fourth.clients
    assert "cannot be written" in faults(fourth)[1]
    assert fourth.faults["no reply: its process was killed by SIGKILL"] == [2]
    assert any(
        "came late and was dropped" in words for row in (fourth, fifth) for words in row.faults
    )
    assert set(fifth.clients) >= {1}
    assert faults(fifth)[0] == "lost its client state; the method begins anew"
    assert sixth.clients == [0]
    assert set(faults(sixth)) == {1, 2}
