"""ResNets. ResNet-18 has the layer names of torchvision's, so that its weights can be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks
from fedkeel.task.models.norm import Norm, norm2d

Stem = Literal["3x3", "7x7"]
"""First layers: a 3 x 3 convolution; or a 7 x 7 one with stride 2 and a max-pool with stride 2."""

Shortcut = Literal["identity", "projection"]
"""What x passes where a block changes the shape: `Pad`, or a convolution and a normalisation."""


class Pad(nn.Module):
    """Every `stride`-th pixel, and zeros for the channels that are new.

    Args:
        more: number of new channels.
        stride: step in height and width.
    """

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, channels + more, height / stride, width / stride]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))


class Block(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with 3 x 3 convolutions.

    `groups` is the upper bound of the groups of ``group``; `shortcut` is what x passes where the
    shape changes.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        norm: Norm,
        groups: int,
        shortcut: Shortcut = "projection",
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm2d(norm, outputs, groups)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm2d(norm, outputs, groups)
        self.downsample: nn.Module = nn.Identity()
        if stride == 1 and inputs == outputs:
            return
        if shortcut == "identity":
            self.downsample = Pad(outputs - inputs, stride)
        else:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm2d(norm, outputs, groups)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outputs, height / stride, width / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet18(nn.Module):
    """Four stages of two residual blocks, a global average and a linear layer.

    For the arguments see `resnet18_gn` and `resnet18`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        norm: Norm,
        stem: Stem,
        groups: int,
        width: int,
    ) -> None:
        super().__init__()
        channels, _, _ = checks.image_shape(shape, min_side=8)
        checks.one_of("norm", norm, ("batch", "group"))
        n = checks.positive_int("width", width)
        self.large_stem = stem == "7x7"
        size, stride = (7, 2) if self.large_stem else (3, 1)
        self.conv1 = nn.Conv2d(channels, n, size, stride, padding=size // 2, bias=False)
        self.bn1 = norm2d(norm, n, groups)
        self.layer1 = _stage(2, n, n, norm, groups)
        self.layer2 = _stage(2, n, 2 * n, norm, groups)
        self.layer3 = _stage(2, 2 * n, 4 * n, norm, groups)
        self.layer4 = _stage(2, 4 * n, 8 * n, norm, groups)
        self.fc = nn.Linear(8 * n, classes)
        _start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.relu(self.bn1(self.conv1(x)))
        if self.large_stem:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class ResNet20(nn.Module):
    """A 3 x 3 stem, three stages of three residual blocks, a global average and a linear layer.

    For the arguments see `resnet20`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        norm: Norm,
        groups: int,
        width: int,
        shortcut: Shortcut,
    ) -> None:
        super().__init__()
        channels, _, _ = checks.image_shape(shape, min_side=4)
        checks.one_of("norm", norm, ("batch", "group"))
        checks.one_of("shortcut", shortcut, ("identity", "projection"))
        n = checks.positive_int("width", width)
        self.conv1 = nn.Conv2d(channels, n, 3, padding=1, bias=False)
        self.bn1 = norm2d(norm, n, groups)
        self.layer1 = _stage(3, n, n, norm, groups, shortcut)
        self.layer2 = _stage(3, n, 2 * n, norm, groups, shortcut)
        self.layer3 = _stage(3, 2 * n, 4 * n, norm, groups, shortcut)
        self.fc = nn.Linear(4 * n, classes)
        _start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


def _start(module: nn.Module) -> None:
    """Draw the weights of all convolutions from N(0, 2 / fan_out)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def _stage(
    blocks: int,
    inputs: int,
    outputs: int,
    norm: Norm,
    groups: int,
    shortcut: Shortcut = "projection",
) -> nn.Sequential:
    """Return residual blocks; where the channels double, the first halves height and width."""
    first = Block(inputs, outputs, outputs // inputs, norm, groups, shortcut)
    rest = (Block(outputs, outputs, 1, norm, groups) for _ in range(blocks - 1))
    return nn.Sequential(first, *rest)


def resnet18_gn(
    shape: Sequence[int],
    classes: int,
    *,
    norm: Norm = "group",
    groups: int = 32,
    width: int = 64,
) -> ResNet18:
    """GC-Fed's ResNet-18 for small images: GroupNorm, 3 x 3 stem, no max-pool.

    Source: He et al., CVPR 2016 (layout); GC-Fed, Table 3 (stem and normalisation); number of
    groups from the authors' code.
    Layers: conv1, bn1, layer1 ... layer4, fc; 62 tensors. Parameters on 3 channels: 11,220,132 for
    100 classes, 11,271,432 for 200. The paper's 11.7M is the ImageNet network. Smallest image:
    8 x 8.
    Initialisation: Kaiming normal by fan-out for convolutions, 1 and 0 for normalisation, torch's
    own for `fc`. Deviations: in the authors' code the stem has torch's own initialisation.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        norm: ``group`` as published, or ``batch``.
        groups: groups of channels; fewer where they do not divide the channels.
        width: channels of the first stage, 64 in the paper.
    """
    return ResNet18(shape, classes, norm=norm, stem="3x3", groups=groups, width=width)


def resnet18(
    shape: Sequence[int],
    classes: int,
    *,
    norm: Norm = "batch",
    groups: int = 32,
    width: int = 64,
) -> ResNet18:
    """FedGH's ResNet-18 for Tiny-ImageNet: 7 x 7 stem with stride 2, max-pool, BatchNorm.

    Source: He et al., CVPR 2016, Table 1; FedGH (IEEE SPL 2024 and slides), same table.
    Layers: conv1, bn1, layer1 ... layer4, fc; 62 tensors. Parameters on 3 channels: 11,279,112 for
    200 classes (the slides print 11.27M). Smallest image: 8 x 8; made for 64 x 64 and above.
    Initialisation: Kaiming normal by fan-out for convolutions, 1 and 0 for normalisation, torch's
    own for `fc`.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        norm: ``batch`` as published; ``group`` has no buffers.
        groups: groups of channels; fewer where they do not divide the channels.
        width: channels of the first stage, 64 in the paper.
    """
    return ResNet18(shape, classes, norm=norm, stem="7x7", groups=groups, width=width)


def resnet20(
    shape: Sequence[int],
    classes: int,
    *,
    norm: Norm = "batch",
    groups: int = 32,
    width: int = 16,
    shortcut: Shortcut = "identity",
) -> ResNet20:
    """ResNet-20 for small images: three stages of 16, 32 and 64 channels.

    Source: He et al., CVPR 2016, section 4.2 (n = 3); GradMA (CVPR 2023), section 6 ("Resnet20").
    Layers: conv1, bn1, layer1 ... layer3, fc. Parameters on 3 channels: 269,722 for 10 classes (He
    et al. print 0.27M), 282,072 for 200. Smallest image: 4 x 4.
    Initialisation: Kaiming normal by fan-out for convolutions, 1 and 0 for normalisation, torch's
    own for `fc`.
    Deviations: GradMA's code has a wider network under this name, of four stages, and gives it
    three numbers of blocks, so that it cannot be built. `width` = 64 and `shortcut` =
    ``projection`` are its first three stages.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        norm: ``batch`` as published; ``group`` has no buffers.
        groups: groups of channels; fewer where they do not divide the channels.
        width: channels of the first stage, 16 in the paper.
        shortcut: ``identity`` as published, which has no parameters; or ``projection``.
    """
    return ResNet20(shape, classes, norm=norm, groups=groups, width=width, shortcut=shortcut)
