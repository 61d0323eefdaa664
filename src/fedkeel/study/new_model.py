"""Models to begin with, as text: what `fedkeel new` writes beside an experiment file."""

LABELS = '''\
"""The model of EXPERIMENT.toml: change it as you like."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """One hidden layer. fedkeel gives `shape`, of one example, and the number of classes."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: int = 32) -> None:
        super().__init__()
        inputs = math.prod(shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class, [B, classes]."""
        return self.head(self.body(x))
'''
"""For labels of anything but images."""

QUANTITY = '''\
"""The model of EXPERIMENT.toml: change it as you like."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """One hidden layer. fedkeel gives `shape`, of one example.

    The output is scaled by the mean and the deviation of what is predicted, so that the layers
    work with numbers around 0.
    """

    def __init__(
        self, shape: tuple[int, ...], mean: float, deviation: float, hidden: int = 32
    ) -> None:
        super().__init__()
        inputs = math.prod(shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, 1)
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted quantity, [B]."""
        return self.mean + self.deviation * self.head(self.body(x)).squeeze(1)
'''
"""For quantities."""

IMAGE = '''\
"""The model of EXPERIMENT.toml: change it as you like."""

from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions. fedkeel gives `shape`, (channels, height, width), and the classes."""

    def __init__(self, shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class, [B, classes]."""
        return self.head(self.body(x))
'''
"""For labels of images."""
