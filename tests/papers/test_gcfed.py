"""GC-Fed, restated from its Eq. (1)-(3), Definitions 1 and 2, and sections 3.3, 4.3.1 and 4.3.2.

The text of the paper that could be had has lost its formulas; gcfed.txt line 64 says: for each
output channel the mean gradient, subtracted from every row; line 71: the same as a projection
P = I - e e^T. The operator is applied here as that matrix. Weight decay and momentum come after it,
as in the public code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from each import each
from fedkeel.solve.projections import centralise
from fedkeel.task.network import Network
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, softmax

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def phi(w: np.ndarray, axes: str = "input", vectors: bool = False) -> np.ndarray:
    """Phi(W) = W P with P = I - e e^T, e = 1 / sqrt(d), on the axes that the mean runs over."""
    if w.ndim == 1:
        return w - w.sum() / w.size if vectors else w
    if w.ndim == 2:
        axes = "input"  # 4.3.1: "these adjustments are restricted to the convolutional layer"
    over = {
        "input": range(1, w.ndim),
        "kernel": range(2, w.ndim),
        "output": [0],
        "all": range(w.ndim),
        "channels": [1],
        "output_channels": [0, 1],
        "output_kernel": [0, *range(2, w.ndim)],
    }[axes]
    kept = [axis for axis in range(w.ndim) if axis not in over]
    turned = w.transpose([*kept, *over])
    matrix = turned.reshape(int(np.prod([w.shape[axis] for axis in kept])), -1)
    e = np.ones((matrix.shape[1], 1)) / np.sqrt(matrix.shape[1])
    projected = matrix @ (np.eye(len(e)) - e @ e.T)  # Eq. (3)
    return projected.reshape(turned.shape).transpose(np.argsort([*kept, *over]))


AXES = ["input", "kernel", "output", "all", "channels", "output_channels", "output_kernel"]


class ConvNet:
    """Convolution with 2 x 2 kernels, ReLU, linear; derivatives by hand."""

    def __init__(self) -> None:
        self.shapes = {
            "conv.weight": (3, 2, 2, 2),
            "conv.bias": (3,),
            "fc.weight": (3, 27),
            "fc.bias": (3,),
        }

    def split(self, theta: Vector) -> dict[str, np.ndarray]:
        out, at = {}, 0
        for name, shape in self.shapes.items():
            out[name] = theta[at : at + int(np.prod(shape))].reshape(shape)
            at += int(np.prod(shape))
        return out

    def grad(self, theta: Vector, x: np.ndarray, y: np.ndarray) -> Vector:
        p = self.split(theta)
        patches = np.lib.stride_tricks.sliding_window_view(x, (2, 2), axis=(2, 3))  # [B,2,3,3,2,2]
        before = np.einsum("bchwij,ocij->bohw", patches, p["conv.weight"])
        before = before + p["conv.bias"][None, :, None, None]
        hidden = np.where(before > 0, before, 0.0).reshape(len(x), -1)
        d_scores = (softmax(hidden @ p["fc.weight"].T + p["fc.bias"]) - np.eye(3)[y]) / len(x)
        d_before = (d_scores @ p["fc.weight"]).reshape(before.shape) * (before > 0)
        parts = [
            np.einsum("bohw,bchwij->ocij", d_before, patches),
            d_before.sum(axis=(0, 2, 3)),
            d_scores.T @ hidden,
            d_scores.sum(axis=0),
        ]
        return np.concatenate([part.ravel() for part in parts])


class ToyConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.fc = nn.Linear(27, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


class ConvWorld(TrainingSetup):
    """The same federation of small images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng(self.seed)
        self.net = ConvNet()
        self.data = [(rng.normal(size=(len(y), 2, 4, 4)), y) for _, y in self.data]
        self.start = flat(self.network().params)

    def network(self) -> Network:
        torch.manual_seed(self.seed)
        return Network(ToyConv(), head="fc", dtype=torch.float64)


def gcfed(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    local: Sequence[str] = (),
    globally: bool = True,
    axes: str = "input",
    vectors: bool = False,
    mu: float = 0.0,
    server_lr: float = 1.0,
    **settings: object,
) -> Iterator[Told]:
    def centre(v: Vector, names: Sequence[str]) -> Vector:
        parts = setup.net.split(v)
        out = [phi(w, axes, vectors) if n in names else w for n, w in parts.items()]
        return np.concatenate([w.ravel() for w in out])

    theta = setup.start
    for t, clients in enumerate(cohorts):
        sent = {}
        for k in clients:

            def at(x, y, theta=theta):  # Definition 1: of the gradient of the client's objective
                return lambda w: centre(setup.net.grad(w, x, y) + mu * (w - theta), local)

            steps = (at(x, y) for x, y in setup.examples(k, t))
            sent[k] = descend(theta, steps, LR, **settings) - theta
        p = setup.shares("examples", clients)  # 3.2: in proportion to the size of the data
        mean = sum(s * sent[k] for s, k in zip(p, clients, strict=True))
        # Definition 2, on every tensor
        theta = theta + server_lr * (centre(mean, list(setup.net.shapes)) if globally else mean)
        yield Told(theta, sent)


BODY, ALL = ["fc1.weight", "fc1.bias"], ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


@each("vectors", [False, True])
@each("settings", [{}, {"momentum": 0.9}, {"decay": 0.2}, {"momentum": 0.5, "decay": 0.1}])
def test_gcfed_leaves_the_classifier_to_the_server(vectors: bool, settings: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in settings.items()}
    story = gcfed(setup, COHORTS, BODY, vectors=vectors, **settings)
    agree(setup.ours(f"gcfed(vectors={vectors})", LR, **ours), story, COHORTS)


@each("vectors", [False, True])
@each(
    ("expression", "local", "globally"),
    [
        ("localgc", ALL, False),
        ("globalgc", [], True),
        ("gcfed.local", BODY, False),
        ("fedavg+gcfed.global", [], True),
        ("gcfed(head='fc1')", ["fc2.weight", "fc2.bias"], True),
        # 4.3.2: the first lambda of the tensors, or of the layers, before the borderline
        ("gcfed(lam=0.9)", ALL[:3], True),
        ("gcfed(lam=0.3)", ALL[:1], True),
        ("gcfed(lam=0.9, count='layer')", BODY, True),
        ("gcfed(lam=0.4, count='layer')", [], True),
        ("gcfed(lam=0.0)", [], True),
        ("gcfed(lam=1.0)", ALL, True),
        ("gcfed.local(lam=1.0, count='layer')", ALL, False),
    ],
)
def test_the_ablations(expression: str, local: list[str], globally: bool, vectors: bool) -> None:
    setup = TrainingSetup(epochs=2)
    given = "localgc" if expression == "localgc" else expression.partition("(")[0]
    inside = expression.partition("(")[2].removesuffix(")")
    asked = f"{given}({inside + ', ' if inside else ''}vectors={vectors})"
    story = gcfed(setup, COHORTS, local, globally, vectors=vectors, momentum=0.6, decay=0.1)
    agree(setup.ours(asked, LR, momentum=0.6, weight_decay=0.1), story, COHORTS)


@each("axes", AXES)
@each("vectors", [False, True])
def test_a_convolution_has_one_mean_for_each_output_channel(axes: str, vectors: bool) -> None:
    """And other means in the paper's Table 8."""
    setup = ConvWorld()
    local = ["conv.weight", "conv.bias"]
    story = gcfed(setup, COHORTS, local, axes=axes, vectors=vectors, momentum=0.5, decay=0.1)
    ours = setup.ours(
        f"gcfed(axes='{axes}', vectors={vectors})", LR, momentum=0.5, weight_decay=0.1
    )
    agree(ours, story, COHORTS)


@each("axes", AXES)
@each("shape", [(4, 3, 2, 2), (3, 5, 3), (1, 4, 1, 1), (5,), (1,)])
@each("vectors", [False, True])
def test_the_operator(axes: str, shape: tuple[int, ...], vectors: bool) -> None:
    w = np.random.default_rng(0).normal(size=shape)
    ours = centralise(torch.from_numpy(w), axes, vectors).numpy()
    assert np.abs(ours - phi(w, axes, vectors)).max() < 1e-15


@pytest.mark.parametrize("vectors", [False, True])
def test_with_a_proximal_term_the_whole_gradient_is_centralised(vectors: bool) -> None:
    """Table 7 adds GC-Fed to FedProx: the operator sees the gradient of the whole objective."""
    setup = TrainingSetup(epochs=2)
    story = gcfed(setup, COHORTS, BODY, vectors=vectors, mu=0.5)
    agree(setup.ours(f"fedprox(mu=0.5)+gcfed(vectors={vectors})", LR), story, COHORTS)


def test_the_server_learning_rate_acts_once() -> None:
    setup = TrainingSetup()
    story = gcfed(setup, COHORTS, BODY, server_lr=0.5)
    agree(setup.ours("gcfed+addition(lr=0.5)", LR), story, COHORTS)
