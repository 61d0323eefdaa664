"""Gradients of modules that torch's own way of differentiating treats in a special way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedkeel as fk
from fedkeel.errors import ModelError

X = np.random.default_rng(0).normal(size=(24, 6))
Y = np.random.default_rng(1).integers(0, 3, size=24)
EPOCHS, LR = 3, 0.2


class Recomputing(nn.Module):
    """Keeps nothing of its first layers for the backward pass."""

    def __init__(self, recompute: bool = True, reentrant: bool = False, rnn: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute, self.reentrant = recompute, reentrant
        norm = nn.BatchNorm1d(8)
        self.body = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Dropout(0.3))
        self.rnn = nn.GRU(8, 8, batch_first=True) if rnn else None
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            h = self.body(x)
        else:
            given = x.requires_grad_() if self.reentrant else x
            h = checkpoint(self.body, given, use_reentrant=self.reentrant)
        return self.fc(h if self.rnn is None else self.rnn(h[:, None])[0][:, 0])


def train(model: nn.Module, engine: str = "sequential", method: str = "fedavg") -> fk.Result:
    return fk.run(
        method,
        task=fk.Task(model, head="fc" if hasattr(model, "fc") else None, buffers="average"),
        clients=fk.iid(X, Y, clients=2),
        test=(X, Y),
        rounds=2,
        local=fk.Local(lr=LR, epochs=EPOCHS, batch_size=6),
        engine=fk.Engine(kind=engine, dtype="float64"),
        progress=False,
    )


@pytest.mark.parametrize("method", ["fedavg", "fedreg", "moon"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_recomputing_in_the_backward_pass_changes_nothing(method: str, engine: str) -> None:
    expected = train(Recomputing(False), method=method)
    found = train(Recomputing(), engine, method)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-12)
    if engine == "vectorized":
        assert "checkpointing" in found.record.engine.reasons[0]


def test_recomputing_before_a_recurrent_layer_changes_nothing() -> None:
    expected, found = train(Recomputing(False, rnn=True)), train(Recomputing(rnn=True))
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-12)


def test_recomputing_that_knows_only_the_modules_own_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="use_reentrant=False"):
        train(Recomputing(reentrant=True))


def test_recomputing_is_told_of_where_each_example_needs_a_gradient() -> None:
    class Plain(Recomputing):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())

    with pytest.raises(ModelError, match="checkpointing"):
        train(Plain(), method="dpsgd")


class Listed(nn.Module):
    """Reaches its parameters by a list of its own."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(8, 3))
        self.listed = [self.one, self.two] if listed else None

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.listed or (self.one, self.two)
        return (x @ one).tanh() @ two


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_parameters_in_a_list_of_the_module_are_trained(engine: str) -> None:
    method = "fedprox(mu=0.1)"
    found, expected = (train(Listed(listed), engine, method) for listed in (True, False))
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-12)
    assert found.rows[-1].test == expected.rows[-1].test


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_frozen_parameters_are_no_way_of_its_own(engine: str) -> None:
    """They are not given, and are what the module has."""

    def frozen(recompute: bool) -> nn.Module:
        model = Recomputing(recompute)
        model.body[0].requires_grad_(False)
        return model

    expected = train(frozen(False), engine)
    assert not expected.record.engine.reasons
    assert set(expected.params) == {"body.1.weight", "body.1.bias", "fc.weight", "fc.bias"}
    found = train(frozen(True), engine)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-12)


class Unused(nn.Module):
    """Has a layer that its scores do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.aside, self.fc = nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_leaves_what_no_gradient_reaches(engine: str, momentum: float) -> None:
    plain = Unused().double()
    optimiser = torch.optim.SGD(plain.parameters(), LR, momentum=momentum, weight_decay=0.1)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for _ in range(4):
        optimiser.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimiser.step()
    found = fk.run(
        "fedavg",
        task=fk.Task(Unused()),
        clients=fk.iid(X, Y, clients=1),
        test=(X, Y),
        rounds=1,
        local=fk.Local(lr=LR, epochs=4, batch_size=24, momentum=momentum, weight_decay=0.1),
        engine=fk.Engine(kind=engine, dtype="float64"),
        progress=False,
    )
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found.params[name], value.detach(), rtol=0, atol=1e-12)


class Depth(nn.Module):
    """Leaves each of its layers out of half of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                x = x + torch.relu(layer(x))
        return self.fc(x)


class Experts(nn.Module):
    """Sends each example through one of its layers, and the last one is for none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long()
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).flatten().nonzero().flatten()
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize(
    ("model", "unreached"), [(Depth, set()), (Experts, {"experts.3.weight", "experts.3.bias"})]
)
def test_layers_that_some_calls_leave_out_are_reached(
    model: Callable[[], nn.Module], unreached: set[str]
) -> None:
    """Whatever the first two examples go through."""
    for seed in range(5):
        network = fk.Task(model).network(fk.dataset(X, Y), seed, torch.float64)
        assert network.traits.without_gradient == unreached


class Recurrent(nn.Module):
    """A recurrent layer over six steps."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.fc = layer(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x[:, :, None])[0][:, -1])


@pytest.mark.parametrize("layer", [pytest.param(nn.GRU, marks=pytest.mark.slow), nn.RNN, nn.LSTM])
def test_recurrent_layers_have_a_gradient_for_each_example(layer: Any) -> None:
    task = fk.Task(Recurrent(layer), head="fc")
    settings: dict[str, Any] = {
        "task": task,
        "clients": fk.iid(X, Y, clients=2),
        "test": (X, Y),
        "rounds": 1,
        "local": fk.Local(lr=LR, epochs=1, batch_size=3),
        "progress": False,
    }
    loose = "dpsgd(norm=1e6, sigma=0.0)"  # the mean of examples' gradients is the batch's
    for engine in ("sequential", "vectorized")[: 2 if layer is nn.GRU else 1]:
        own = fk.Engine(kind=engine, dtype="float64")
        expected = fk.run("fedavg", engine=own, **settings).params
        found = fk.run(loose, engine=own, **settings).params
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    fk.run("fedcurv", engine=fk.Engine(kind="sequential", dtype="float64"), **settings)
