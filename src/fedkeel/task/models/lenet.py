"""GradMA's LeNet-5, and the LeNet of Deep Leakage from Gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks
from fedkeel.task.models.norm import Norm, norm1d, norm2d


class LeNet5(nn.Module):
    """Two unpadded 5 x 5 convolutions (32, 64) with max-pools, then 512 and 128 units.

    For the arguments see `lenet5`; the normalisation comes before each of the four ReLU.
    """

    def __init__(self, shape: Sequence[int], classes: int, *, dropout: float, norm: Norm) -> None:
        super().__init__()
        channels, *sides = checks.image_shape(shape, min_side=16)
        height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.norm1 = norm2d(norm, 32)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.norm2 = norm2d(norm, 64)
        self.fc1 = nn.Linear(64 * height * width, 512)
        self.norm3 = norm1d(norm, 512)
        self.fc2 = nn.Linear(512, 128)
        self.norm4 = norm1d(norm, 128)
        self.drop = nn.Dropout(checks.dropout_rate("dropout", dropout))
        self.fc3 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2).flatten(1)
        x = self.drop(F.relu(self.norm3(self.fc1(x))))
        x = self.drop(F.relu(self.norm4(self.fc2(x))))
        out: Tensor = self.fc3(x)
        return out


def lenet5(
    shape: Sequence[int], classes: int, *, dropout: float = 0.5, norm: Norm = "batch"
) -> LeNet5:
    """GradMA's LeNet-5 for CIFAR-10: BatchNorm, dropout; wider than LeCun's.

    Source: GradMA (CVPR 2023), section 6 ("Lenet-5"); sizes, normalisation and dropout from the
    authors' code.
    Layers: conv1, norm1, conv2, norm2, fc1, norm3, fc2, norm4, fc3. Parameters: 941,834 for 10
    classes on 3 x 32 x 32, of which 1,472 are the normalisation's. Smallest image: 16 x 16.
    Initialisation: torch's own, as in the code.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        dropout: share of the 512 and of the 128 units that are dropped, >= 0 and < 1.
        norm: ``batch`` as published; ``group`` or ``none`` has no buffers.
    """
    return LeNet5(shape, classes, dropout=dropout, norm=norm)


class LeNetDLG(nn.Module):
    """Three 5 x 5 convolutions of 12 channels with sigmoids, and a linear layer."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, *sides = checks.image_shape(shape, min_side=4)
        height, width = ((side + 3) // 4 for side in sides)
        self.conv1 = nn.Conv2d(channels, 12, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(12, 12, 5, stride=2, padding=2)
        self.conv3 = nn.Conv2d(12, 12, 5, padding=2)
        self.fc = nn.Linear(12 * height * width, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        for conv in (self.conv1, self.conv2, self.conv3):
            x = torch.sigmoid(conv(x))
        out: Tensor = self.fc(x.flatten(1))
        return out


def lenet_dlg(shape: Sequence[int], classes: int) -> LeNetDLG:
    """The LeNet of Deep Leakage from Gradients: sigmoids, so that gradients can be matched.

    Source: Zhu et al. (NeurIPS 2019), section 4.1: ReLU is replaced by the sigmoid and strides are
    taken out; sizes from the authors' code, whose first two convolutions keep a stride of 2.
    Layers: conv1, conv2, conv3, fc. Parameters: 13,426 for 10 classes on 1 x 28 x 28.
    Initialisation: uniform in [-0.5, 0.5], as in the code.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
    """
    return LeNetDLG(shape, classes)
