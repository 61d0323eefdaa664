"""A real GPU against the sequential engine, for every method and for networks of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.vectorized.test_engine import ALIKE, Dropped, net, ready
from fedkeel.engine.vectorized.memory import COMPILED, USABLE, MemoryBound
from fedkeel.runner.callbacks import Callback
from fedkeel.runner.start import start
from fedkeel.study.conformance.small_federation import SmallFederation
from fedkeel.tree import Tree
from method.players import ENTRIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

GPU = {"kind": "vectorized", "device": "cuda", "workers": 1}


class Broken(Callback):
    """Ends the run by an error."""

    def on_round_end(self, row: Any, model: Any) -> None:
        """Raise an error in round 2."""
        if row.round == 2:
            raise RuntimeError("in round 2")


def close(one: Tree, other: Tree, tolerance: float) -> None:
    for name, expected in one.items():
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(other[name], expected, rtol=0, atol=tolerance * size)


NAMED = ["fedbuff(buffer=3)" if name == "fedbuff" else name for name in ENTRIES]


@pytest.mark.parametrize("entry", NAMED)
def test_every_method_on_a_gpu_is_the_sequential_one(entry: str) -> None:
    federation = SmallFederation(entry, None)
    found = start(federation.prepare(**GPU, parallel_clients=2))
    reasons = found.record.engine.reasons
    known = ("asks for all examples", "a model of its own")
    assert all(any(text in reason for text in known) for reason in reasons), reasons
    assert bool(reasons) == (entry in ("fedala", "ifca", "fedamp"))
    close(federation.reference.params, found.params, 1e-8)


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "scaffold"},
        {"augment": True},
        {"epochs": 1, "batch_size": 3},
        {"model": net(nn.Conv2d(4, 4, 3, padding=1, groups=2))},
        {"model": net(nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False))},
        {"model": net(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))},
        {"model": net(nn.GroupNorm(2, 4))},
        {"model": net(nn.BatchNorm2d(4)), "sizes": ALIKE, "buffers": "average"},
        {"model": net(nn.BatchNorm2d(4)), "buffers": "average"},
    ],
    ids=lambda given: "+".join(map(str, given)) or "plain",
)
def test_networks_on_a_gpu_are_the_sequential_ones(given: dict[str, Any], chunk: int) -> None:
    exact = start(ready(**given))
    found = start(ready(**given, engine={**GPU, "parallel_clients": chunk}))
    assert not found.record.engine.reasons, found.record.engine.reasons
    close(exact.params, found.params, 1e-10)
    one, other = exact.rows[-1].test, found.rows[-1].test
    assert one is not None
    assert other is not None
    assert other["accuracy"] == one["accuracy"]
    assert other["loss"] == pytest.approx(one["loss"])


@pytest.mark.parametrize("sizes", [ALIKE, (4, 4, 4, 8, 8), (9, 4, 13, 6, 1)])
def test_dropout_on_a_gpu_does_not_depend_on_the_chunk(sizes: tuple[int, ...]) -> None:
    runs = [
        start(ready(Dropped, sizes, epochs=1, engine={**GPU, "parallel_clients": chunk}))
        for chunk in (1, 3, 5)
    ]
    for run in runs:
        assert not run.record.engine.reasons, run.record.engine.reasons
        close(runs[0].params, run.params, 1e-10)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_run_on_a_gpu_goes_on_from_its_checkpoint(chunk: int, tmp_path: Path) -> None:
    given = {"method": "scaffold", "engine": {**GPU, "parallel_clients": chunk}}
    whole = start(ready(**given))
    prepared = ready(**given)
    with pytest.raises(RuntimeError, match="in round 2"):
        start(prepared, tmp_path / "run", callbacks=[Broken()])
    found = start(prepared, tmp_path / "run", resume=True)
    assert found.rows[-1].round == whole.rows[-1].round
    close(whole.params, found.params, 1e-12)
    assert all(tensor.device.type == "cpu" for tensor in found.params.values())


def test_auto_trains_all_clients_side_by_side_on_a_gpu() -> None:
    prepared = ready(engine={**GPU, "kind": "auto"})
    found = start(prepared).record.engine
    assert (found.kind, found.device) == ("vectorized", "cuda")
    assert found.parallel_clients == prepared.population.per_round


@pytest.mark.parametrize("entry", NAMED)
def test_every_method_one_client_after_the_other_on_a_gpu(entry: str) -> None:
    federation = SmallFederation(entry, None)
    found = start(federation.prepare(kind="sequential", device="cuda"))
    assert found.record.engine.device == "cuda"
    close(federation.reference.params, found.params, 1e-8)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("entry", ["fedavg", "scaffold", "fedreg", "moon"])
def test_mixed_precision_on_a_gpu_is_near_float32(entry: str, chunk: int) -> None:
    federation = SmallFederation(entry, None)
    exact = start(federation.prepare(dtype="float32"))
    mixed = {"dtype": "float32", "precision": "bf16-mixed"}
    found = start(federation.prepare(**GPU, **mixed, parallel_clients=chunk))
    assert not found.record.engine.reasons, found.record.engine.reasons
    close(exact.params, found.params, 2e-2)
    assert any(not torch.equal(exact.params[k], found.params[k]) for k in exact.params)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_two_processes_on_one_card_are_the_sequential_engine(method: str) -> None:
    exact = start(ready(method=method))
    engine = {"kind": "vectorized", "devices": ["cuda:0", "cuda:0"], "parallel_clients": 2}
    found = start(ready(method=method, engine=engine))
    assert found.record.engine.workers == 2
    assert not found.record.engine.reasons, found.record.engine.reasons
    close(exact.params, found.params, 1e-10)
    assert found.rows[-1].test["loss"] == pytest.approx(exact.rows[-1].test["loss"])


def test_clients_on_a_gpu_are_bounded_by_a_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def room_for_two(memory: MemoryBound) -> int:
        assert memory._client_bytes > 0
        return int(2.5 * COMPILED * memory._client_bytes / USABLE)

    exact = start(ready())
    monkeypatch.setattr(MemoryBound, "free", room_for_two)
    found = start(ready(engine={**GPU, "parallel_clients": 5}))
    assert "at most 2 clients" in found.record.engine.reasons[0]
    close(exact.params, found.params, 1e-10)
