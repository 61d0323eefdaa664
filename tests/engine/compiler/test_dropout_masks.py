"""Dropout masks that are drawn before the steps that use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.engine.compiler.dropout_masks import DrawnMasks, MaskSpec, random_draws
from fedkeel.engine.compiler.errors import CannotCompile
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (4, 3, 5, 5), (40, 50)])
def test_masks_are_those_that_torch_draws(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = MaskSpec(shape, 0.3, dtype, torch.device("cpu"))
    torch.manual_seed(3)
    expected = [torch.empty(shape, dtype=dtype).bernoulli_(0.3), torch.rand(3)]
    torch.manual_seed(3)
    assert torch.equal(draw.draw(None), expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_a_client_draws_from_its_own_generator() -> None:
    draw = MaskSpec((3, 20), 0.5, torch.float32, torch.device("cpu"))
    every, first = draw.draw(seeded(1, 2, 3)), seeded(2)[0]
    assert torch.equal(every[1], torch.empty(20).bernoulli_(0.5, generator=first))
    assert torch.equal(every[:2], MaskSpec((2, 20), *vars_of(draw)).draw(seeded(1, 2, 4)))
    with pytest.raises(CannotCompile, match="random numbers"):
        draw.draw(seeded(1))


def test_padding_draws_nothing() -> None:
    draw = MaskSpec((2, 5, 3), 0.5, torch.float32, torch.device("cpu"))
    found = draw.draw(seeded(1, 2), np.array([2, 4]))
    for client, seed, real in ((0, 1, 2), (1, 2, 4)):
        own = torch.empty(real, 3).bernoulli_(0.5, generator=seeded(seed)[0])
        assert torch.equal(found[client, :real], own)
        assert not found[client, real:].any()
    alone = MaskSpec((5, 3), *vars_of(draw))
    torch.manual_seed(3)
    found = alone.draw(None, np.array([2]))
    torch.manual_seed(3)
    assert torch.equal(found[:2], torch.empty(2, 3).bernoulli_(0.5))
    assert not found[2:].any()


class Weights(nn.Linear):
    """A layer that drops weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.5, self.training), self.bias)


class Noise(nn.Module):
    """A layer that adds noise."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(3, 2), None),
        (nn.Dropout(0.0), None),
        (nn.Dropout(0.5), True),
        (nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Dropout2d(0.5), nn.Flatten()), True),
        (Weights(3, 2), False),
        (nn.Sequential(nn.Dropout(0.5), Noise()), False),
        (nn.Sequential(nn.Linear(3, 2), nn.Unflatten(0, (1, 1, 2)), nn.Linear(2, 2)), False),
    ],
)
def test_what_a_network_draws_is_found_out(module: nn.Module, expected: bool | None) -> None:
    layers = nn.Sequential(module, nn.Linear(2, 2)) if list(module.parameters()) else module
    net = Network(nn.Sequential(nn.Linear(3, 3), layers))
    state = torch.random.get_rng_state()
    few = Batch(torch.randn(2, 3, generator=seeded(0)[0]), torch.tensor([0, 1]))
    found = random_draws(net, few)
    assert (None if found is None else found.masks_by_example) is expected
    assert torch.equal(torch.random.get_rng_state(), state)


def vars_of(draw: MaskSpec) -> tuple[float, torch.dtype, torch.device]:
    return draw.probability, draw.dtype, draw.device


def dropped(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x, 0.2), 0.5)


def test_what_is_drawn_alone_is_what_torch_draws() -> None:
    x = torch.randn(30, 20)
    torch.manual_seed(5)
    expected = dropped(x)
    torch.manual_seed(5)
    drawn = DrawnMasks(None)
    with drawn.drawing():
        assert torch.equal(dropped(x), expected)
    with drawn.replaying(drawn.masks):
        assert torch.equal(dropped(x), expected)
    assert [one.probability for one in drawn.specs] == pytest.approx([0.8, 0.5])


def test_a_gpus_own_dropout_is_given_its_mask() -> None:
    x = torch.randn(30, 20)
    drawn = DrawnMasks(None)
    with drawn.drawing():
        out, mask = torch.ops.aten.native_dropout(x, 0.25, True)
        same = torch.ops.aten.native_dropout(x, 0.25, False)[0]
    assert torch.equal(mask, drawn.masks[0])
    assert torch.equal(same, x)
    torch.testing.assert_close(out, torch.where(mask, x / 0.75, 0.0))


def test_several_clients_refuse_what_is_no_mask() -> None:
    drawing = DrawnMasks(seeded(1)).drawing()
    with drawing, pytest.raises(CannotCompile, match="random numbers"):
        torch.randn_like(torch.ones(1, 3))
    with DrawnMasks(None).drawing():
        assert torch.randn_like(torch.ones(1, 3)).shape == (1, 3)
