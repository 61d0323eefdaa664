"""The network of PFLlib's examples for CIFAR-10: two unpadded 5 x 5 convolutions and 512 units."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """Return the network for images of 32 x 32, with the head ``fc``."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(shape[0], 32, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(1600, 512),
            relu3=nn.ReLU(),
            fc=nn.Linear(512, classes),
        )
    )
