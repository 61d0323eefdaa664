"""Batch normalisation of padded batches against torch's own of the real examples."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from each import each
from fedkeel.task.batch_norm import RealExamples

D = torch.float64


def learned(layer: nn.Module, x: Tensor, weight: Tensor | None) -> list[Tensor]:
    """Outputs and gradients of the real examples, the parameters' gradients and the buffers."""
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    real = slice(None) if weight is None else weight > 0
    if weight is None:
        out = layer(x)
    else:
        with RealExamples(weight):
            out = layer(x)
    (
        out[real] * torch.arange(1.0, 1 + out[real].numel(), dtype=D).view_as(out[real])
    ).sin().sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [out[real].detach(), x.grad[real], *grads, *layer.buffers()]


@each("momentum", [0.1, None])
@each("kept", [True, False])
@each("affine", [True, False])
@each(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, ()),
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm2d, (3, 2)),
        (nn.BatchNorm3d, (2, 2, 2)),
    ],
)
def test_padding_is_left_out(
    kind: type[nn.Module], shape: tuple[int, ...], affine: bool, kept: bool, momentum: float | None
) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn((7, 4, *shape), generator=random, dtype=D) * 3 + 5
    layer = kind(4, affine=affine, track_running_stats=kept, momentum=momentum).to(D)
    weight = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=D)
    expected = learned(layer, x[weight > 0], None)
    for one, other in zip(learned(layer, x, weight), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_evaluation_is_as_it_was() -> None:
    layer, x = nn.BatchNorm1d(2).eval(), torch.randn(3, 2)
    with RealExamples(torch.tensor([1.0, 0.0, 1.0])):
        assert torch.equal(
            layer(x),
            F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias),
        )
