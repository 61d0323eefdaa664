"""Secure sums between real processes, one of which is killed in each phase of a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict
from safetensors.torch import load_file

from fedkeel.config import load
from fedkeel.flower.local import keys
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from in_process_grid import InProcessGrid, header_of, make_nodes, run_on_nodes
from toys import eventually

Write = Callable[[Path, list[str]], None]

WORDS = ["method=scaffold", "rounds=5", "partition.clients=3", "cohort.clients=3"]

PHASES = "dies@keys:1 dies@shares:2 dies@masked:3 dies@unmask:4"


@pytest.mark.processes
def test_sums_of_processes_are_those_of_plain_updates(
    misbehaving: Write, patience: float, tmp_path: Path
) -> None:
    """From the second round on a node dies, in another phase of each, and is back in the next.

    The nodes authenticate by keys, sign with these what they send, and take nobody else's.
    """
    app, out, state = tmp_path / "app", tmp_path / "run", tmp_path / "state"
    misbehaving(app, [*WORDS, "flower.secure_aggregation=true"])
    folder, made = RunFolder(out), tmp_path / "federation" / "keys"
    keys.make(made, ["127.0.0.1", "localhost"], 3)
    peers = made / "peers"
    peers.write_text("".join((made / f"node-{i}.pub").read_text() for i in range(3)))
    nodes = [
        f'partition-id={i} num-partitions=3 state="{state / str(i)}" key="{made / f"node-{i}"}" '
        f'peers="{peers}"'
        for i in range(3)
    ]
    nodes[1] += f' bad="{PHASES}"'
    with FlowerProcesses(tmp_path / "federation", nodes, secure=True) as federation:
        federation.submit(app, {"out": str(out)})
        is_over = eventually(
            lambda: folder.exists() and folder.read_run().status != "running", 60 * patience
        )
        assert is_over, federation.tail("superlink")
    record, rows = folder.read_run(), folder.rows()
    assert record.status == "finished", record.message
    everybody, others = [0, 1, 2], [0, 2]
    assert [row.clients for row in rows[1:]] == [everybody, others, others, others, everybody]
    for row in rows[2:5]:
        assert "SIGKILL" in next(iter(row.faults))
    # Two nodes unmask the sum of three; the third may hear of it only at its next sum.
    assert len(list(tmp_path.rglob("secure-sum*"))) <= 1

    quick = ["flower.deadline_seconds=0.5", "flower.secure_aggregation=false"]
    plain = load(app / "federation" / "experiment.toml", quick)
    prepared = prepare(plain, gather(plain))
    grid = InProcessGrid(make_nodes(prepared, tmp_path / "plain", nodes=3))

    def dies(kind: str, reply: RecordDict) -> RecordDict | None:
        return None if kind == "train" and header_of(reply)["round"] in (1, 2, 3) else reply

    grid.edits[10**9 + 7] = dies
    expected = run_on_nodes(prepared, grid)
    model = load_file(out / "model.safetensors")
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(model[name], tensor, rtol=1e-9, atol=1e-11)
