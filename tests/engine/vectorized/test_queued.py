"""Clients that are given to a GPU before the ones before them are read, on the processor.

Compiled functions keep their memory from call to call, as captured graphs do, and the next group of
clients is trained before the reply of the last one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from engine.vectorized.test_engine import ALIKE, RAGGED, net, ready
from fedkeel.engine.compiler import cache
from fedkeel.engine.compiler.cuda_graphs import CudaGraphFunction
from fedkeel.engine.evaluation import evaluate
from fedkeel.engine.vectorized.engine import VectorizedTrainer
from fedkeel.engine.vectorized.streams import Streams
from fedkeel.runner.start import start


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make graphs of compiled functions; return a list that gets an entry for each."""
    made: list[int] = []

    def kept(run: Callable[[], Sequence[Tensor]], _: object) -> Any:
        made.append(1)
        outputs = list(run())

        def replay() -> None:
            for own, found in zip(outputs, run(), strict=True):
                place, source = own.untyped_storage(), found.untyped_storage()
                if place.data_ptr() != source.data_ptr():
                    place.copy_(source)

        return replay, outputs

    monkeypatch.setattr(cache, "becomes_graph", lambda tensor: True)
    monkeypatch.setattr(cache, "CudaGraphFunction", partial(CudaGraphFunction, capture=kept))
    monkeypatch.setattr(VectorizedTrainer, "queue_length", 1)
    return made


@pytest.fixture
def three_streams(queue: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let single clients take turns on three streams, each with graphs of its own."""
    turns: list[int] = []

    @contextmanager
    def turn(_: Streams) -> Iterator[None]:
        yield
        turns.append(1)

    monkeypatch.setattr(Streams, "turn", turn)
    monkeypatch.setattr(cache, "current_stream", lambda tensor: len(turns) % 3)
    monkeypatch.setattr(VectorizedTrainer, "queue_length", 3)


@pytest.mark.usefixtures("three_streams")
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_clients_on_streams_of_their_own_are_the_sequential_ones(
    method: str, queue: list[int]
) -> None:
    given = {"method": method, "epochs": 1, "batch_size": 3}
    exact = start(ready(**given))
    engine = {"kind": "vectorized", "workers": 1, "parallel_clients": 1}
    found = start(ready(**given, engine=engine))
    assert queue, "no function became a graph"
    assert len(queue) % 3 == 0, "each stream has a graph of each function"
    assert not found.record.engine.reasons
    for name, expected in exact.params.items():
        torch.testing.assert_close(found.params[name], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("parallel_clients", [1, 2])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"method": "scaffold", "sizes": RAGGED},
        {"epochs": 1, "batch_size": 3},
        {"model": net(nn.BatchNorm2d(4)), "sizes": ALIKE, "buffers": "average"},
    ],
    ids=["whole rounds", "scaffold", "by steps", "buffers"],
)
def test_a_reply_is_not_written_over_by_the_next_client(
    given: dict[str, Any], parallel_clients: int, queue: list[int]
) -> None:
    exact = start(ready(**given))
    engine = {"kind": "vectorized", "workers": 1, "parallel_clients": parallel_clients}
    queued = start(ready(**given, engine=engine))
    assert queue, "no function became a graph"
    assert not queued.record.engine.reasons
    for name, expected in exact.params.items():
        torch.testing.assert_close(queued.params[name], expected, rtol=0, atol=1e-10)
    losses, of_exact = ([row.train_loss for row in run.rows[1:]] for run in (queued, exact))
    assert losses == pytest.approx(of_exact)


def test_another_learning_rate_compiles_nothing_anew(
    queue: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_function = cache._compile

    def counted(call: cache.Call, *rest: Any) -> Any:
        compiled.append(call.name)
        return compile_function(call, *rest)

    monkeypatch.setattr(cache, "_compile", counted)
    schedule = fk.Schedule(kind="exponential", decay=0.5)
    given = {"sizes": (6, 6, 6), "epochs": 3, "batch_size": 2, "schedule": schedule}
    exact = start(ready(**given))
    found = start(ready(**given, engine={"kind": "vectorized", "workers": 1}))
    assert len({row.lr for row in found.rows[1:]}) == 3
    assert sorted(compiled) == ["end", "start", "step"]
    assert len(queue) == 1 + 2 * 3, "a rate is a number in the graphs of a step and of the end"
    for name, expected in exact.params.items():
        torch.testing.assert_close(found.params[name], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("split", ["test", "clients"])
def test_an_evaluation_in_larger_passes_has_the_rows_of_the_smaller_shards(split: Any) -> None:
    setup = ready().setup
    params, buffers = setup.training.network.params, setup.training.network.buffers
    setup.__dict__["shard"] = 3
    expected = evaluate(setup, params, buffers, split)
    setup.__dict__["shard"] = 8  # room for two shards
    found = evaluate(setup, params, buffers, split, 3)
    torch.testing.assert_close(found.states, expected.states)
    torch.testing.assert_close(found.kept, expected.kept)
    assert len(expected.states) > 1
