"""What nodes say of how they train is bounded, shown safely, and in few words."""

from __future__ import annotations

import pytest

from fedkeel.errors import ConfigError
from fedkeel.flower.protocol import UNTOLD, NodeTraining
from fedkeel.flower.server.node_devices import MOST, NodeDevices

GPU = NodeTraining(engine="vectorized", device="cuda:0", name="NVIDIA H200", precision="bf16-mixed")


def test_nodes_that_differ_are_named_by_their_clients() -> None:
    devices = NodeDevices()
    devices.note([0, 2], NodeTraining())
    assert (devices.names, devices.warnings, devices.reasons) == ([], [], [])
    devices.note([1, 3], GPU)
    devices.note([4], UNTOLD)
    (sentence,) = devices.warnings
    assert sentence == (
        "how nodes train: clients 0, 2: sequential on the processor; clients 1, 3: vectorized on "
        "cuda:0 (NVIDIA H200) in bf16-mixed; clients 4: a device that the site does not tell. So "
        "the result is that of a simulation up to rounding, and has not the bits of a simulation"
    )
    assert devices.names == ["NVIDIA H200", "cpu", "not told"]


def test_what_has_once_differed_stays_said() -> None:
    """A GPU that is full in the last round has trained in the others."""
    devices = NodeDevices()
    devices.note([1], GPU)
    devices.note([1], NodeTraining(reasons=("the GPU has too little memory",)))
    assert devices.reasons == ["clients 1: the GPU has too little memory"]
    assert "clients 1: sequential on the processor" in devices.warnings[0]


def test_a_node_can_neither_fill_the_record_nor_move_a_cursor() -> None:
    devices = NodeDevices()
    for number in range(500):
        devices.note([number], GPU.model_copy(update={"name": f"\x1b[2J{number}"}))
        devices.note([number], NodeTraining(engine=f"e{number}", reasons=(f"\x1b[2J {number}",)))
    assert len(devices.reasons) == MOST
    assert len(devices.names) <= MOST
    told = " ".join([*devices.reasons, *devices.names, *devices.warnings])
    assert "\x1b" not in told
    assert len(told) < 100 * 3 * MOST
    with pytest.raises(ConfigError, match="at most 10 items"):
        NodeTraining(reasons=("x",) * 11)
    with pytest.raises(ConfigError, match="at most 100 characters"):
        NodeTraining(name="x" * 101)
