"""DenseNet-121, with the layer names of torchvision's, so that its weights can be loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks
from fedkeel.task.models.norm import Norm, norm2d

BOTTLENECK = 4
"""Channels of a layer's 1 x 1 convolution, in units of the growth."""


class DenseLayer(nn.Module):
    """conv3x3(relu(norm(conv1x1(relu(norm(x)))))): the channels that a layer adds."""

    def __init__(self, inputs: int, growth: int, norm: Norm, groups: int) -> None:
        super().__init__()
        middle = BOTTLENECK * growth
        self.norm1 = norm2d(norm, inputs, groups)
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.norm2 = norm2d(norm, middle, groups)
        self.conv2 = nn.Conv2d(middle, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, growth, height, width]."""
        x = self.conv1(F.relu(self.norm1(x)))
        out: Tensor = self.conv2(F.relu(self.norm2(x)))
        return out


class DenseBlock(nn.Sequential):
    """Layers `denselayer1`, ..., each of which sees what came in and what all before it added."""

    def __init__(self, inputs: int, layers: int, growth: int, norm: Norm, groups: int) -> None:
        super().__init__()
        for i in range(layers):
            layer = DenseLayer(inputs + i * growth, growth, norm, groups)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, inputs + layers * growth, height, width]."""
        for layer in self:
            x = torch.cat([x, layer(x)], dim=1)
        return x


class Transition(nn.Module):
    """conv1x1(relu(norm(x))) and a 2 x 2 mean: half the channels, a quarter of the pixels."""

    def __init__(self, inputs: int, norm: Norm, groups: int) -> None:
        super().__init__()
        self.norm = norm2d(norm, inputs, groups)
        self.conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, inputs / 2, height / 2, width / 2]."""
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    """A 7 x 7 stem, dense blocks with transitions between them, and a linear layer.

    For the arguments see `densenet121_gn`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        growth: int,
        blocks: Sequence[int],
        norm: Norm,
        groups: int,
        pool: bool,
    ) -> None:
        super().__init__()
        inputs, *sides = checks.image_shape(shape, min_side=29)
        checks.one_of("norm", norm, ("batch", "group"))
        width = 2 * checks.positive_int("growth", growth)
        features: OrderedDict[str, nn.Module] = OrderedDict()
        features["conv0"] = nn.Conv2d(inputs, width, 7, stride=2, padding=3, bias=False)
        features["norm0"] = norm2d(norm, width, groups)
        features["relu0"] = nn.ReLU()
        features["pool0"] = nn.MaxPool2d(3, stride=2, padding=1)
        counts = checks.positive_ints("blocks", blocks)
        for i, layers in enumerate(counts, 1):
            features[f"denseblock{i}"] = DenseBlock(width, layers, growth, norm, groups)
            width += layers * growth
            if i < len(counts):
                features[f"transition{i}"] = Transition(width, norm, groups)
                width //= 2
        features["norm5"] = norm2d(norm, width, groups)
        self.features = nn.Sequential(features)
        self.pool = checks.boolean("pool", pool)
        height, across = (1 if pool else _left(side, len(counts)) for side in sides)
        self.classifier = nn.Linear(width * height * across, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.relu(self.features(x))
        out: Tensor = self.classifier(x.mean((2, 3)) if self.pool else x.flatten(1))
        return out


def _left(side: int, blocks: int) -> int:
    """Return what the stem, its max-pool and the transitions leave of a side, in pixels."""
    return ((side + 1) // 2 + 1) // 2 >> (blocks - 1)


def densenet121_gn(
    shape: Sequence[int],
    classes: int,
    *,
    norm: Norm = "group",
    groups: int = 4,
    growth: int = 32,
    blocks: Sequence[int] = (6, 12, 24, 16),
    pool: bool = True,
) -> DenseNet:
    """FedReg's DenseNet-121 for CT images and landmarks: GroupNorm in place of BatchNorm.

    Source: Huang et al., CVPR 2017, Table 1 (layout); FedReg (ICLR 2022), section 4.1; number of
    groups from the authors' code.
    Layers: features.conv0 ... features.norm5, classifier; 121 normalisations. Parameters on 3
    channels: 6,955,906 for 2 classes; 7,054,210 without `pool` on 224 x 224. Smallest image:
    29 x 29; made for 224 x 224.
    Initialisation: convolutions Kaiming normal by fan-in, 1 and 0 for normalisation, torch's own
    for the weights of `classifier` and 0 for its bias.
    Cost: each layer copies what came before it, so memory grows with the square of a block's depth.
    Deviations: the authors' code gives `classifier` all pixels of the last maps, 7 x 7 on images of
    224 x 224, which is `pool` = false; the network that the paper cites takes their mean.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        norm: ``group`` as published, or ``batch``.
        groups: groups of channels; fewer where they do not divide the channels.
        growth: channels that each layer adds, 32 in the paper; the stem has twice as many.
        blocks: layers of each dense block.
        pool: whether `classifier` sees the mean of each last map, or all of its pixels.
    """
    return DenseNet(
        shape, classes, growth=growth, blocks=blocks, norm=norm, groups=groups, pool=pool
    )
