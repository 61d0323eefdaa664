"""bf16-mixed: the network in bfloat16, everything else in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedkeel import Engine
from fedkeel.errors import FedkeelError
from fedkeel.runner.start import start
from fedkeel.study.conformance.small_federation import SmallFederation, SmallMLP
from method.players import ENTRIES

MIXED = {"dtype": "float32", "precision": "bf16-mixed"}
FAST = ("scaffold", "moon")
PROJECTS = ("fedgc", "fedmuon")
"""A sign, or the direction of an orthogonal factor, decides what is added: rounding may turn it."""

LEFT_OUT = {
    "ifca": "a part asks for all examples of a client, so clients are not side by side",
    "fedamp": "each client receives a model of its own, so clients are not side by side",
    "fedmd": "clients train on public inputs first, so they are not side by side",
    "fedproto": "the server has no parameters that could be compared",
    "fedbuff": "its buffer is larger than the small federation",
}

EVERY = [
    pytest.param(e, marks=() if e in FAST else pytest.mark.slow)
    for e in ENTRIES
    if e not in LEFT_OUT
]


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("entry", EVERY)
def test_every_method_is_near_float32(entry: str) -> None:
    federation = SmallFederation(entry, None)
    exact = start(federation.prepare(dtype="float32"))
    mixed = start(federation.prepare(**MIXED))
    side_by_side = start(
        federation.prepare(**MIXED, kind="vectorized", parallel_clients=2, workers=1)
    )
    assert not side_by_side.record.engine.reasons
    moved = farthest(exact.params, federation.prepare(dtype="float32").server.params)
    allowed = (0.7 if entry in PROJECTS else 0.05) * moved
    assert 0 < farthest(exact.params, mixed.params) < allowed
    assert farthest(side_by_side.params, mixed.params) < allowed


def test_layers_compute_in_bfloat16_and_scores_and_gradients_are_float32() -> None:
    setup = SmallFederation("fedavg", None).prepare(**MIXED).setup
    network, seen = setup.training.network, list[torch.dtype]()
    layer = network._train.get_submodule("fc1")
    layer.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    params = network.params
    x = torch.randn(3, 5)
    scores = network.logits(params, {}, x)
    assert seen == [torch.bfloat16]
    assert scores.dtype is torch.float32
    exact = SmallMLP()
    exact.load_state_dict(params)
    torch.testing.assert_close(scores, exact(x), rtol=0.03, atol=0.03)
    assert not torch.equal(scores, exact(x))


def test_it_is_refused_with_float64() -> None:
    with pytest.raises((FedkeelError, ValueError), match="bf16-mixed"):
        Engine(dtype="float64", precision="bf16-mixed")


def test_a_run_in_it_has_a_key_of_its_own() -> None:
    federation = SmallFederation("fedavg", None)
    keys = {federation.prepare(**MIXED).key, federation.prepare(dtype="float32").key}
    assert len(keys) == 2
