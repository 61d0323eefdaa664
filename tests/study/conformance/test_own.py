"""The method of one's own in examples/: short, and in all else a method like any other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fedkeel as fk
from commands import call, experiment
from fedkeel.conformance import CHECKS, check_method
from fedkeel.method.docs.docstring import read
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_method.py"
METHOD = "own_method:Agreement"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder far from the project with a copy of the example."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    shutil.copy(EXAMPLE, tmp_path)
    yield tmp_path
    sys.modules.pop("own_method", None)
    sys.modules.pop("my_method", None)


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize(
    "expression",
    [
        f"{METHOD}(power=2.0)",
        pytest.param(f"scaffold+{METHOD}+momentum", marks=pytest.mark.slow),
    ],
)
def test_it_does_what_every_method_has_to_do(here: Path, expression: str) -> None:
    assert [check.name for check in check_method(expression)] == list(CHECKS)


@pytest.mark.slow
def test_so_does_the_one_at_the_clients(here: Path) -> None:
    """Of the guide. Of two rounds the second goes where the first has gone too."""
    shutil.copy(EXAMPLE.with_name("my_method.py"), here)
    for expression in ("my_method:Slow", "my_method:Slow(rate=0.6)+momentum"):
        assert [check.name for check in check_method(expression)] == list(CHECKS)
    x, y = torch.eye(3), torch.arange(3)
    given = {"clients": fk.iid(x, y, clients=1), "test": (x, y), "rounds": 2}
    given |= {"local": fk.Local(lr=0.1, steps=1, batch_size="all"), "weights": "uniform"}

    def run(method: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 3)
        found = fk.run(method, task=fk.Task(net), **given)
        return net.weight.detach(), found.params["weight"]

    start, plain = run("fedavg")
    assert torch.equal(run("my_method:Slow(rate=0.0)")[1], plain)
    moved = {rate: run(f"my_method:Slow(rate={rate})")[1] - start for rate in (0.25, 0.5)}

    def step(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x @ w.T + b, y)
        return torch.autograd.grad(loss, (w, b))

    torch.manual_seed(0)
    bias = torch.nn.Linear(3, 3).bias.detach()
    for rate, way in moved.items():
        g1 = step(start, bias)
        w, b = start - 0.1 * (1 - rate) * g1[0], bias - 0.1 * (1 - rate) * g1[1]
        g2 = step(w, b)
        expected = w - 0.1 * (rate * (1 - rate) * g1[0] + (1 - rate) * g2[0]) - start
        assert torch.allclose(way, expected, atol=1e-7), rate


def test_it_is_documented_as_any_other(here: Path) -> None:
    (part,) = parse(METHOD).parts
    assert read(type(part)).args.keys() == {"power"}


def test_it_runs_and_keeps_its_laws(here: Path) -> None:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 4, generator=random), torch.arange(90) % 3
    clients = fk.dirichlet(x, y, clients=6, alpha=0.3)
    task = fk.Task(lambda: torch.nn.Linear(4, 3))
    given = {"task": task, "clients": clients, "test": (x, y), "rounds": 3}
    given |= {"local": fk.Local(lr=0.1, epochs=1, batch_size=5)}

    def end(method: str, per_round: int) -> torch.Tensor:
        return fk.run(method, clients_per_round=per_round, **given).params["weight"]

    plain = end("fedavg", 4)
    assert torch.equal(end(f"{METHOD}(power=0.0)", 4), plain)
    assert torch.equal(end(METHOD, 1), end("fedavg", 1))
    assert not torch.allclose(end(METHOD, 4), plain, atol=1e-4)


def test_its_numbers(here: Path) -> None:
    """Of three entries: all agree on one, half on another, and two cancel in the last."""
    rows = {"w": torch.tensor([[1.0, 2.0, 3.0], [4.0, -1.0, 0.0], [1.0, 2.0, -3.0]])}
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).numpy()
    update = {"w": torch.tensor([2.0, 2.0, 8.0])}

    class Cohort:
        pass

    cohort = Cohort()
    cohort.weights = weights
    (part,) = parse(f"{METHOD}(power=2.0)").parts
    found = part.transform_aggregate(update, Span(rows), cohort)
    assert torch.allclose(found["w"], torch.tensor([2.0, 0.5, 0.5]))


def test_the_command_finds_it_beside_the_experiment(here: Path) -> None:
    experiment(here)
    words = ("toy.toml", "-s", f"method=fedprox+{METHOD}", "-s", "rounds=2", "--json")
    done = call("run", *words)
    assert done.code == 0, done.err
    again = call("run", *words)
    assert (again.json["last"], "earlier run" in again.err) == (done.json["last"], True)
    described = call("methods", METHOD)
    assert described.code == 0, described.err
    assert "Moves each parameter by as much as the clients agree on the direction." in described.out


@pytest.mark.slow
def test_the_command_checks_it(here: Path) -> None:
    """Line by line, and nothing is hidden behind the first that fails."""
    done = call("methods", f"scaffold+{METHOD}", "--check")
    assert (done.code, done.out.count("holds  ")) == (0, len(CHECKS)), done.out
    text = EXAMPLE.read_text(encoding="utf-8")
    wrong = text.replace("signs = {", 'delta["fc1.bias"].add_(1.0)\n        signs = {')
    assert wrong != text
    (here / "bad_method.py").write_text(wrong.replace("Sent: ", "From: "), encoding="utf-8")
    done = call("methods", "bad_method:Agreement", "--check")
    assert done.code == 1
    assert "holds  its docstring says what it is\nnote   The docstring of agreement" in done.out
    assert done.out.count("holds  ") < len(CHECKS)
    found = call("methods", "bad_method:Agreement", "--check", "--json").json
    assert [one["name"] for one in found] == list(CHECKS)
    (here / "plain_method.py").write_text(text.replace("Sent: ", "From: "), encoding="utf-8")
    done = call("methods", "plain_method:Agreement", "--check")
    assert (done.code, done.out.count("note  ")) == (0, 1), done.out
    for module in ("bad_method", "plain_method"):
        sys.modules.pop(module, None)
