"""Clients side by side are bounded by a measured step, before memory runs out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.vectorized.test_engine import net, ready
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.engine.vectorized import memory as module
from fedkeel.engine.vectorized.memory import COMPILED, USABLE, MemoryBound, Peak
from fedkeel.runner.start import start

CPU = torch.device("cpu")


def test_the_peak_is_what_existed_at_the_same_time() -> None:
    before, peak = torch.ones(1000), Peak()
    with peak.measuring(CPU):
        first = before + 1  # 4,000 bytes
        second = torch.cat([first, first])  # 8,000 more
        del first
        third = second.view(2, 1000)[1].add_(1)  # nothing: views, and in place
        del second, third
        fourth = torch.zeros(2500)  # 10,000, after the first 12,000 have gone
        fourth.to("meta")
    assert peak.nbytes == 12_000


def bound(monkeypatch: pytest.MonkeyPatch, free: float, processes: int = 1) -> MemoryBound:
    monkeypatch.setattr(module, "free_on", lambda device: int(free))
    return MemoryBound(CPU, processes)


def two_clients_of(kilobytes: int, calls: list[int]) -> object:
    def make() -> None:
        calls.append(kilobytes)
        torch.zeros(2 * kilobytes * 250)

    return make


def test_as_many_clients_as_fit_into_a_process_s_share(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    small = two_clients_of(1, calls)
    room = 10.5 * COMPILED * 1000 / USABLE
    assert bound(monkeypatch, room).clients(64, 5, small) == 10
    assert bound(monkeypatch, room, processes=2).clients(64, 5, small) == 5
    assert bound(monkeypatch, 100).clients(64, 5, small) == 1
    found = bound(monkeypatch, room)
    calls.clear()
    assert found.clients(2, 5, small) == 2  # that is what would be measured
    assert calls == []
    assert [found.clients(8, 5, small), found.clients(8, 4, small)] == [8, 8]
    assert calls == [1]
    assert found.clients(9, 6, two_clients_of(5, calls)) == 2  # of larger batches fewer fit
    assert calls == [1, 5]


def test_a_step_that_cannot_be_measured_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        torch.rand(3)
        raise CannotCompile("no rule")

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert bound(monkeypatch, 1.0).clients(64, 5, refuse) == 64
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_group_is_made_smaller_before_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so, and the result is that of fewer clients side by side."""
    engine = {"kind": "vectorized", "workers": 1}
    given = {"method": "scaffold", "model": net(nn.Identity())}
    expected = start(ready(**given, engine={**engine, "parallel_clients": 2}))
    assert not expected.record.engine.reasons
    most = []
    monkeypatch.setattr(MemoryBound, "free", lambda self: _room_for(self, 2.5, most))
    result = start(ready(**given, engine={**engine, "parallel_clients": 5}))
    assert most
    assert "at most 2 clients are trained side by side" in result.record.engine.reasons[0]
    for name, tensor in expected.params.items():
        torch.testing.assert_close(result.params[name], tensor, rtol=0, atol=1e-10)


def _room_for(memory: MemoryBound, clients: float, called: list[float]) -> int:
    """Return free bytes for so many clients of the step that was measured."""
    called.append(memory._client_bytes)
    assert memory._client_bytes > 0
    return int(clients * COMPILED * memory._client_bytes / USABLE)
