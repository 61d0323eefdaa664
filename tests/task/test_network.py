"""A module as a function: gradients by differences, losses, modes, and parameters of odd kinds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.batch import Batch
from fedkeel.task.losses import cross_entropy, picked_cross_entropy
from fedkeel.task.network import Network
from fedkeel.task.parameter_names import module_names, under
from fedkeel.tree import Tree

WAYS = ("eager", "functional")
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
SOFT = torch.softmax(X[:, :3], dim=1)


def made(module: nn.Module, **options: object) -> Network:
    return Network(module, dtype=torch.float64, **options)


def smooth(**options: object) -> Network:
    torch.manual_seed(0)
    return made(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), **options)


def difference(f: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient by central differences."""
    out, step = torch.zeros_like(at), 1e-6
    for i in np.ndindex(*at.shape):
        apart = torch.zeros_like(at)
        apart[i] = step
        out[i] = (f(at + apart) - f(at - apart)) / (2 * step)
    return out


# --- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "batch",
    [
        Batch(X, Y),
        Batch(X, SOFT),
        Batch(X, Y, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)),
    ],
)
def test_gradients_are_differences_of_the_loss(way: str, batch: Batch) -> None:
    network = smooth()
    value, grads = network.value_and_grad(network.params, {}, batch, way)
    assert float(value) == pytest.approx(float(network.loss(network.params, {}, batch)), rel=1e-15)
    assert not value.requires_grad
    for name, at in network.params.items():

        def loss(v: Tensor, name: str = name) -> Tensor:
            return network.loss({**network.params, name: v}, {}, batch)

        torch.testing.assert_close(grads[name], difference(loss, at), rtol=0, atol=1e-8)
        assert not grads[name].requires_grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("names", [["2.weight", "2.bias"], ["0.weight"], []])
def test_gradients_by_some_parameters_have_the_bits_of_all(way: str, names: list[str]) -> None:
    network = smooth()
    value, every = network.value_and_grad(network.params, {}, Batch(X, Y), way)
    found, some = network.value_and_grad(network.params, {}, Batch(X, Y), way, names=names)
    assert torch.equal(found, value)
    assert list(some) == [name for name in every if name in names]
    assert all(torch.equal(some[name], every[name]) for name in names)


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_by_a_parameter_without_effect_is_zero(way: str) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    network = made(Idle())
    _, grads = network.value_and_grad(network.params, {}, Batch(X, Y), way, names=["idle.bias"])
    assert grads.keys() == {"idle.bias"}
    assert not grads["idle.bias"].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("y", [Y, SOFT])
def test_input_gradients_are_differences_of_the_mean_loss(way: str, y: Tensor) -> None:
    network = smooth()
    found = network.input_grad(network.params, {}, Batch(X, y), way)

    def loss(x: Tensor) -> Tensor:
        return network.loss(network.params, {}, Batch(x, y), train=False)

    torch.testing.assert_close(found, difference(loss, X), rtol=0, atol=1e-8)
    assert not X.requires_grad


class Unused(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)
        self.used = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_used_has_a_gradient_of_zero(way: str) -> None:
    network = made(Unused())
    _, grads = network.value_and_grad(network.params, {}, Batch(X, Y), way)
    assert list(grads) == list(network.params)
    assert not grads["idle.weight"].any()
    assert grads["used.weight"].any()


def test_gradients_are_taken_under_no_grad_and_leave_no_tape() -> None:
    network = smooth()
    with torch.no_grad():
        for way in WAYS:
            _, grads = network.value_and_grad(network.params, {}, Batch(X, Y), way)
            assert grads["0.weight"].any()
            assert network.input_grad(network.params, {}, Batch(X, Y), way).any()
    assert all(p.grad is None and not p.requires_grad for p in network.params.values())


# --- losses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "y"),
    [
        ((4, 3), torch.tensor([0, 2, 1, 1])),
        ((4, 3), torch.softmax(torch.arange(12.0).view(4, 3), dim=1)),
        ((4, 3, 2), torch.tensor([[0, 2], [1, 1], [2, 0], [1, 2]])),
    ],
    ids=["labels", "probabilities", "positions"],
)
def test_the_loss_of_a_recording_is_the_same_to_the_bit(shape: tuple[int, ...], y: Tensor) -> None:
    logits = [(30 * torch.randn(shape)).requires_grad_() for _ in range(2)]
    logits[1].data.copy_(logits[0].data)
    ours, torchs = picked_cross_entropy(logits[0], y), cross_entropy(logits[1], y)
    assert torch.equal(ours, torchs)
    for own, loss in zip(logits, (ours, torchs), strict=True):
        loss.mean().backward()
        assert own.grad is not None
    assert torch.equal(*(own.grad for own in logits if own.grad is not None))


def test_cross_entropy_takes_labels_and_probabilities() -> None:
    scores = X[:, :3]
    log = scores - torch.logsumexp(scores, dim=1, keepdim=True)
    torch.testing.assert_close(cross_entropy(scores, Y), -log[range(6), Y])
    torch.testing.assert_close(cross_entropy(scores, SOFT), -(SOFT * log).sum(dim=1))
    hard = nn.functional.one_hot(Y, 3).double()
    torch.testing.assert_close(cross_entropy(scores, hard), cross_entropy(scores, Y))


def mean_loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_may_be_a_mean_or_one_for_each_example(way: str) -> None:
    one, mean = smooth(), smooth(loss=mean_loss)
    batch = Batch(X, Y)
    a, b = (n.value_and_grad(n.params, {}, batch, way) for n in (one, mean))
    torch.testing.assert_close(a[0], b[0])
    assert all(torch.allclose(a[1][k], b[1][k], atol=1e-15) for k in a[1])
    scores = one.logits(one.params, {}, X)
    assert one.example_losses(scores, Y).shape == mean.example_losses(scores, Y).shape == (6,)
    torch.testing.assert_close(mean.example_losses(scores, Y), a[0].expand(6))


def test_examples_of_weight_zero_are_not_there() -> None:
    network = smooth()
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    padded = network.loss(network.params, {}, Batch(X, Y, weight))
    torch.testing.assert_close(padded, network.loss(network.params, {}, Batch(X[:3], Y[:3])))


def test_a_mean_cannot_leave_out_examples() -> None:
    network = smooth(loss=mean_loss)
    with pytest.raises(ModelError, match="cannot leave out padded examples"):
        network.loss(network.params, {}, Batch(X, Y, torch.ones(6)))


# --- odd parameters --------------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix, used twice under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_are_one_parameter(way: str) -> None:
    torch.manual_seed(0)
    network = made(Tied())
    assert network.names == ("first.weight",)
    _, grads = network.value_and_grad(network.params, {}, Batch(X, Y), way)

    def loss(w: Tensor) -> Tensor:
        return cross_entropy(torch.tanh(X @ w.T) @ w.T, Y).mean()

    expected = difference(loss, network.params["first.weight"])
    torch.testing.assert_close(grads["first.weight"], expected, rtol=0, atol=1e-8)


def partly_frozen() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module[0].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_are_used_and_are_nobodys(way: str) -> None:
    network, free = made(partly_frozen(), head="2"), smooth()
    assert network.names == ("0.bias", "2.weight", "2.bias")
    assert network.head_names == {"2.weight", "2.bias"}
    a = network.value_and_grad(network.params, {}, Batch(X, Y), way)
    b = free.value_and_grad(free.params, {}, Batch(X, Y), way)
    torch.testing.assert_close(a[0], b[0])
    assert list(a[1]) == list(network.names)
    for name in network.names:
        torch.testing.assert_close(a[1][name], b[1][name])


class Scaled(nn.Module):
    """A parameter that is a single number without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.fc(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_without_axes(way: str) -> None:
    network = made(Scaled())
    _, grads = network.value_and_grad(network.params, {}, Batch(X, Y), way)
    assert grads["scale"].shape == ()
    assert float(grads["scale"]) != 0.0


# --- modes -----------------------------------------------------------------------------------


def dropping() -> Network:
    torch.manual_seed(0)
    return made(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)))


def test_dropout_follows_torchs_seed_in_training_and_is_off_in_evaluation() -> None:
    network = dropping()

    def scores(seed: int, train: bool) -> Tensor:
        torch.manual_seed(seed)
        return network.logits(network.params, {}, X, train)

    assert torch.equal(scores(1, True), scores(1, True))
    assert not torch.equal(scores(1, True), scores(2, True))
    assert torch.equal(scores(1, False), scores(2, False))


def test_both_ways_drop_the_same_units_under_the_same_seed() -> None:
    network, found = dropping(), []
    for way in WAYS:
        torch.manual_seed(3)
        found.append(network.value_and_grad(network.params, {}, Batch(X, Y), way)[1])
    assert all(
        torch.allclose(a, b, atol=1e-14) for a, b in zip(*map(dict.values, found), strict=True)
    )


def test_input_gradients_are_those_of_evaluation() -> None:
    network = dropping()
    for way in WAYS:
        a, b = (network.input_grad(network.params, {}, Batch(X, Y), way) for _ in range(2))
        assert torch.equal(a, b)


def normed(**options: object) -> Network:
    torch.manual_seed(0)
    return made(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), **options)


def moved(before: Tree) -> Tree:
    """The statistics after one batch, by the definition of the layer."""
    network = normed()
    hidden = X @ network.params["0.weight"].T + network.params["0.bias"]
    return {
        "1.running_mean": 0.9 * before["1.running_mean"] + 0.1 * hidden.mean(dim=0),
        "1.running_var": 0.9 * before["1.running_var"] + 0.1 * hidden.var(dim=0),
        "1.num_batches_tracked": before["1.num_batches_tracked"] + 1,
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_in_training_updates_the_buffers_that_are_given(way: str) -> None:
    network = normed()
    buffers = network.copy_buffers(network.buffers)
    network.value_and_grad(network.params, buffers, Batch(X, Y), way)
    for name, expected in moved(network.buffers).items():
        torch.testing.assert_close(buffers[name], expected)
        assert buffers[name].dtype == network.buffers[name].dtype
    assert not network.buffers["1.running_mean"].any()  # the network's own stay


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_leaves_buffers_alone(way: str) -> None:
    network = normed()
    buffers = network.copy_buffers(network.buffers)
    network.logits(network.params, buffers, X, train=False)
    network.input_grad(network.params, buffers, Batch(X, Y), way)
    assert all(torch.equal(buffers[k], v) for k, v in network.buffers.items())


def test_evaluation_may_use_the_statistics_of_the_batch() -> None:
    """Where clients keep their own, the server has none."""
    local, average = normed(batch_statistics=True), normed()
    train = average.logits(average.params, average.copy_buffers(average.buffers), X)
    for network, same in ((local, True), (average, False)):
        found = network.logits(
            network.params, network.copy_buffers(network.buffers), X, train=False
        )
        assert torch.allclose(found, train, atol=1e-14) == same


# --- names -----------------------------------------------------------------------------------


class Views(nn.Module):
    """Takes apart what its convolution returns as torch lays it out by default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        return self.fc(maps.view(len(maps), -1))


class Strides(Views):
    """Looks at memory as it lies by default, and is wrong where it does not."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        return self.fc(torch.as_strided(maps, (len(maps), 48), (48, 1)))


@pytest.mark.parametrize(
    ("module", "turned"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)), True),
        (Views(), False),
        (Strides(), False),
        (nn.Sequential(nn.Conv2d(2, 4, 6, groups=2), nn.Flatten()), False),
        (nn.Sequential(nn.Conv2d(2, 4, 6), nn.GroupNorm(2, 4), nn.Flatten()), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), False),
    ],
)
def test_evaluation_lays_convolutions_out_anew_where_they_bear_it(
    module: nn.Module, turned: bool
) -> None:
    network = Network(module)
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    wanted = network.logits(network.params, {}, x, train=False)
    network.choose_memory_format(x[:2])
    assert network.channels_last == turned
    torch.testing.assert_close(network.test_logits(network.params, {}, x), wanted)
    assert not network.on(torch.device("meta")).channels_last


def test_convolutions_of_double_precision_stay_as_they_are() -> None:
    network = made(nn.Sequential(nn.Conv2d(2, 3, 6), nn.Flatten()))
    network.choose_memory_format(torch.randn(2, 2, 6, 6, dtype=torch.float64))
    assert not network.channels_last


@pytest.mark.parametrize(("batch", "tracked"), [(True, True), (False, False), (False, True)])
def test_whether_evaluation_sees_the_batch(batch: bool, tracked: bool) -> None:
    norm = nn.BatchNorm2d(3, track_running_stats=tracked)
    module = nn.Sequential(nn.Conv2d(2, 3, 6), norm, nn.Flatten())
    network = made(module, batch_statistics=batch)
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    alone, beside = (network.test_logits(network.params, network.buffers, x[:n]) for n in (4, 8))
    assert network.batch_statistics != torch.allclose(alone, beside[:4])


def test_a_network_owns_what_it_was_made_of() -> None:
    module = nn.Linear(4, 3)
    network = Network(module)
    assert torch.equal(network.params["weight"], module.weight)
    network.params["weight"].zero_()
    assert module.weight.any()
    again = Network(module)
    assert again.logits(again.params, {}, X.float()).any()


def test_names_of_modules() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.ReLU(), nn.Linear(2, 2))})
    assert list(module_names(module)) == ["a", "b.1"]
    assert [under(n, "b") for n in ("b", "b.1.bias", "bc.weight", "a.b")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_network_in_words() -> None:
    text = smooth(head="2", loss=mean_loss).describe()
    assert "Linear(in_features=4, out_features=5" in text
    assert "head='2'" in text
    assert "loss=mean_loss" in text
