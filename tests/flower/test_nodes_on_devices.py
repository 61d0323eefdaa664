"""Real nodes of which one trains by compiled steps, in a process that stays for the whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from commands import call, rows
from fedkeel.config import load
from fedkeel.flower.export import export
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from toys import eventually, living

pytestmark = pytest.mark.processes


def test_a_federation_of_nodes_that_differ(toy: Path, patience: float, tmp_path: Path) -> None:
    words = ["method=scaffold", "rounds=3", "partition.clients=4", "cohort.clients=4"]
    out, app = tmp_path / "run", tmp_path / "app"
    export(load(toy, words), app)
    nodes = [f'partition-id={i} num-partitions=2 state="{tmp_path / str(i)}"' for i in range(2)]
    nodes[1] += ' device="cpu" engine="vectorized"'
    seen: set[int] = set()

    def has_ended() -> bool:
        seen.update(federation.find("node-1", "trainer_process"))
        assert not federation.find("node-0", "trainer_process")
        return rows(out) == 4 and RunFolder(out).read_run().status == "finished"

    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, {"out": str(out)})
        assert eventually(has_ended, 12 * patience), federation.tail("superlink")
    assert len(seen) == 1  # it has answered all messages
    assert not living(tmp_path)
    record, folder = RunFolder(out).read_run(), RunFolder(out)
    assert [row.faults for row in folder.rows()] == [{}] * 4
    assert record.engine.devices == ["cpu"]
    (warning,) = [text for text in record.warnings if "bits of a simulation" in text]
    assert "clients 0, 2: sequential on the processor" in warning
    assert "clients 1, 3: vectorized on the processor in float32" in warning
    near = tmp_path / "near"
    settings = [word for one in words for word in ("-s", one)]
    done = call("run", toy, "--out", near, "-q", *settings)
    assert done.code == 0, done.err
    one, two = (load_file(folder / "model.safetensors") for folder in (out, near))
    for name, tensor in two.items():
        torch.testing.assert_close(one[name], tensor, rtol=1e-9, atol=1e-11)
