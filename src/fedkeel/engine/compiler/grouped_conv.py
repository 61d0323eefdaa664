"""Computes the convolutions of several clients on a GPU as matrix products, or one by one.

Side by side, the convolutions of n clients are one convolution of n groups. A GPU's libraries
compute the groups of such a convolution one after the other, each far too small for the machine;
matrix products they batch. So the windows of the input are copied into columns of a matrix. Where
one client's convolution fills the machine by itself, the copies cost more than they gain, and each
client's convolution is computed by itself.

Shapes: inputs [B, G C, H, W] and kernels [G O, C, a, b] give outputs [B, G O, P, Q]. As a batch of
N matrix products, outputs are [N, O, M] and columns are [N, C a b, M], with N = B G and M = P Q.
Where there are more kernels than positions in an image, all images of a group are taken together:
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

from fedkeel.engine.compiler.graph_nodes import insert_call, remove_unused

aten = torch.ops.aten

Pair = tuple[int, int]

LARGE = 6e8
"""Multiply-adds of one client's convolution from which each is computed by itself. On an H100, the
time of matrix products over that of single convolutions is 0.65 at 1.4e8 multiply-adds, 1.0 at
3.3e8 and at 6.6e8, 3.9 at 3.8e9."""


class ConvGeometry(NamedTuple):
    """The shapes of a convolution of G groups.

    Args:
        groups: G.
        input_shape: [B, G C, H, W].
        kernel_shape: [G O, C, a, b].
        stride: steps from window to window, along H and along W.
        padding: zeros before and after the input.
        dilation: steps within a window.
    """

    groups: int
    input_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def padded_size(self) -> Pair:
        """Height and width of the padded input."""
        (h, w), (p, q) = self.input_shape[2:], self.padding
        return h + 2 * p, w + 2 * q

    @property
    def output_size(self) -> Pair:
        """P and Q."""
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_shape[2:], strict=True)]
        height, width = (
            (n - span - 1) // step + 1
            for n, span, step in zip(self.padded_size, spans, self.stride, strict=True)
        )
        return height, width

    @property
    def is_large(self) -> bool:
        """Whether each group is computed by itself."""
        (batch, _, _, _), (kernels, *window) = self.input_shape, self.kernel_shape
        work = batch * math.prod(self.output_size) * kernels * math.prod(window)
        return work >= LARGE * self.groups

    @property
    def joins_images(self) -> bool:
        """Whether all images of a group are taken together."""
        height, width = self.output_size
        return self.kernel_shape[0] // self.groups > height * width

    def unfold(self, x: Tensor) -> Tensor:
        """Return the windows of inputs as columns, [N, C a b, M]; each entry is a copy."""
        (batch, _, _, _), (_, channels, a, b) = self.input_shape, self.kernel_shape
        p, q = self.padding
        if p or q:
            x = F.pad(x, (q, q, p, p))
        image, channel, down, right = x.stride()
        sizes = [self.groups, channels, a, b, *self.output_size]
        strides = [channels * channel, channel]
        strides += [d * s for d, s in zip(self.dilation, (down, right), strict=True)]
        strides += [d * s for d, s in zip(self.stride, (down, right), strict=True)]
        batch_axis = 4 if self.joins_images else 0
        sizes.insert(batch_axis, batch)
        strides.insert(batch_axis, image)
        windows = x.as_strided(sizes, strides).contiguous()
        matrices = self.groups * (1 if self.joins_images else batch)
        return windows.view(matrices, channels * a * b, -1)

    def fold(self, columns: Tensor) -> Tensor:
        """Return inputs [B, G C, H, W] as the sums of the entries of columns that show them."""
        (batch, all_channels, h, w), (_, channels, a, b) = self.input_shape, self.kernel_shape
        height, width = self.output_size
        if self.joins_images:
            windows = columns.view(self.groups, channels, a, b, batch, height, width)
            windows = windows.permute(4, 0, 1, 2, 3, 5, 6)
        else:
            windows = columns.view(batch, self.groups, channels, a, b, height, width)
        out = columns.new_zeros(batch, self.groups, channels, *self.padded_size)
        for i in range(a):
            for j in range(b):
                top, left = i * self.dilation[0], j * self.dilation[1]
                rows = slice(top, top + self.stride[0] * (height - 1) + 1, self.stride[0])
                cols = slice(left, left + self.stride[1] * (width - 1) + 1, self.stride[1])
                out[..., rows, cols] += windows[:, :, :, i, j]
        p, q = self.padding
        out = out.view(batch, all_channels, *self.padded_size)
        return out[..., p : p + h, q : q + w].contiguous()

    def output_matrices(self, y: Tensor) -> Tensor:
        """Return outputs [B, G O, P, Q] as matrices [N, O, M]."""
        if not self.joins_images:
            return y.reshape(len(y) * self.groups, -1, y.shape[2] * y.shape[3])
        by_group = y.reshape(len(y), self.groups, -1, y.shape[2] * y.shape[3])
        return by_group.permute(1, 2, 0, 3).reshape(self.groups, by_group.shape[2], -1)

    def outputs(self, matrices: Tensor) -> Tensor:
        """Return matrices [N, O, M] as outputs [B, G O, P, Q]."""
        batch, kernels = self.input_shape[0], self.kernel_shape[0]
        if self.joins_images:
            by_group = matrices.view(self.groups, matrices.shape[1], batch, -1)
            matrices = by_group.permute(2, 0, 1, 3)
        return matrices.reshape(batch, kernels, *self.output_size)

    def kernel_matrices(self, weight: Tensor) -> Tensor:
        """Return kernels as matrices [N, O, C a b]."""
        by_group = weight.reshape(self.groups, self.kernel_shape[0] // self.groups, -1)
        if self.joins_images:
            return by_group
        every_image = by_group.expand(self.input_shape[0], *by_group.shape)
        return every_image.reshape(-1, *by_group.shape[1:])


# ---- operations that take the place of a convolution and its gradients ---------------------------


def unfold(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return the windows of inputs [B, G C, H, W] as columns, [N, C a b, M]."""
    return geometry.unfold(x)


def conv_by_matmul(
    columns: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry
) -> Tensor:
    """Return a convolution [B, G O, P, Q] of columns [N, C a b, M]; the bias is [G O]."""
    out = geometry.outputs(torch.bmm(geometry.kernel_matrices(weight), columns))
    return out if bias is None else out + bias[:, None, None]


def input_gradient_by_matmul(gradient: Tensor, weight: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return the gradient by the inputs, [B, G C, H, W], from that by the outputs."""
    kernels = geometry.kernel_matrices(weight).transpose(1, 2)
    return geometry.fold(torch.bmm(kernels, geometry.output_matrices(gradient)))


def weight_gradient_by_matmul(gradient: Tensor, columns: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return the gradient by the kernels, [G O, C, a, b], from that by the outputs."""
    products = torch.bmm(geometry.output_matrices(gradient), columns.transpose(1, 2))
    if not geometry.joins_images:
        products = products.view(geometry.input_shape[0], -1).sum(0)
    return products.reshape(geometry.kernel_shape)


def conv_by_group(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
    """Return a convolution [B, G O, P, Q], computed group after group."""
    options = geometry.stride, geometry.padding, geometry.dilation
    groups = zip(x.chunk(geometry.groups, 1), weight.chunk(geometry.groups), strict=True)
    out = torch.cat([F.conv2d(inputs, kernels, None, *options) for inputs, kernels in groups], 1)
    return out if bias is None else out + bias[:, None, None]


def input_gradient_by_group(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry
) -> Tensor:
    """Return the gradient by the inputs, computed group after group."""
    return torch.cat(_gradients_by_group(gradient, x, weight, geometry, 0), 1)


def weight_gradient_by_group(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry
) -> Tensor:
    """Return the gradient by the kernels, computed group after group."""
    return torch.cat(_gradients_by_group(gradient, x, weight, geometry, 1))


def _gradients_by_group(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, position: int
) -> list[Tensor]:
    """Return each group's gradient by the inputs (position 0) or by the kernels (position 1)."""
    count = geometry.groups
    options = geometry.stride, geometry.padding, geometry.dilation, False, (0, 0), 1
    wanted = [i == position for i in range(3)]
    groups = zip(gradient.chunk(count, 1), x.chunk(count, 1), weight.chunk(count), strict=True)
    return [
        aten.convolution_backward(*tensors, None, *options, wanted)[position] for tensors in groups
    ]


_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}


def replace_grouped_convolutions(graph: fx.Graph, device: str = "cuda") -> None:
    """Compute convolutions of several clients by matrix products, large ones client by client.

    Args:
        graph: traced.
        device: type of the device on which convolutions are replaced.
    """
    unfolded: dict[Any, fx.Node] = {}  # a convolution and its gradient share the columns

    def columns_of(x: fx.Node, geometry: ConvGeometry) -> fx.Node:
        if (x, geometry) not in unfolded:
            unfolded[x, geometry] = insert_call(graph, unfold, x, geometry)
        return unfolded[x, geometry]

    def replace_forward(node: fx.Node) -> None:
        x, weight, bias, *options = node.args
        geometry = _geometry(x, weight, options)
        if geometry is None:
            return
        if geometry.is_large:
            new = insert_call(graph, conv_by_group, x, weight, bias, geometry)
        else:
            columns = columns_of(x, geometry)  # type: ignore[arg-type]
            new = insert_call(graph, conv_by_matmul, columns, weight, bias, geometry)
        node.replace_all_uses_with(new)

    def replace_backward(node: fx.Node) -> None:
        gradient, x, weight, _, *options, _ = node.args
        geometry = _geometry(x, weight, options)
        if geometry is None:
            return
        for item in list(node.users):
            if item.target is not operator.getitem or not item.users:
                continue
            by_group = gradient, x, weight, geometry
            if item.args[1] == 2:
                new = insert_call(graph, aten.sum.dim_IntList, gradient, [0, 2, 3])
            elif item.args[1] == 0 and geometry.is_large:
                new = insert_call(graph, input_gradient_by_group, *by_group)
            elif item.args[1] == 0:
                new = insert_call(graph, input_gradient_by_matmul, gradient, weight, geometry)
            elif geometry.is_large:
                new = insert_call(graph, weight_gradient_by_group, *by_group)
            else:
                columns = columns_of(x, geometry)  # type: ignore[arg-type]
                new = insert_call(graph, weight_gradient_by_matmul, gradient, columns, geometry)
            item.replace_all_uses_with(new)

    for node in list(graph.nodes):
        if node.target in _CONVOLUTIONS and node.meta["device"].type == device:
            with graph.inserting_before(node):
                if node.target is aten.convolution.default:
                    replace_forward(node)
                else:
                    replace_backward(node)
    remove_unused(graph)


def _geometry(x: Any, weight: Any, options: Sequence[Any]) -> ConvGeometry | None:  # noqa: ANN401
    """Return the geometry of a convolution of several groups, None of any other."""
    stride, padding, dilation, transposed, _, groups = options
    inputs, kernel_shape = x.meta["val"], tuple(weight.meta["val"].shape)
    is_depthwise = kernel_shape[1] == 1 and kernel_shape[0] == groups
    if inputs.ndim != 4 or transposed or groups == 1 or is_depthwise:
        return None
    pairs = [(pair[0], pair[-1]) for pair in (stride, padding, dilation)]
    return ConvGeometry(groups, tuple(inputs.shape), kernel_shape, *pairs)
