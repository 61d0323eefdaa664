"""The worked methods of the guide do what every method has to do, and what their pages say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedkeel as fk
from fedkeel.study.conformance import CHECKS, check_method
from fedkeel.tree import Tree

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("server_optimiser", "client_and_server")


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder with copies of the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text("utf-8"), "utf-8")
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def models(method: str, rounds: int, lr: float = 0.1) -> Tree:
    """Return the global model after some rounds of full-batch steps."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=random), torch.arange(60) % 3

    def net() -> torch.nn.Module:
        return torch.nn.Linear(4, 3)

    result = fk.run(
        method,
        task=fk.Task(net),
        clients=fk.by_client(x, y, [f"c{i}" for i in range(3) for _ in range(20)]),
        test=(x, y),
        rounds=rounds,
        local=fk.Local(lr=lr, epochs=1, batch_size="all"),
        weights="uniform",
        engine=fk.Engine(kind="sequential", dtype="float64"),
    )
    return result.params


@pytest.mark.parametrize(
    "method",
    [
        "server_optimiser:BoundedStep",
        "client_and_server:MeanDrift",
        pytest.param("fedprox+client_and_server:MeanDrift", marks=pytest.mark.slow),
    ],
)
def test_an_example_does_what_every_method_has_to_do(method: str) -> None:
    assert [check.name for check in check_method(method)] == list(CHECKS)


def test_mean_drift_with_rate_0_is_fedavg() -> None:
    plain = models("fedavg", 3)
    assert all(
        torch.equal(v, plain[k])
        for k, v in models("client_and_server:MeanDrift(rate=0.0)", 3).items()
    )


def test_mean_drift_cancels_where_all_clients_take_one_full_step() -> None:
    """The corrections d - d_k then have a mean of 0, so the aggregate is FedAvg's."""
    plain, corrected = models("fedavg", 2), models("client_and_server:MeanDrift(rate=1.0)", 2)
    assert all(torch.allclose(v, plain[k], rtol=0, atol=1e-14) for k, v in corrected.items())


def test_bounded_step_bounds_a_round_by_the_mean_length() -> None:
    start, first = (
        models("fedavg", 0 + 1, lr=1e-12),
        models("server_optimiser:BoundedStep(factor=1.0)", 1),
    )
    second = models("server_optimiser:BoundedStep(factor=1.0)", 2)
    plain = models("fedavg", 2)

    def length(a: Tree, b: Tree) -> float:
        return float(sum(((a[k] - b[k]) ** 2).sum() for k in a) ** 0.5)

    bound = length(first, start)
    free = length(plain, first)
    expected = min(bound, free)
    assert length(second, first) == pytest.approx(expected, rel=1e-6)
