"""Networks of linear layers: they take inputs of any shape and flatten them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.task.models import checks
from fedkeel.task.models.norm import Norm, norm1d


def kaiming(module: nn.Module) -> None:
    """Draw the weights of all linear and convolution layers from N(0, 2 / fan_in); biases are 0."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class Logistic(nn.Module):
    """One linear layer `fc` on the flattened input."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(checks.input_size(shape), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        out: Tensor = self.fc(x.flatten(1))
        return out


class MLP(nn.Module):
    """Linear layers fc1, fc2, ... with ReLU between them, on the flattened input.

    Its classifier is ``fc<len(hidden) + 1>``; `norm` comes before each ReLU, as norm1, norm2, ...
    """

    def __init__(
        self, shape: Sequence[int], classes: int, *, hidden: Sequence[int], norm: Norm = "none"
    ) -> None:
        super().__init__()
        sizes = (checks.input_size(shape), *checks.positive_ints("hidden", hidden), classes)
        self.layers = len(sizes) - 1
        for i, (inputs, outputs) in enumerate(pairwise(sizes), 1):
            self.add_module(f"fc{i}", nn.Linear(inputs, outputs))
            if i < self.layers:
                self.add_module(f"norm{i}", norm1d(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, Y]."""
        x = x.flatten(1)
        for i in range(1, self.layers):
            x = F.relu(self.get_submodule(f"norm{i}")(self.get_submodule(f"fc{i}")(x)))
        out: Tensor = self.get_submodule(f"fc{self.layers}")(x)
        return out


def logistic(shape: Sequence[int], classes: int) -> Logistic:
    """Linear softmax regression: the convex problem of the field.

    Layers: fc. Parameters: 7,850 for 10 classes on 784 inputs.
    Initialisation: torch's own.
    """
    return Logistic(shape, classes)


def mlp(
    shape: Sequence[int], classes: int, *, hidden: Sequence[int] = (64,), norm: Norm = "none"
) -> MLP:
    """Fully connected layers with ReLU; small by default, for 8 x 8 digits.

    Layers: fc1, fc2, ... Parameters: 4,810 for 10 classes on 64 inputs.
    Initialisation: torch's own.

    Args:
        shape: shape of one input.
        classes: number of classes.
        hidden: sizes of the hidden layers, each >= 1.
        norm: ``none``, ``batch`` or ``group`` normalisation before each ReLU.
    """
    return MLP(shape, classes, hidden=hidden, norm=norm)


def two_nn(shape: Sequence[int], classes: int) -> MLP:
    """FedGH's 2NN for MNIST: 784-512-256-10 with ReLU.

    Source: FedGH (IEEE SPL 2024 and slides), the table of the 2NN.
    Layers: fc1, fc2, fc3. Parameters: 535,818 for 10 classes on 784 inputs.
    Initialisation: unstated in the paper; torch's own.
    """
    return MLP(shape, classes, hidden=(512, 256))


def mlp_gcfed(shape: Sequence[int], classes: int) -> MLP:
    """GC-Fed's MLP for EMNIST by class: 784-512-256-62 with ReLU.

    Source: GC-Fed, Table 3 ("three fully connected layers"); sizes and initialisation from the
    authors' code.
    Layers: fc1, fc2, fc3. Parameters: 549,182 for 62 classes on 784 inputs.
    Initialisation: Kaiming normal by fan-in, biases 0, in all three layers.
    """
    net = MLP(shape, classes, hidden=(512, 256))
    kaiming(net)
    return net


def tinynn(shape: Sequence[int], classes: int, *, norm: Norm = "batch") -> MLP:
    """GradMA's network for MNIST: 784-200-100-10, BatchNorm before each ReLU.

    Source: GradMA (CVPR 2023), section 6 ("three linear hidden layers"); sizes and normalisation
    from the authors' code.
    Layers: fc1, norm1, fc2, norm2, fc3. Parameters: 178,710 for 10 classes on 784 inputs, of which
    600 are the normalisation's.
    Initialisation: torch's own.

    Args:
        shape: shape of one input.
        classes: number of classes.
        norm: ``batch`` as published; ``group`` or ``none`` has no buffers. Under label skew
            BatchNorm costs plain averaging much of its accuracy, so say which one a number is for.
    """
    return MLP(shape, classes, hidden=(200, 100), norm=norm)
