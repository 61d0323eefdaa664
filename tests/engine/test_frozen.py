"""A large frozen base model is held once: no client, no pass and no worker has its own."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.base import ServerModel, TrainingEngine
from fedkeel.engine.compiler import cache
from fedkeel.engine.prepared import Prepared
from fedkeel.engine.process.forking import StartMethod
from fedkeel.engine.sequential import Sequential
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.memory import Peak
from fedkeel.engine.vectorized.single_process import SingleProcess
from fedkeel.engine.workers import Workers
from fedkeel.method.server_round import server_message
from fedkeel.runner.start import start
from fedkeel.tree import nbytes
from toys import children, federation, prepared

WIDTH = 3072
BASE_BYTES = WIDTH * WIDTH * 4
"""More than 32 MB, so that the C library gives the base a mapping of its own."""

CPU = torch.device("cpu")


class Adapted(nn.Module):
    """A frozen layer of 38 MB beside an adapter of rank 2, between small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.base = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.relu(self.base(x) + self.up(self.down(x))))


def adapted(method: str = "fedavg", **engine: object) -> Prepared:
    """Prepare a run of eight clients."""
    local = fk.Local(lr=0.05, steps=2, batch_size=4)
    more = {"clients": federation(8), "per_round": 8, "local": local, "rounds": 1, **engine}
    return prepared(method, Adapted, **more)


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_no_client_and_no_pass_has_a_base_of_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensors that a round makes, with its compilation, are smaller together than one base."""
    ready = adapted("fedper+scaffold")
    network = ready.setup.training.network
    message = server_message(ready.plan, ready.server, 0.05)
    programs, compiled = [], cache._compile

    def keep(*args: object) -> object:
        result = compiled(*args)
        programs.append(result[0].program)
        return result

    monkeypatch.setattr(cache, "_compile", keep)
    engine: TrainingEngine = Sequential(ready.setup, ready.spec, 8)
    if kind == "vectorized":
        trainer = VectorizedTrainer(ready.setup, 8)
        engine = SingleProcess(ready.setup, ready.spec, 8, trainer)
    params = {**ready.server.params, **ready.setup.training.personal_params}
    server = ServerModel(dict(ready.server.params), {}, 1)
    peak = Peak()
    for do in (
        partial(engine.train, message, np.arange(8), lambda _: None),
        partial(engine.evaluate, params, {}, "test"),
        partial(engine.measure_personal, ready.setup, server),
    ):
        with peak.measuring(CPU):
            do()
        assert 0 < peak.nbytes < BASE_BYTES / 2, do
    assert not engine.reasons
    held = [t for program in programs for t in program._module.parameters() if t.ndim == 2]
    assert bool(held) == (kind == "vectorized")
    places = {t.data_ptr() for t in network.frozen.values()}
    assert {t.data_ptr() for t in held} <= places  # compiled functions refer to the base


def test_neither_messages_nor_checkpoints_nor_states_have_the_base(tmp_path: Path) -> None:
    ready = adapted("fedper+scaffold", kind="vectorized", workers=1)
    network = ready.setup.training.network
    trained = nbytes(network.params)
    assert trained < BASE_BYTES / 100
    message = server_message(ready.plan, ready.server, 0.05)
    assert nbytes({**message.params, **message.buffers}) < trained
    assert sum(item.nbytes for item in ready.spec.values()) < 3 * trained
    start(ready, tmp_path / "own")  # each client has a head of its own, so no model is whole
    large = [f for f in (tmp_path / "own").rglob("*") if f.is_file() and _is_large(f)]
    assert {f.parent.name for f in large} <= {"models"}
    ready = adapted("scaffold", kind="vectorized", workers=1)
    base = ready.setup.training.network.frozen["base.weight"]
    result = start(ready, tmp_path / "one")
    for model in (result.module, result.best_module):
        assert model["base.weight"].data_ptr() == base.data_ptr()
    large = [f for f in (tmp_path / "one").rglob("*") if f.is_file() and _is_large(f)]
    assert sorted(f.name for f in large) == ["model-best.safetensors", "model.safetensors"]
    for out in ("own", "one"):
        assert list(tmp_path.glob(f"{out}/checkpoint/*/arrays.safetensors"))


def _is_large(file: Path) -> bool:
    return file.stat().st_size > BASE_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_share_the_base(how: StartMethod) -> None:
    """Of its memory a third belongs to each of three processes, and no page to only one."""
    ready = adapted()
    message = server_message(ready.plan, ready.server, 0.05)
    trainer = VectorizedTrainer(ready.setup, 4)
    base = ready.setup.training.network.frozen["base.weight"]
    with Workers(ready.setup, ready.spec, 8, message, 2, start=how, trainer=trainer) as engine:
        engine.train(message, np.arange(8), lambda _: None)
        engine.evaluate(dict(ready.server.params), {}, "test")
        memory = _mapping(os.getpid(), base.data_ptr())
        assert memory["Rss"] >= BASE_BYTES
        assert memory["Pss"] < 0.4 * memory["Rss"]
        assert memory["Private_Dirty"] < BASE_BYTES / 100
        if how == "fork":  # at the same address; a helper of another test has no such mapping
            every = [_mapping(child, base.data_ptr()) for child in children(os.getpid())]
            workers = [own for own in every if own]
            assert len(workers) == 2
            assert all(own["Private_Dirty"] < BASE_BYTES / 100 < own["Rss"] for own in workers)


def _mapping(process: int, address: int) -> dict[str, int]:
    """Return the bytes of the mapping of a process's memory in which an address lies, by kind."""
    values: dict[str, int] = {}
    is_here = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            is_here = int(start, 16) <= address < int(end, 16)
        elif is_here and rest[-1] == "kB":
            values[first[:-1]] = int(rest[0]) * 1024
    return values
