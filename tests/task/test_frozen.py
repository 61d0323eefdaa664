"""Frozen parameters and constant buffers: neither sent, nor kept by clients, nor copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.errors import ModelError
from fedkeel.runner.start import start
from in_process_grid import InProcessGrid, make_nodes, run_on_nodes
from toys import prepared, same


class Constants(nn.Module):
    """Half of it is frozen; two buffers are not saved, one of which changes if `counts`."""

    def __init__(self, counts: bool = False, scale: float = 2.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 4), nn.Linear(4, 3)
        self.fc1.requires_grad_(False)
        self.counts = counts
        self.register_buffer("scale", torch.full((4,), scale), persistent=False)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.passes += 1.0
        return self.fc2(torch.tanh(self.fc1(x)) * self.scale) + 0.1 * self.passes


LOCAL = fk.Local(lr=0.05, epochs=1, batch_size=8, optimiser="adamw")


def test_only_trained_parameters_are_trained_and_sent() -> None:
    ready = prepared(model=Constants, local=LOCAL)
    network = ready.setup.training.network
    result = start(ready)
    assert set(result.params) == {"fc2.weight", "fc2.bias"}
    assert result.buffers == {}
    for row in result.rows[1:]:
        for traffic in (row.bytes_down, row.bytes_up):
            assert traffic == {"model": 4 * (3 * 4 + 3) * 4}  # of four clients, in float32
    state = result.state_dict()
    Constants().load_state_dict(state, strict=True)
    assert torch.equal(state["fc1.weight"], network.frozen["fc1.weight"])
    assert not torch.equal(state["fc2.weight"], network.params["fc2.weight"])


def test_a_network_has_frozen_parameters_once_for_training_and_evaluation() -> None:
    network = prepared(model=Constants).setup.training.network
    train, evaluation = (dict(net.named_parameters()) for net in (network._train, network._eval))
    assert train["fc1.weight"] is evaluation["fc1.weight"]
    assert train["fc2.weight"] is not evaluation["fc2.weight"]
    assert set(network.frozen) == {"fc1.weight", "fc1.bias", "scale", "passes"}


def test_an_unsaved_buffer_that_changes_is_no_constant() -> None:
    with pytest.raises(ModelError, match="has buffers") as caught:
        prepared(model=lambda: Constants(counts=True))
    assert "'passes'" in str(caught.value)
    ready = prepared(model=lambda: Constants(counts=True), buffers="average")
    assert set(ready.server.buffers) == {"passes"}


def test_another_constant_is_another_run() -> None:
    keys = {prepared(model=lambda s=s: Constants(scale=s)).key for s in (2.0, 2.0, 3.0)}
    assert len(keys) == 2


@pytest.mark.parametrize("kind", ["workers", "vectorized"])
def test_engines_agree_beside_constants(kind: str) -> None:
    whole = start(prepared(model=Constants, local=LOCAL, dtype="float64"))
    other = start(prepared(model=Constants, local=LOCAL, dtype="float64", kind=kind, workers=2))
    assert other.record.engine.reasons == []
    for name, tensor in whole.params.items():
        tolerance = 0.0 if kind == "workers" else 1e-12
        assert torch.allclose(other.params[name], tensor, rtol=0.0, atol=tolerance)


def test_nodes_make_the_same_bits_with_state_that_is_kept(tmp_path: Path) -> None:
    """Beside constants, and with all that local training has."""
    schedule = fk.Schedule(kind="cosine", over="steps", warmup=0.5)
    local = fk.Local(
        lr=0.01,
        epochs=2,
        batch_size=2,
        optimiser="adamw",
        keep_state=True,
        clip_norm=0.5,
        accumulate=2,
        schedule=schedule,
    )
    run = prepared(model=Constants, local=local, dtype="float64")
    remote = run_on_nodes(run, InProcessGrid(make_nodes(run, tmp_path)))
    whole = start(run)
    for row in (*remote.rows, *whole.rows):
        row.bytes_down.clear()  # here each client is sent the model; a node of several once
    assert same(remote, whole)
