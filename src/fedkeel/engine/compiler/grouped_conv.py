"""Convolutions of lanes on a GPU: as batched matrix products, or apart.

Side by side, the convolutions of n clients are one convolution of n groups. A GPU's libraries work
the groups of such a one out one after the other, each far too small for the machine; matrix
products they batch. So windows are laid out as columns, and back. Where one client's convolution
fills the machine by itself, the windows cost more than they gain, and each is done by itself.

Shapes: x [B, G C, H, W] and kernels [G O, C, a, b] give y [B, G O, P, Q]. As a batch of N products
of matrices, y is [N, O, M] and the windows are [N, C a b, M]: N = B G and M = P Q; where an image
has fewer places than there are kernels, so that it is better to take all images of a group at once,
N = G and M = B P Q.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fedkeel.engine.compiler.graph_nodes import called

aten = torch.ops.aten

Pair = tuple[int, int]

LARGE = 6e8
"""Multiply-adds of one client's convolution from which each is done by itself. On an H100, times of
all products over those of convolutions apart: 0.65 at 1.4e8, 1.0 at 3.3e8 and at 6.6e8, 3.9 at
3.8e9."""


class Windows(NamedTuple):
    """Where the windows of a convolution of G groups lie.

    Args:
        groups: G.
        shape: of its input.
        kernels: shape of its kernels.
        stride: steps from window to window, along H and along W.
        padding: zeros before and after the input.
        dilation: steps within a window.
    """

    groups: int
    shape: tuple[int, ...]
    kernels: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def outer(self) -> Pair:
        """Height and width of the padded input."""
        (h, w), (p, q) = self.shape[2:], self.padding
        return h + 2 * p, w + 2 * q

    @property
    def places(self) -> Pair:
        """P and Q."""
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernels[2:], strict=True)]
        high, wide = (
            (n - r - 1) // s + 1 for n, r, s in zip(self.outer, reach, self.stride, strict=True)
        )
        return high, wide

    @property
    def large(self) -> bool:
        """Whether each group is done by itself."""
        (batch, _, _, _), (made, *window) = self.shape, self.kernels
        return batch * math.prod(self.places) * made * math.prod(window) >= LARGE * self.groups

    @property
    def together(self) -> bool:
        """Whether the images of a group are taken at once."""
        high, wide = self.places
        return self.kernels[0] // self.groups > high * wide

    def columns(self, x: Tensor) -> Tensor:
        """Return the windows of the input, [N, C a b, M], of which each entry is a copy."""
        (batch, _, _, _), (_, channels, a, b) = self.shape, self.kernels
        p, q = self.padding
        if p or q:
            x = F.pad(x, (q, q, p, p))
        one, next_channel, down, right = x.stride()
        sizes = [self.groups, channels, a, b, *self.places]
        steps = [channels * next_channel, next_channel]
        steps += [d * s for d, s in zip(self.dilation, (down, right), strict=True)]
        steps += [d * s for d, s in zip(self.stride, (down, right), strict=True)]
        place = 4 if self.together else 0
        sizes.insert(place, batch)
        steps.insert(place, one)
        windows = x.as_strided(sizes, steps).contiguous()
        lead = self.groups * (1 if self.together else batch)
        return windows.view(lead, channels * a * b, -1)

    def fold(self, columns: Tensor) -> Tensor:
        """Return the sums [B, G C, H, W] of the windows' entries [N, C a b, M] that are one."""
        (batch, every, h, w), (_, channels, a, b) = self.shape, self.kernels
        high, wide = self.places
        if self.together:
            apart = columns.view(self.groups, channels, a, b, batch, high, wide)
            apart = apart.permute(4, 0, 1, 2, 3, 5, 6)
        else:
            apart = columns.view(batch, self.groups, channels, a, b, high, wide)
        out = columns.new_zeros(batch, self.groups, channels, *self.outer)
        for i in range(a):
            for j in range(b):
                top, left = i * self.dilation[0], j * self.dilation[1]
                rows = slice(top, top + self.stride[0] * (high - 1) + 1, self.stride[0])
                along = slice(left, left + self.stride[1] * (wide - 1) + 1, self.stride[1])
                out[..., rows, along] += apart[:, :, :, i, j]
        p, q = self.padding
        return out.view(batch, every, *self.outer)[..., p : p + h, q : q + w].contiguous()

    def outputs(self, y: Tensor) -> Tensor:
        """Return what lies as the output does, [B, G O, P, Q], as matrices [N, O, M]."""
        if not self.together:
            return y.reshape(len(y) * self.groups, -1, y.shape[2] * y.shape[3])
        apart = y.reshape(len(y), self.groups, -1, y.shape[2] * y.shape[3])
        return apart.permute(1, 2, 0, 3).reshape(self.groups, apart.shape[2], -1)

    def images(self, matrices: Tensor) -> Tensor:
        """Return matrices [N, O, M] as the output lies."""
        batch, made = self.shape[0], self.kernels[0]
        if self.together:
            apart = matrices.view(self.groups, matrices.shape[1], batch, -1)
            matrices = apart.permute(2, 0, 1, 3)
        return matrices.reshape(batch, made, *self.places)

    def factors(self, weight: Tensor) -> Tensor:
        """Return the kernels as matrices, [N, O, C a b]."""
        own = weight.reshape(self.groups, self.kernels[0] // self.groups, -1)
        if self.together:
            return own
        return own.expand(self.shape[0], *own.shape).reshape(-1, *own.shape[1:])


def columns(x: Tensor, windows: Windows) -> Tensor:
    """Return the windows of an input [B, G C, H, W], [N, C a b, M]."""
    return windows.columns(x)


def convolve(entries: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Return a convolution [B, G O, P, Q].

    Args:
        entries: [N, C a b, M] of its windows.
        weight: [G O, C, a, b].
        bias: [G O], or None.
        windows: where they lie.
    """
    out = windows.images(torch.bmm(windows.factors(weight), entries))
    return out if bias is None else out + bias[:, None, None]


def input_gradient(back: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """Return the gradient [B, G C, H, W] of a convolution's input, of its output's, `back`."""
    turned = windows.factors(weight).transpose(1, 2)
    return windows.fold(torch.bmm(turned, windows.outputs(back)))


def weight_gradient(back: Tensor, entries: Tensor, windows: Windows) -> Tensor:
    """Return the gradient [G O, C, a, b] of a convolution's kernels, of its output's, `back`."""
    found = torch.bmm(windows.outputs(back), entries.transpose(1, 2))
    if not windows.together:
        found = found.view(windows.shape[0], -1).sum(0)
    return found.reshape(windows.kernels)


def convolve_apart(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Return a convolution [B, G O, P, Q], one group after the other."""
    form = windows.stride, windows.padding, windows.dilation
    pairs = zip(x.chunk(windows.groups, 1), weight.chunk(windows.groups), strict=True)
    out = torch.cat([F.conv2d(one, own, None, *form) for one, own in pairs], 1)
    return out if bias is None else out + bias[:, None, None]


def input_gradient_apart(back: Tensor, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """Return the gradient of a convolution's input, one group after the other."""
    return torch.cat(_gradients_apart(back, x, weight, windows, 0), 1)


def weight_gradient_apart(back: Tensor, x: Tensor, weight: Tensor, windows: Windows) -> Tensor:
    """Return the gradient of a convolution's kernels, one group after the other."""
    return torch.cat(_gradients_apart(back, x, weight, windows, 1))


def _gradients_apart(
    back: Tensor, x: Tensor, weight: Tensor, windows: Windows, which: int
) -> list[Tensor]:
    form = windows.stride, windows.padding, windows.dilation, False, (0, 0), 1
    wanted = [place == which for place in range(3)]
    groups = zip(
        *(t.chunk(windows.groups, 1) for t in (back, x)), weight.chunk(windows.groups), strict=True
    )
    return [aten.convolution_backward(*own, None, *form, wanted)[which] for own in groups]


_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}


def multiply(graph: fx.Graph, device: str = "cuda") -> None:
    """Take the convolutions of lanes in a recorded graph by matrix products, large ones apart.

    Args:
        graph: recorded.
        device: where they have to lie.
    """
    known: dict[Any, fx.Node] = {}  # what the convolution itself has laid out, its gradient takes

    def laid_out(x: fx.Node, windows: Windows) -> fx.Node:
        if (x, windows) not in known:
            known[x, windows] = called(graph, columns, x, windows)
        return known[x, windows]

    for node in list(graph.nodes):
        args: Any = node.args
        if node.target not in _CONVOLUTIONS or node.meta["device"].type != device:
            continue
        with graph.inserting_before(node):
            if node.target is aten.convolution.default:
                x, weight, bias, *form = args
                windows = _windows(x, weight, form)
                if windows is None:
                    continue
                if windows.large:
                    made = called(graph, convolve_apart, x, weight, bias, windows)
                else:
                    made = called(graph, convolve, laid_out(x, windows), weight, bias, windows)
                node.replace_all_uses_with(made)
            else:
                back, x, weight, _, *form, _ = args
                windows = _windows(x, weight, form)
                if windows is None:
                    continue
                for item in list(node.users):
                    if item.target is not operator.getitem or not item.users:
                        continue
                    given = back, x, weight, windows
                    if item.args[1] == 2:
                        made = called(graph, aten.sum.dim_IntList, back, [0, 2, 3])
                    elif item.args[1] == 0 and windows.large:
                        made = called(graph, input_gradient_apart, *given)
                    elif item.args[1] == 0:
                        made = called(graph, input_gradient, back, weight, windows)
                    elif windows.large:
                        made = called(graph, weight_gradient_apart, *given)
                    else:
                        entries = laid_out(x, windows)
                        made = called(graph, weight_gradient, back, entries, windows)
                    item.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _windows(x: fx.Node, weight: fx.Node, form: Sequence[Any]) -> Windows | None:
    """Return the windows of a convolution of lanes; None of any other."""
    stride, padding, dilation, turned, _, groups = form
    one, kernels = x.meta["val"], tuple(weight.meta["val"].shape)
    by_channel = kernels[1] == 1 and kernels[0] == groups
    if one.ndim != 4 or turned or groups == 1 or by_channel:
        return None
    pairs = [(pair[0], pair[-1]) for pair in (stride, padding, dilation)]
    return Windows(groups, tuple(one.shape), kernels, *pairs)
