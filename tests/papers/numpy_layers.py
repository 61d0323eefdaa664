"""A network of linear layers with ReLU between them, of any depth, with its derivatives by hand."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from torch import Tensor, nn

Layers = list[tuple[np.ndarray, np.ndarray]]
"""Weight and bias of each layer."""


class Stack(nn.Module):
    """The same as a module: ``layers.0``, ``layers.1`` and so on; the last is the classifier."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: Tensor = self.layers[-1](x)
        return out


def layers_of(params: Mapping[str, Tensor]) -> Layers:
    """The layers of a `Stack`, in their order."""
    arrays = [tensor.numpy().copy() for tensor in params.values()]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def outputs(layers: Layers, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The inputs of each layer, of which the last are the features, and the scores."""
    inputs = [x]
    for weight, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0.0))
    weight, bias = layers[-1]
    return inputs, inputs[-1] @ weight.T + bias


def gradient(
    layers: Layers, x: np.ndarray, d_scores: np.ndarray, d_features: np.ndarray | float = 0.0
) -> Layers:
    """The gradient of a function of which the derivatives by scores and features are given."""
    inputs, _ = outputs(layers, x)
    found: Layers = []
    d = d_scores
    for number in range(len(layers) - 1, -1, -1):
        found.insert(0, (d.T @ inputs[number], d.sum(axis=0)))
        if number:
            d = d @ layers[number][0]
            d = (d + (d_features if number == len(layers) - 1 else 0.0)) * (inputs[number] > 0)
    return found


def moved(layers: Layers, grads: Layers, lr: float) -> Layers:
    """The layers after a step of SGD."""
    return [(w - lr * dw, b - lr * db) for (w, b), (dw, db) in zip(layers, grads, strict=True)]
