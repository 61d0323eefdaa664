"""VGG-11, as GC-Fed and as GradMA use it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks
from fedkeel.task.models.norm import Norm, norm2d

STAGES = ((1, 1), (2, 1), (4, 2), (8, 2), (8, 2))
"""Of each stage: channels in units of the first stage's, and number of convolutions."""

POOL = 7
"""Height and width that ImageNet's VGG brings its maps to before the linear layers."""


class VGG(nn.Module):
    """Eight 3 x 3 convolutions in five stages, each with a 2 x 2 max-pool, then linear layers.

    The layers have the names of torchvision's, so that its weights can be loaded.

    For the arguments see `vgg11` and `vgg11_gradma`; `pool` is the height and width that the last
    maps are averaged or repeated to, None keeps theirs.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        width: int,
        hidden: Sequence[int],
        dropout: float,
        norm: Norm,
        pool: int | None,
    ) -> None:
        super().__init__()
        inputs, *sides = checks.image_shape(shape, min_side=32)
        features: list[nn.Module] = []
        for wide, convolutions in STAGES:
            outputs = wide * checks.positive_int("width", width)
            for _ in range(convolutions):
                features.append(nn.Conv2d(inputs, outputs, 3, padding=1))
                if norm != "none":
                    features.append(norm2d(norm, outputs))
                features.append(nn.ReLU())
                inputs = outputs
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        self.pool = pool
        height, across = (side // 32 if pool is None else pool for side in sides)
        sizes = (inputs * height * across, *checks.positive_ints("hidden", hidden), classes)
        classifier: list[nn.Module] = []
        for before, after in pairwise(sizes[:-1]):
            classifier += [nn.Linear(before, after), nn.ReLU()]
            classifier.append(nn.Dropout(checks.dropout_rate("dropout", dropout)))
        self.classifier = nn.Sequential(*classifier, nn.Linear(sizes[-2], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = self.features(x)
        if self.pool is not None:
            x = F.adaptive_avg_pool2d(x, self.pool)
        out: Tensor = self.classifier(x.flatten(1))
        return out


def vgg11(
    shape: Sequence[int],
    classes: int,
    *,
    dropout: float = 0.5,
    width: int = 64,
    hidden: Sequence[int] = (4096, 4096),
) -> VGG:
    """GC-Fed's VGG-11: ImageNet's network on small images, without normalisation.

    Source: Simonyan and Zisserman, ICLR 2015, Table 1 (A); GC-Fed, Table 3.
    Layers: features.0 ... features.18, classifier.0, classifier.3, classifier.6; 22 tensors.
    Parameters on 3 channels, whatever the size of the images: 129,176,036 for 100 classes,
    129,585,736 for 200. The paper's 132.8M is the ImageNet network. Smallest image: 32 x 32.
    Initialisation: convolutions Kaiming normal by fan-out, linear layers N(0, 0.01^2), biases 0.
    Laws: on images of 32 x 32 the last maps are single numbers, which the pool repeats 7 x 7 times:
    the columns of `classifier.0` that belong to one channel always have the same gradient.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        dropout: share of the units of each hidden linear layer that are dropped, >= 0 and < 1.
        width: channels of the first stage, 64 in the paper.
        hidden: sizes of the hidden linear layers, 4096 twice in the paper.
    """
    net = VGG(shape, classes, width=width, hidden=hidden, dropout=dropout, norm="none", pool=POOL)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return net


def vgg11_gradma(
    shape: Sequence[int],
    classes: int,
    *,
    norm: Norm = "batch",
    dropout: float = 0.5,
    width: int = 64,
    hidden: Sequence[int] = (128,),
) -> VGG:
    """GradMA's VGG-11 for CIFAR-100: BatchNorm, one hidden linear layer of 128 units.

    Source: GradMA (CVPR 2023), section 6 ("VGG-11"); sizes, normalisation and dropout from the
    authors' code, where the class is defined and cannot be chosen.
    Layers: features.0 ... features.26, classifier.0, classifier.3. Parameters on 3 x 32 x 32:
    9,304,548 for 100 classes, of which 5,504 are the normalisation's. Smallest image: 32 x 32.
    Initialisation: torch's own, as in the code.

    Args:
        shape: (channels, height, width).
        classes: number of classes.
        norm: ``batch`` as published; ``group`` or ``none`` has no buffers.
        dropout: share of the units of each hidden linear layer that are dropped, >= 0 and < 1.
        width: channels of the first stage, 64 in the code.
        hidden: sizes of the hidden linear layers, 128 in the code.
    """
    return VGG(shape, classes, width=width, hidden=hidden, dropout=dropout, norm=norm, pool=None)
