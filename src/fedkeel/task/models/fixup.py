"""ResNet-9 with Fixup initialisation: deep without any normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks

DEPTH = 2
"""m of Fixup: the first convolution of a block is scaled by DEPTH^(-1/2)."""


class FixupBlock(nn.Module):
    """relu(x + scale * conv2(relu(conv1(x + bias1a) + bias1b) + bias2a) + bias2b)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias1a = nn.Parameter(torch.zeros(1))
        self.conv1 = _conv(channels, channels, gain=DEPTH**-0.5)
        self.bias1b = nn.Parameter(torch.zeros(1))
        self.bias2a = nn.Parameter(torch.zeros(1))
        self.conv2 = _conv(channels, channels, gain=0.0)
        self.scale = nn.Parameter(torch.ones(1))
        self.bias2b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, channels, height, width]."""
        out = F.relu(self.conv1(x + self.bias1a) + self.bias1b)
        out = self.conv2(out + self.bias2a) * self.scale + self.bias2b
        return F.relu(x + out)


class FixupStage(nn.Module):
    """relu(scale * conv(x + bias1a) + bias1b), a 2 x 2 max-pool where asked for, then blocks.

    Args:
        inputs: channels that come in.
        outputs: channels that go out.
        pool: whether height and width are halved.
        blocks: number of residual blocks, >= 0.
    """

    def __init__(self, inputs: int, outputs: int, *, pool: bool, blocks: int) -> None:
        super().__init__()
        self.bias1a = nn.Parameter(torch.zeros(1))
        self.conv = _conv(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(1))
        self.bias1b = nn.Parameter(torch.zeros(1))
        self.pool = pool
        self.blocks = nn.Sequential(*(FixupBlock(outputs) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outputs, height / 2, width / 2], or of full size without a pool."""
        x = F.relu(self.conv(x + self.bias1a) * self.scale + self.bias1b)
        out: Tensor = self.blocks(F.max_pool2d(x, 2) if self.pool else x)
        return out


class FixupResNet9(nn.Module):
    """A convolution, three stages that halve the image, a global max-pool and a linear layer.

    For the arguments see `fixup_resnet9`.
    """

    def __init__(self, shape: Sequence[int], classes: int, *, width: int) -> None:
        super().__init__()
        channels, _, _ = checks.image_shape(shape, min_side=8)
        n = checks.positive_int("width", width)
        self.prep = FixupStage(channels, n, pool=False, blocks=0)
        self.layer1 = FixupStage(n, 2 * n, pool=True, blocks=1)
        self.layer2 = FixupStage(2 * n, 4 * n, pool=True, blocks=0)
        self.layer3 = FixupStage(4 * n, 8 * n, pool=True, blocks=1)
        self.bias2 = nn.Parameter(torch.zeros(1))
        self.fc = nn.Linear(8 * n, classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = self.layer3(self.layer2(self.layer1(self.prep(x))))
        x = F.max_pool2d(x, tuple(x.shape[-2:])).flatten(1)
        out: Tensor = self.fc(x + self.bias2)
        return out


def _conv(inputs: int, outputs: int, gain: float = 1.0) -> nn.Conv2d:
    """Return a 3 x 3 convolution with weights from N(0, gain^2 * 2 / (9 * outputs))."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.normal_(conv.weight, std=gain * math.sqrt(2.0 / (9 * outputs)))
    return conv


def fixup_resnet9(shape: Sequence[int], classes: int, *, width: int = 64) -> FixupResNet9:
    """ResNet-9 with Fixup initialisation, of FedReg and FedGC for CIFAR.

    Source: Zhang et al., Fixup Initialization, ICLR 2019; FedReg (ICLR 2022), section 4.1; FedGC
    (OpenReview eZN8nUXAVO7), section 4.2. Layout and initialisation from FedReg's code.
    Layers: prep, layer1 (one block), layer2 (none), layer3 (one block), fc; 33 tensors, of which 23
    have one element. Parameters on 3 channels: 6,568,673 for 10 classes, 6,614,843 for 100.
    Smallest image: 8 x 8.
    Initialisation: convolutions N(0, 2 / (9 * outputs)), in a block the first of them times
    2^(-1/2) and the second 0; `fc` 0; biases 0, scales 1.
    Laws: at initialisation all gradients but those of `fc` are exactly 0, as `fc` is 0. A method
    that projects on last round's update of each tensor meets zeros there.
    Deviations: the last max-pool covers the whole map, whatever its size; that is the paper's 4 x 4
    on 32 x 32 images. The first convolution and its three scalars are together in `prep`.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        width: channels after the first convolution, 64 in the papers.
    """
    return FixupResNet9(shape, classes, width=width)
