"""Compiled steps that differ in float32 by rounding that the method makes large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel.engine.compiler import cache
from fedkeel.engine.compiler.compiled_function import CompiledFunction
from method.players import ENTRIES

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40)


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.fc = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.body(x)))


def run(method: str, model: nn.Module) -> fk.Result:
    return fk.run(
        method,
        task=fk.Task(model, head="fc"),
        clients=fk.iid(X, Y, clients=4),
        test=(X, Y),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4, momentum=0.5),
        engine=fk.Engine(kind="vectorized", parallel_clients=3, workers=1, device="cpu"),
        progress=False,
    )


@pytest.fixture
def _apart_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if in float32 nothing came out as it does by the function itself."""
    close = cache._are_close

    def apart(one: Tensor, other: Tensor, *more: Any) -> bool:
        in_float64 = len(more) == 1  # where also what is float32 in each case is compared as it is
        return in_float64 and close(one, other, *more)

    monkeypatch.setattr(cache, "_are_close", apart)


FAST = ("fedavg",)

LEFT_OUT = ("fedbuff", "ifca", "fedamp", "fltrust", "fedmd")
"""Waits for more clients; clients are not side by side; needs examples that are not given here."""

SLOW = [e for e in ENTRIES if e not in (*FAST, *LEFT_OUT)]


@pytest.mark.parametrize(
    "method", [*FAST, *(pytest.param(e, marks=pytest.mark.slow) for e in SLOW)]
)
def test_what_is_the_same_in_float64_is_compiled(
    method: str, request: pytest.FixtureRequest
) -> None:
    expected = run(method, Net())
    assert not expected.record.engine.reasons
    request.getfixturevalue("_apart_in_float32")
    found = run(method, Net())
    assert not found.record.engine.reasons, found.record.engine.reasons
    for name, value in expected.params.items():
        assert torch.equal(found.params[name], value)


def test_what_differs_in_float64_too_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(CompiledFunction):
        def __call__(self, *given: Tensor) -> list[Tensor]:
            return [t * 1.1 if t.is_floating_point() else t for t in super().__call__(*given)]

    monkeypatch.setattr("fedkeel.engine.compiler.cache.CompiledFunction", Off)
    found = run("fedavg", Net())
    assert any("gives another" in why for why in found.record.engine.reasons)
