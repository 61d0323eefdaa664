"""Squared gradients of single per_example, by factors, against each one's own backward pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel import tree
from fedkeel.errors import ModelError
from fedkeel.method import per_example
from fedkeel.method.per_example import sum_squared_grads
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from fedkeel.tree import Tree
from method.players import gap


class Module(nn.Module):
    """Two layers of eight, called as each of the classes below has it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 3)


class Plain(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))


class InPlace(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu_(self.two(F.relu_(self.one(x)))))


class Twice(Module):
    """One layer is called twice: its gradient is a sum of two outer products."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.two(torch.tanh(self.one(x)))))))


class Tied(Module):
    """A layer's weights are used by themselves too, where no call shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.one(x)) @ self.one.weight)


class Rows(Module):
    """Layers see several rows of each example."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.one(x[:, None] * torch.ones(5, 1, dtype=x.dtype).cumsum(0)))
        return self.last(torch.tanh(self.two(rows)).mean(dim=1))


class Images(Module):
    """A convolution before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.tanh(self.conv(x[:, None])).mean(dim=1)
        return self.last(torch.tanh(self.two(self.one(maps))))


class Mixing(Module):
    """Examples of a batch see each other; this counts each of them by itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        return self.last(torch.tanh(h + h.mean(dim=0)))


class ByPlace(Module):
    """Adds what depends on an example's place in the batch, the first if it is single."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(self.one(x) + torch.arange(len(x))[:, None])))


class Gated(Module):
    """A second use of a layer's weights that the first example's zeros hide."""

    def forward(self, x: Tensor) -> Tensor:
        gate = F.relu(x[:, :1] - x[:, :1].detach().clamp(max=0.6))
        return self.last(self.two(x) + (gate * x) @ self.two.weight)


class Tokens(Module):
    """Several rows for each example, of which one is read."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.one(x.repeat(1, 3).reshape(-1, 8)))
        return self.last(self.two(rows.reshape(len(x), 3, 8)[:, 0]))


class Beside(Module):
    """Layers are called, and scores come only from a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.last(self.two(self.one(x)))
        return self.conv(x[:, None]).squeeze(2)


class Empty(Module):
    """A layer without outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Linear(8, 1)
        self.none.weight = nn.Parameter(torch.zeros(0, 8))
        self.none.bias = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(torch.cat([self.one(x), self.none(x)], dim=1)))


class Unused(Module):
    def forward(self, x: Tensor) -> Tensor:
        self.two(x)
        return self.last(torch.tanh(self.one(x)))


class Drawing(Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.one(x), training=True))


def batch(rows: int = 11, weight: Tensor | None = None) -> Batch:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 8)))
    return Batch(x, torch.arange(rows) % 3, weight)


def network(module: type[nn.Module], **kwargs: object) -> Network:
    torch.manual_seed(0)
    return Network(module(), head="last", dtype=torch.float64, **kwargs)  # type: ignore[arg-type]


def expected(own: Network, given: Batch, params: Tree | None = None) -> Tree:
    """Each example's backward pass by itself."""
    at = own.params if params is None else params
    total = tree.zeros_like(at)
    for n in range(len(given.x)):
        if given.weight is None or given.weight[n]:
            one = Batch(given.x[n : n + 1], given.y[n : n + 1])
            grads = own.value_and_grad(at, {}, one, "functional")[1]
            total = {k: t + grads[k] ** 2 for k, t in total.items()}
    return total


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let no gradients be few enough to be made at once; the names of those that are made."""
    monkeypatch.setattr(per_example, "MAX_ENTRIES", 100)
    monkeypatch.setattr(per_example, "MAX_EXAMPLES", 4)
    names: list[list[str]] = []
    one_by_one = per_example._by_gradients

    def told(own: Network, params: Tree, buffers: Tree, given: Batch, chosen: tuple) -> Tree:
        if len(given.x) > 1:
            names.append(list(chosen))
        return one_by_one(own, params, buffers, given, chosen)

    monkeypatch.setattr(per_example, "_by_gradients", told)
    return names


ALL = ["one.weight", "one.bias", "two.weight", "last.weight", "last.bias"]


@pytest.mark.parametrize(
    ("module", "singly"),
    [
        (Plain, []),
        (InPlace, []),
        (Twice, ["two.weight"]),
        (Tied, ["one.weight", "two.weight"]),
        (Rows, ["one.weight", "one.bias", "two.weight"]),
        (Images, ["conv.weight", "conv.bias"]),
        (Unused, []),
        (Mixing, ["two.weight"]),
        (ByPlace, []),
        (Gated, ["one.weight", "one.bias", "two.weight"]),
        (Tokens, ["one.weight", "one.bias"]),
        (Beside, ["conv.weight", "conv.bias"]),
        (Empty, []),
    ],
)
def test_by_factors_as_by_backward_passes(
    module: type[nn.Module], singly: list[str], made: list[list[str]]
) -> None:
    own = network(module)
    assert gap(sum_squared_grads(own, own.params, {}, batch()), expected(own, batch())) < 1e-13
    assert made == ([singly] if singly else [])


def test_elsewhere_than_at_the_initial_model(made: list[list[str]]) -> None:
    own = network(Plain)
    at = {k: 2 * p for k, p in own.params.items()}
    assert gap(sum_squared_grads(own, at, {}, batch()), expected(own, batch(), at)) < 1e-13
    assert not made


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_padding_counts_for_nothing(first: float, made: list[list[str]]) -> None:
    weight = torch.tensor([first, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0], dtype=torch.float64)
    own = network(Images)
    found = sum_squared_grads(own, own.params, {}, batch(weight=weight))
    assert gap(found, expected(own, batch(weight=weight))) < 1e-13
    assert made == [["conv.weight", "conv.bias"]]


def test_few_examples_are_taken_one_by_one(made: list[list[str]]) -> None:
    own = network(Plain)
    per_example.MAX_ENTRIES = 11 * tree.numel(own.params)  # the fixture puts it back
    assert gap(sum_squared_grads(own, own.params, {}, batch()), expected(own, batch())) < 1e-13
    assert made == [ALL]


def squeezed(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.squeeze() - y.squeeze()[..., None]).square().mean(dim=-1)


@pytest.mark.parametrize("rows", [8, 9])
def test_a_loss_that_takes_one_example_otherwise(rows: int, made: list[list[str]]) -> None:
    own = network(Plain, loss=squeezed)
    assert (
        gap(sum_squared_grads(own, own.params, {}, batch(rows)), expected(own, batch(rows))) < 1e-13
    )
    assert not made


def mean_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y)


@pytest.mark.parametrize("rows", [1, 11])
def test_a_loss_that_is_a_mean(rows: int, made: list[list[str]]) -> None:
    own = network(Plain, loss=mean_loss)
    assert (
        gap(sum_squared_grads(own, own.params, {}, batch(rows)), expected(own, batch(rows))) < 1e-13
    )
    assert not made


def test_frozen_layers_have_none(made: list[list[str]]) -> None:
    class Frozen(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.two.weight.requires_grad_(False)

    own = network(Frozen)
    found = sum_squared_grads(own, own.params, {}, batch())
    assert list(found) == [name for name in ALL if name != "two.weight"]
    assert gap(found, expected(own, batch())) < 1e-13
    assert not made


@pytest.mark.parametrize(
    ("module", "word"), [(Drawing, "random numbers"), (nn.BatchNorm1d, "buffers")]
)
def test_what_a_model_does_not_bear_is_refused(
    module: type[nn.Module], word: str, made: list[list[str]]
) -> None:
    build: Callable[[], nn.Module] = module if module is Drawing else lambda: nn.BatchNorm1d(8)
    own = Network(build(), dtype=torch.float64, batch_statistics=True)
    with pytest.raises(ModelError, match="each example's gradient by itself") as caught:
        sum_squared_grads(own, own.params, own.buffers, batch())
    assert word in str(caught.value)


def test_in_single_precision(made: list[list[str]]) -> None:
    torch.manual_seed(0)
    own = Network(Plain(), head="last")
    given = Batch(batch().x.float(), batch().y)
    assert gap(sum_squared_grads(own, own.params, {}, given), expected(own, given)) < 1e-5
    assert not made


def test_a_model_that_diverged_is_taken_one_by_one(made: list[list[str]]) -> None:
    own = network(Plain)
    at = {k: p * float("nan") for k, p in own.params.items()}
    found = sum_squared_grads(own, at, {}, batch())
    assert all(t.isnan().all() for t in found.values())
    assert made == [ALL]
