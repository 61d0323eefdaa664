"""What a graph on a GPU does with its arguments, on tensors of the processor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fedkeel.engine.compiler.cuda_graphs import CudaGraphFunction


def still(
    run: Callable[[], Sequence[Tensor]], _: object
) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Run again into the same results, as a captured graph does."""
    outputs = list(run())

    def replay() -> None:
        for own, found in zip(outputs, run(), strict=True):
            if own.data_ptr() != found.data_ptr():
                own.copy_(found)

    return replay, outputs


def step(p: Tensor, m: Tensor, g: Tensor) -> list[Tensor]:
    """Momentum: `p` is written over, `m` is not."""
    fresh = 0.5 * m + g
    return [p.sub_(fresh), fresh]


def test_steps_by_a_graph_are_steps() -> None:
    p, m = torch.ones(3), torch.zeros(3)
    graph = CudaGraphFunction(step, (p, m, torch.zeros(3)), capture=still)
    assert torch.equal(p, torch.ones(3))
    own_p, own_m = p.clone(), m.clone()
    for number in range(4):
        g = torch.full((3,), float(number))
        p, m = graph(p, m, g)
        own_p, own_m = step(own_p, own_m, g)
        assert torch.equal(p, own_p)
        assert torch.equal(m, own_m)


def test_another_start_is_copied_in() -> None:
    graph = CudaGraphFunction(step, (torch.ones(3), torch.zeros(3), torch.ones(3)), capture=still)
    first = graph(torch.ones(3), torch.zeros(3), torch.ones(3))[0].clone()
    again = graph(torch.full((3,), 5.0), torch.zeros(3), torch.ones(3))[0]
    assert torch.equal(first, torch.zeros(3))
    assert torch.equal(again, torch.full((3,), 4.0))


def test_what_is_not_read_is_not_copied() -> None:
    def first(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a + 1]

    graph = CudaGraphFunction(
        first, (torch.ones(3), torch.ones(5)), used=(True, False), capture=still
    )
    held = sum(t.numel() for t in graph._inputs)
    assert held == 3
    assert torch.equal(graph(torch.zeros(3), torch.zeros(5))[0], torch.ones(3))


def test_what_a_graph_reads_lives_as_long_as_the_graph() -> None:
    """A captured graph knows addresses; nothing else may keep a function's constants alive."""
    layer = nn.Linear(3, 2)
    constant = weakref.ref(layer.weight)
    graph = CudaGraphFunction(lambda x, layer=layer: [layer(x)], [torch.ones(1, 3)], capture=still)
    del layer
    assert constant() is not None
    assert graph(torch.ones(1, 3))[0].shape == (1, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_captured_step_is_the_step() -> None:
    layer = nn.Linear(3, 2).cuda()
    x = torch.randn(4, 3, device="cuda")
    graph = CudaGraphFunction(lambda w, x: [torch.relu(x @ w.T)], (layer.weight.detach(), x))
    other = torch.randn(4, 3, device="cuda")
    torch.testing.assert_close(
        graph(layer.weight.detach(), other)[0], torch.relu(other @ layer.weight.T)
    )
