"""A server that does not wait, among real processes, one of which is slow."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedkeel as fk
from commands import rows
from fedkeel.config import load
from fedkeel.data.cohort import Selection
from fedkeel.engine.prepared import Prepared
from fedkeel.features.time.asynchronous import Asynchronous
from fedkeel.features.time.availability import Always
from fedkeel.features.time.devices import Devices
from fedkeel.features.time.schedule import Due, Timing
from fedkeel.features.time.trainings import VirtualTrainings
from fedkeel.features.time.work import ClientWork
from fedkeel.flower.local.processes import FlowerProcesses
from fedkeel.records.folder import RunFolder
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from toys import eventually

Write = Callable[[Path, list[str]], None]

WORDS = ["method=scaffold+fedbuff(buffer=2)", "rounds=12", "partition.clients=4"]
WORDS += ["cohort.clients=4", "engine.checkpoint_seconds=0", "weights=uniform"]


ONES = np.ones(4)
TIMING = Timing(fk.System(), ClientWork(ONES, ONES, 0, 0), Devices(ONES, ONES, ONES), Always(), 0)


class KeepsAll(VirtualTrainings):
    """Trainings in which a client may have the model of any round."""

    @property
    def versions(self) -> set[int]:
        return set(range(20))


class Again(Asynchronous):
    """The clients and the models of rows, once more."""

    def __init__(self, prepared: Prepared, made: list[RoundRecord]) -> None:
        super().__init__(KeepsAll(TIMING), prepared.cohort, np.ones(4), 0, 2)
        self._made = made

    def due(self, round: int) -> Due:
        row = self._made[round + 1]
        clients = np.array(row.clients)
        return Due(Selection(clients, clients[:0]), round - np.array(row.staleness))


@pytest.mark.processes
def test_a_slow_node_is_used_late_and_the_simulation_of_that_order_has_the_same_bits(
    misbehaving: Write, patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 3 is three steps late each time; the server is killed in the middle."""
    app, out, state = tmp_path / "app", tmp_path / "run", tmp_path / "state"
    misbehaving(app, WORDS)
    nodes = [f'partition-id={i} num-partitions=4 state="{state / str(i)}"' for i in range(4)]
    nodes[3] += f' slow="{out / "rounds.jsonl"}"'
    folder, config = RunFolder(out), {"out": str(out), "resume": True}
    with FlowerProcesses(tmp_path / "federation", nodes) as federation:
        federation.submit(app, config)
        assert eventually(lambda: rows(out) >= 7, 30 * patience), federation.tail("superlink")
        (server,) = federation.find("superlink", "flwr-serverapp")
        os.kill(server, signal.SIGKILL)
        assert eventually(lambda: federation.find("superlink", "flwr-serverapp") == [])
        assert folder.read_run().status == "running"
        federation.submit(app, config)
        is_over = eventually(lambda: folder.read_run().status == "finished", 30 * patience)
        assert is_over, federation.tail("superlink")
    made = folder.rows()
    assert [row.round for row in made] == list(range(13))
    late = [
        (age, seconds)
        for row in made
        for client, age, seconds in zip(
            row.clients, row.staleness, row.staleness_seconds, strict=True
        )
        if client == 3
    ]
    assert late
    assert all(age >= 3 and seconds > 0 for age, seconds in late)
    assert all(sum(row.bytes_up.values()) for row in made[1:])

    settings = load(app / "federation" / "experiment.toml", [])
    run = prepare(settings, gather(settings))
    monkeypatch.setattr(
        "fedkeel.features.time.feature.steps_of",
        lambda prepared, _: Again(prepared, made),
    )
    again = start(run)
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, again.state_dict()[name])
