"""What a network makes of a batch besides scores: features, objectives, blocks; calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.batch import Batch, Output
from fedkeel.task.functional import Functional
from fedkeel.task.network import Network
from fedkeel.task.parameter_names import blocks
from fedkeel.tree import Tree

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def network(module: nn.Module | None = None, head: str = "2") -> Network:
    torch.manual_seed(0)
    made = module or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Network(made, head=head, dtype=torch.float64)


def seen(x: Tensor) -> Batch:
    return Batch(x, torch.zeros(len(x), dtype=torch.long))


def test_features_are_what_the_head_sees() -> None:
    one = network()
    found = one.output(one.params, {}, seen(X))
    expected = torch.tanh(X @ one.params["0.weight"].T + one.params["0.bias"])
    torch.testing.assert_close(found.features, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(found.logits, one.logits(one.params, {}, X))
    assert network(head="").output(one.params, {}, seen(X)).features is None


def test_features_of_images_are_flat() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(1, 2, 3)
            self.head = nn.Conv2d(2, 3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.reshape(-1, 1, 4, 4))).flatten(1)

    one = network(Images(), "head")
    x = torch.randn(2, 16, dtype=torch.float64)
    assert one.output(one.params, {}, seen(x)).features.shape == (2, 8)


class Twice(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.head, self.other, self.times = nn.Linear(4, 4), nn.Linear(4, 3), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.head(x)
        return self.other(x)


@pytest.mark.parametrize("times", [0, 2])
def test_a_head_is_called_once(times: int) -> None:
    one = network(Twice(times), "head")
    with pytest.raises(ModelError, match=f"called {times} times"):
        one.output(one.params, {}, seen(X))
    assert not one._train.head._forward_pre_hooks


@pytest.mark.parametrize("way", ["eager", "functional"])
def test_an_objective_takes_the_place_of_the_loss(way: str) -> None:
    one = network()

    def objective(output: Output, params: Tree) -> Tensor:
        return (output.logits**2).sum() + 3.0 * (output.features**2).sum() + params["2.bias"].sum()

    value, grads = one.value_and_grad(one.params, {}, Batch(X, Y), way, objective)
    assert float(value) == pytest.approx(float(one.loss(one.params, {}, Batch(X, Y))), rel=1e-14)
    weight = one.params["0.weight"]
    for i in ((0, 0), (3, 2)):
        moved = []
        for sign in (1, -1):
            at = weight.clone()
            at[i] += sign * 1e-6
            params = {**one.params, "0.weight": at}
            moved.append(float(objective(one.output(params, {}, seen(X)), params)))
        assert float(grads["0.weight"][i]) == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-6)


def test_blocks_are_the_children_of_the_first_module_that_has_several() -> None:
    assert blocks(["a.weight", "a.bias", "b.0.weight", "b.1.weight"]) == [
        ["a.weight", "a.bias"],
        ["b.0.weight", "b.1.weight"],
    ]
    assert blocks(["net.a.weight", "net.b.weight"]) == [["net.a.weight"], ["net.b.weight"]]
    assert blocks(["net.fc.weight", "net.fc.bias"]) == [["net.fc.weight", "net.fc.bias"]]
    assert blocks(["weight", "bias"]) == [["weight", "bias"]]


def test_tensors_are_in_place_again_after_a_call_and_after_an_error() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = dict(module.named_parameters())
    function = Functional(module)
    params = {k: torch.zeros_like(v) for k, v in before.items()}
    buffers = {k: v.clone() for k, v in module.named_buffers()}
    assert torch.equal(function(params, buffers, torch.randn(5, 4)), torch.zeros(5, 3))
    with pytest.raises(RuntimeError):
        function(params, buffers, torch.randn(5, 7))
    assert all(v is before[k] for k, v in module.named_parameters())
    with pytest.raises(KeyError):
        function({"no": torch.zeros(1)}, buffers, torch.randn(5, 4))


def test_modules_that_watch_their_attributes_are_called_all_the_same() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x[:, None])[0][:, 0]

    module = Recurrent()
    params = {k: torch.zeros_like(v) for k, v in module.named_parameters()}
    assert torch.equal(Functional(module)(params, {}, torch.randn(2, 4)), torch.zeros(2, 3))


def test_tied_weights_are_given_to_every_place() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    found = Functional(Tied())({"a.weight": weight}, {}, x)
    torch.testing.assert_close(found, x @ weight.T @ weight.T)


@pytest.mark.parametrize("watches", [False, True])
def test_a_buffer_that_is_assigned_is_updated_as_one_that_is_filled(watches: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.cell = nn.GRU(4, 4) if watches else nn.Identity()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1.0
            return self.fc(self.cell(x)[0] if watches else x)

    one = network(Counts(), "fc")
    buffers = one.copy_buffers(one.buffers)
    for _ in range(2):
        one.logits(one.params, buffers, X)
    assert float(buffers["calls"]) == 2.0
    assert float(one.buffers["calls"]) == 0.0


def test_everything_holds_what_is_frozen() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    one = network(module)
    assert "0.weight" not in one.params
    assert {"0.weight", "1.running_mean"} <= set(one.initial_state())
