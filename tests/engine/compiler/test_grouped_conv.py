"""Convolutions of several clients as matrix products, computed on a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.engine.compiler import grouped_conv
from fedkeel.engine.compiler.grouped_conv import replace_grouped_convolutions
from fedkeel.engine.compiler.trace import module_of, trace

D = torch.float64


def gradients(**form: Any) -> Callable[..., list[Tensor]]:
    """Of two layers' input, kernels and biases; and what they are of."""

    def loss(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        y = F.conv2d(x, w, None, **form).relu()
        return F.conv2d(y, v, b, **form).square().sum()

    both = torch.func.grad_and_value(loss, argnums=(0, 1, 2, 3))

    def flat(*values: Tensor) -> list[Tensor]:
        grads, value = both(*values)
        return [*grads, value]

    return flat


def given(clients: int, kernel: tuple[int, int], kernels: int, groups: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [
        (clients, 2, 4, 11, 10),
        (clients, kernels, 4 // groups, *kernel),
        (clients, kernels, kernels // groups, *kernel),
        (clients, kernels),
    ]
    return [torch.randn(shape, generator=random, dtype=D) for shape in shapes]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kernels", [6, 90])  # fewer kernels than an image has places, and more
@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        ((3, 3), {}),
        ((5, 5), {"padding": 2}),
        ((3, 3), {"padding": 2, "dilation": 2}),
        ((3, 1), {"padding": (1, 0)}),
        ((1, 4), {"stride": (1, 2), "padding": (0, 3)}),
        ((3, 3), {"stride": 2, "padding": 1}),
        ((2, 2), {"stride": 2, "groups": 2}),
    ],
)
def test_products_are_the_convolutions(
    kernel: tuple[int, int],
    form: dict[str, Any],
    kernels: int,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grouped_conv, "LARGE", 0.0 if large else 1e9)
    grads = torch.func.vmap(gradients(**form))
    values = given(3, kernel, kernels, form.get("groups", 1))
    module = module_of(trace(grads, values))
    replace_grouped_convolutions(module.graph, "cpu")
    module.recompile()
    assert ("conv_by_group" in module.code) == large
    assert "convolution" not in module.code
    found, expected = module(*values), grads(*values)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-10)


def test_other_convolutions_are_left_alone() -> None:
    values = given(3, (3, 3), 4)
    alone = trace(gradients(), [t[0] for t in values])
    by_channel = trace(torch.func.vmap(gradients(groups=4)), given(3, (3, 3), 4, groups=4))
    elsewhere = trace(torch.func.vmap(gradients()), values)
    for graph, device in ((alone, "cpu"), (by_channel, "cpu"), (elsewhere, "cuda")):
        module = module_of(graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        before = module.code
        replace_grouped_convolutions(module.graph, device)
        module.recompile()
        assert module.code == before
