"""The operator decides where a node trains, within the policy of the site; the server may wish."""

from __future__ import annotations

from typing import Any

import pytest

from each import each
from fedkeel import config
from fedkeel.errors import ConfigError, FedkeelError, RunError
from fedkeel.features.budget.policy import Policy, PolicyError
from fedkeel.flower.node import hardware
from fedkeel.flower.node.hardware import PLAIN, Hardware, NodePlace

AUTO = config.Engine()

FIRST = NodePlace(("cuda:0",), "vectorized", may_be_cpu=True)


def gpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr(hardware, "available_gpus", lambda: [f"cuda:{i}" for i in range(count)])


@each(
    "wish",
    [
        {},
        {"kind": "vectorized"},
        {"device": "cuda"},
        {"kind": "vectorized", "device": "cuda"},
        {"kind": "workers"},
        {"devices": ("cuda:0", "cuda:1")},
    ],
)
def test_without_a_gpu_a_node_trains_as_a_simulation(
    monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]
) -> None:
    gpus(monkeypatch, 0)
    place = Hardware().place(config.Engine.model_validate(wish))
    assert place == PLAIN
    assert place.is_plain


@each(
    "wish, place",
    [
        ({}, FIRST),
        ({"device": "cuda"}, FIRST),
        ({"kind": "vectorized"}, FIRST),
        ({"kind": "sequential", "device": "cuda"}, FIRST),
        ({"device": "cpu"}, PLAIN),
        ({"kind": "sequential"}, PLAIN),
    ],
)
def test_a_gpu_is_used_unless_the_experiment_wants_the_processor(
    monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], place: NodePlace
) -> None:
    gpus(monkeypatch, 2)
    assert Hardware().place(config.Engine.model_validate(wish)) == place


@each(
    "values, wish, place",
    [
        ({"device": "cpu"}, {"device": "cuda"}, PLAIN),
        ({"device": "cuda"}, {"device": "cpu"}, NodePlace(("cuda:0",), "vectorized", False)),
        ({"device": "cuda:1"}, {}, NodePlace(("cuda:1",), "vectorized", False)),
        (
            {"device": "cuda:1", "engine": "sequential"},
            {"kind": "vectorized"},
            NodePlace(("cuda:1",), "sequential", False),
        ),
        ({"device": "cuda:0, cuda:1"}, {}, NodePlace(("cuda:0", "cuda:1"), "vectorized", False)),
        ({"device": "cpu", "engine": "vectorized"}, {}, NodePlace(("cpu",), "vectorized", True)),
    ],
)
def test_the_operators_word_stands_before_the_servers_wish(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], wish: dict[str, Any], place: NodePlace
) -> None:
    gpus(monkeypatch, 2)
    assert Hardware.read(values).place(config.Engine.model_validate(wish)) == place


@each(
    "device, allowed, devices, may_be_cpu",
    [
        ("auto", ("cpu",), ("cpu",), True),
        ("auto", ("cuda:1",), ("cuda:1",), False),
        ("auto", ("cpu", "cuda:1"), ("cuda:1",), True),
        ("auto", ("cuda",), ("cuda:0",), False),
        ("cuda", ("cuda:1",), ("cuda:1",), False),
    ],
)
def test_a_policy_restricts_the_devices(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    allowed: tuple[str, ...],
    devices: tuple[str, ...],
    may_be_cpu: bool,
) -> None:
    gpus(monkeypatch, 2)
    place = Hardware.read({"device": device}).place(AUTO, Policy(devices=allowed))
    assert (place.devices, place.may_be_cpu) == (devices, may_be_cpu)


NONE, NOT_ALLOWED = "There is no GPU that torch can use", "does not allow the device"


@each(
    "count, device, allowed, kind, words",
    [
        (0, "cuda", None, RunError, NONE),
        (0, "cuda:0", None, RunError, NONE),
        (1, "cuda:1", None, RunError, "There is no device 'cuda:1' on this node"),
        (1, "cuda:0", ("cpu",), PolicyError, NOT_ALLOWED),
        (1, "cuda", ("cpu",), PolicyError, NOT_ALLOWED),
        (1, "cpu", ("cuda",), PolicyError, NOT_ALLOWED),
        (0, "auto", ("cuda",), PolicyError, NOT_ALLOWED),
        (1, "gpu", None, ConfigError, "A node has no such device"),
        (1, "cpu,cuda:0", None, ConfigError, "A node has no such device"),
        (1, "auto,cuda:0", None, ConfigError, "A node has no such device"),
        (1, "cuda:0,cuda:0", None, ConfigError, "the same device twice"),
        (2, "cuda, cuda:0", None, ConfigError, "the same device twice"),
        (0, "cpu,cpu", None, ConfigError, "the same device twice"),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    device: str,
    allowed: tuple[str, ...] | None,
    kind: type[FedkeelError],
    words: str,
) -> None:
    gpus(monkeypatch, count)
    policy = None if allowed is None else Policy(devices=allowed)
    with pytest.raises(kind, match=words):
        Hardware.read({"device": device}).place(AUTO, policy)


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="A node has no such engine"):
        Hardware.read({"engine": "ray"})
    with pytest.raises(ConfigError, match="'devices' has 'gpu'"):
        Policy(devices=("gpu",))
