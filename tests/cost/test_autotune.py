"""The engine that `auto` takes, from what it has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedkeel as fk
from fedkeel.cost import autotune as module
from fedkeel.cost import timing
from fedkeel.cost.autotune import choose_engine
from fedkeel.cost.timing import SEQUENTIAL, EngineTimes
from fedkeel.records.run_record import EngineChoice
from toys import four_each


@pytest.mark.parametrize(
    ("clients", "seconds", "found"),
    [
        # heavy clients: all cores, exact unless a recorded step is worth it
        (20, {SEQUENTIAL: 0.1}, ("workers", 2, 1)),
        (20, {SEQUENTIAL: 0.1, 1: 0.097}, ("workers", 2, 1)),
        (20, {SEQUENTIAL: 0.1, 1: 0.08}, ("vectorized", 2, 1)),
        # a chunk of all clients keeps one process busy, however fast it is for each
        (
            20,
            {SEQUENTIAL: 0.1, 1: 0.05, 20: 0.04},
            ("vectorized", 2, 1),
        ),
        # rounds so short that handing them to others takes longer
        (20, {SEQUENTIAL: 1e-4}, ("sequential", 1, 1)),
        (
            20,
            {SEQUENTIAL: 1e-3, 10: 3e-4, 20: 2e-4},
            ("vectorized", 1, 20),
        ),
        # many clients: side by side in both
        (
            200,
            {SEQUENTIAL: 1e-3, 100: 2e-4, 8: 4e-4},
            ("vectorized", 2, 100),
        ),
        # and not by what a measurement differs from itself
        (
            200,
            {SEQUENTIAL: 1e-3, 32: 2e-4, 8: 1.9e-4},
            ("vectorized", 2, 32),
        ),
        # which decides between sizes, not whether there is a gain
        (
            200,
            {SEQUENTIAL: 1e-3, 32: 9.6e-4, 8: 8.8e-4},
            ("vectorized", 2, 32),
        ),
    ],
)
def test_the_shortest_round_wins(
    clients: int,
    seconds: dict[int, float],
    found: tuple[str, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "core_count", lambda: 2)
    monkeypatch.setattr(module, "_measure", lambda *_: EngineTimes(dict(seconds)))
    chosen = choose_engine(four_each(clients))
    assert (chosen.kind, chosen.workers, chosen.parallel_clients) == found
    names = {c: f"vectorized(parallel_clients={c})" if c else "sequential" for c in seconds}
    assert chosen.seconds_per_client == {names[c]: s for c, s in seconds.items()}


def test_what_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "core_count", lambda: 2)
    monkeypatch.setattr(module, "_measure", lambda *_: EngineTimes({SEQUENTIAL: 1e-4}))
    assert choose_engine(four_each(20, workers=3)).workers == 3
    chosen = choose_engine(four_each(20, kind="vectorized"))
    assert (chosen.kind, chosen.parallel_clients) == ("vectorized", 1)


def test_a_gpu_is_left_alone_by_a_run_that_is_soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.cost.device.device_error", lambda *_: "")
    times = EngineTimes({SEQUENTIAL: 1e-4, 20: 1e-5})
    monkeypatch.setattr(module, "_measure", lambda *_: times)
    for each, device in ((1e-5, "cpu"), (1.0, "cuda")):
        monkeypatch.setattr(timing, "_seconds", lambda *_, each=each: each)
        assert choose_engine(four_each(20)).device == device
    monkeypatch.setattr(timing, "_seconds", lambda *_: 1e-5)
    for engine in ({"device": "cuda"}, {"kind": "vectorized"}):
        found = choose_engine(four_each(20, **engine))
        assert (found.device, found.kind, found.parallel_clients) == ("cuda", "vectorized", 20)


def test_a_run_goes_on_in_one_process_with_the_same_arithmetic() -> None:
    engine = fk.Engine(workers=1)
    before = EngineChoice("workers", 4, 1)
    assert module.resumed_engine(before, fk.Engine()) == before
    assert module.resumed_engine(before, engine) == EngineChoice("sequential", 1, 1)
    there = EngineChoice("ray", 4, None, address="10.0.0.7:6379")
    assert module.resumed_engine(there, engine) == EngineChoice("sequential", 1, None)
    chunked = EngineChoice("vectorized", 2, 8)
    assert module.resumed_engine(chunked, engine) == replace(chunked, workers=1)
