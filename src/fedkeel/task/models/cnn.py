"""The papers' convolutional networks without normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.errors import ModelError
from fedkeel.task.models import checks
from fedkeel.task.models.mlp import kaiming

MIDDLE = 100
"""Width of the second linear layer of FedGC's CNN."""


class PaddedCNN(nn.Module):
    """Two padded 5 x 5 convolutions (32, 64), each with ReLU and a 2 x 2 max-pool, then 512 units.

    `outputs` is the size of `fc2` after the 512 units; with `classes` a layer `fc3` follows a ReLU.
    Smallest image: 4 x 4.
    """

    def __init__(self, shape: Sequence[int], outputs: int, classes: int | None = None) -> None:
        super().__init__()
        channels, height, width = checks.image_shape(shape, min_side=4)
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512)
        self.fc2 = nn.Linear(512, outputs)
        self.fc3 = None if classes is None else nn.Linear(outputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        out: Tensor = self.fc2(x)
        return out if self.fc3 is None else self.fc3(F.relu(out))


class FedGHCNN(nn.Module):
    """Two unpadded 5 x 5 convolutions (32, 64), one max-pool, 128 units, dropout.

    For the arguments see `cnn_fedgh`.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        dropout: float,
        dropout_fc: float,
        relu_last: bool,
    ) -> None:
        super().__init__()
        channels, height, width = checks.image_shape(shape, min_side=10)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.drop1 = nn.Dropout(checks.dropout_rate("dropout", dropout))
        self.fc1 = nn.Linear(64 * ((height - 8) // 2) * ((width - 8) // 2), 128)
        self.drop2 = nn.Dropout(checks.dropout_rate("dropout_fc", dropout_fc))
        self.fc2 = nn.Linear(128, classes)
        self.relu_last = checks.boolean("relu_last", relu_last)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.drop1(F.max_pool2d(x, 2)).flatten(1)
        out: Tensor = self.fc2(self.drop2(F.relu(self.fc1(x))))
        return F.relu(out) if self.relu_last else out


class FedRegCNN(nn.Module):
    """Three unpadded 5 x 5 convolutions (32, 32, 64), two max-pools, 256 units.

    For the arguments see `cnn_fedreg`.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, *sides = checks.image_shape(shape, min_side=20)
        height, width = (((side - 8) // 2 - 4) // 2 for side in sides)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 32, 5)
        self.conv3 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * height * width, 256)
        self.fc2 = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(F.max_pool2d(self.conv3(x), 2))
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


class FedRegCT(nn.Module):
    """Nine padded 3 x 3 convolutions with ReLU, a 3 x 3 max-pool after the sixth, a linear layer.

    For the arguments see `cnn_fedreg_ct`.
    """

    def __init__(self, shape: Sequence[int], classes: int, *, width: int) -> None:
        super().__init__()
        inputs, height, across = checks.image_shape(shape, min_side=3)
        n = checks.positive_int("width", width)
        features: list[nn.Module] = []
        for i, outputs in enumerate((n, 2 * n, 2 * n, *[4 * n] * 6), 1):
            features.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            if i in (6, 8):
                features.append(nn.GroupNorm(1, outputs))
            features.append(nn.ReLU())
            if i == 6:
                features.append(nn.MaxPool2d(3))
            inputs = outputs
        self.features = nn.Sequential(*features)
        self.fc = nn.Linear(inputs * (height // 3) * (across // 3), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        out: Tensor = self.fc(self.features(x).flatten(1))
        return out


def cnn_mcmahan(shape: Sequence[int], classes: int) -> PaddedCNN:
    """The CNN of FedAvg's paper for MNIST: two 5 x 5 convolutions and 512 units.

    Source: McMahan et al., AISTATS 2017, section 3.
    Layers: conv1, conv2, fc1, fc2. Parameters: 1,663,370 for 10 classes on 1 x 28 x 28.
    Smallest image: 4 x 4. Initialisation: unstated in the paper; torch's own.
    """
    return PaddedCNN(shape, classes)


def cnn_gcfed(shape: Sequence[int], classes: int) -> PaddedCNN:
    """GC-Fed's CNN for CIFAR: the layers of `cnn_mcmahan`, Kaiming initialisation.

    Source: GC-Fed, Table 3; padding and initialisation from the authors' code.
    Layers: conv1, conv2, fc1, fc2. Parameters on 3 x 32 x 32: 2,156,490 for 10 classes, 2,202,660
    for 100. Smallest image: 4 x 4. Initialisation: Kaiming normal by fan-in, biases 0, every layer.
    """
    net = PaddedCNN(shape, classes)
    kaiming(net)
    return net


def cnn_fedgc(shape: Sequence[int], classes: int, *, final_layer: bool = True) -> PaddedCNN:
    """FedGC's CNN for HWDigits: two 5 x 5 convolutions, linear layers of 512 and 100 units.

    Source: FedGC (OpenReview eZN8nUXAVO7), section 4.2. Unstated there, and chosen here: channels
    (32, 64) and padding 2 as in FedAvg's paper, torch's own initialisation, and what follows the
    100 units.
    Layers: conv1, conv2, fc1, fc2, fc3. Parameters on 3 x 32 x 32: 2,203,670 for 10 classes;
    2,202,660 without the final layer. Smallest image: 4 x 4.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        final_layer: whether a linear layer to the classes follows the 100 units, after a ReLU. If
            not, the 100 units are the logits, `fc2` is the classifier, and logits beyond the number
            of classes never are a label.
    """
    if checks.boolean("final_layer", final_layer):
        return PaddedCNN(shape, MIDDLE, classes)
    if classes > MIDDLE:
        raise ModelError(
            f"without its final layer the network has {MIDDLE} logits",
            got=f"{classes} classes",
            do="set `final_layer` to true",
        )
    return PaddedCNN(shape, MIDDLE)


def cnn_fedgh(
    shape: Sequence[int],
    classes: int,
    *,
    dropout: float = 0.25,
    dropout_fc: float = 0.5,
    relu_last: bool = False,
) -> FedGHCNN:
    """FedGH's CNN for CIFAR-10: two unpadded 5 x 5 convolutions, one max-pool, 128 units, dropout.

    Source: FedGH (IEEE SPL 2024 and slides), the table of the CNN.
    Layers: conv1, conv2, fc1, fc2. Parameters: 1,234,762 for 10 classes on 3 x 32 x 32.
    Smallest image: 10 x 10.
    Deviations: the table prints a ReLU after the last linear layer, which keeps logits from being
    negative; it is off by default. Dropout rates and initialisation are unstated: 0.25 and 0.5 are
    usual for these layers, and the initialisation is torch's own.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        dropout: share of entries dropped after the max-pool, >= 0 and < 1.
        dropout_fc: share of the 128 units dropped, >= 0 and < 1.
        relu_last: whether the printed ReLU after the last layer is there.
    """
    return FedGHCNN(shape, classes, dropout=dropout, dropout_fc=dropout_fc, relu_last=relu_last)


def cnn_fedreg(shape: Sequence[int], classes: int) -> FedRegCNN:
    """FedReg's CNN for MNIST and EMNIST digits: three convolutions, two linear layers.

    Source: FedReg (ICLR 2022), section 4.1 (three convolutions, two full connections); sizes from
    the authors' code.
    Layers: conv1, conv2, conv3, fc1, fc2. Parameters: 228,010 for 10 classes on 1 x 28 x 28.
    Smallest image: 20 x 20. Initialisation: torch's own, as in the code.
    """
    return FedRegCNN(shape, classes)


def cnn_fedreg_ct(shape: Sequence[int], classes: int, *, width: int = 128) -> FedRegCT:
    """FedReg's ten-layer CNN for CT images: nine convolutions, one linear layer.

    Source: FedReg (ICLR 2022), section 4.1; widths, pool and normalisation from the authors' code:
    GroupNorm with one group after the sixth and the eighth convolution.
    Layers: features.0 ... features.19, fc. Parameters: 15,676,418 for 2 classes on 3 x 128 x 128.
    Smallest image: 3 x 3. Initialisation: torch's own, as in the code.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        width: channels of the first convolution, 128 in the code; two have twice, the other six
            four times as many.
    """
    return FedRegCT(shape, classes, width=width)
