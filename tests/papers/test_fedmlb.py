"""FedMLB, restated from Kim et al. 2022, section 3, on a network of three layers by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from each import each
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method.grammar import parse
from fedkeel.method.parts.fedmlb import FedMLB
from fedkeel.task.models import make
from fedkeel.task.network import Network
from harness import Federation
from method.players import LOCAL, equal, federation, gap, play
from method.test_reductions import one_step
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, flat, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.2
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]
SIZES = (8, 6, 5, 3)
LAYERS = len(SIZES) - 1


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.second = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def deep(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(Deep(), head="last", dtype=torch.float64)


def layers(theta: Vector) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of each layer."""
    out, at = [], 0
    for inputs, outputs in pairwise(SIZES):
        middle = at + inputs * outputs
        end = middle + outputs
        out.append((theta[at:middle].reshape(outputs, inputs), theta[middle:end]))
        at = end
    return out


def forward(net: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> list[np.ndarray]:
    """What goes into each layer, and the scores."""
    passed = [x]
    for depth, (weight, bias) in enumerate(net):
        out = passed[-1] @ weight.T + bias
        passed.append(np.maximum(out, 0.0) if depth < LAYERS - 1 else out)
    return passed


def backward(
    net: list[tuple[np.ndarray, np.ndarray]], passed: list[np.ndarray], slopes: np.ndarray
) -> list[Vector]:
    """The gradient of each layer, where the derivative by the scores is given."""
    out: list[Vector] = []
    for depth in reversed(range(LAYERS)):
        out.insert(0, np.concatenate([(slopes.T @ passed[depth]).ravel(), slopes.sum(axis=0)]))
        slopes = (slopes @ net[depth][0]) * (passed[depth] > 0)
    return out


def fedmlb(
    setup: TrainingSetup,
    lambdas: tuple[float, float, float],
    T: float = 1.0,
    hybrids: tuple[int, ...] = (1, 2),
    tau: float | None = None,
    **local: object,
) -> Iterator[Told]:
    """`hybrids`: how many layers of each are local; with `tau`, the loss is FedLC's."""
    own, branch, apart = lambdas

    def error(scores: np.ndarray, y: np.ndarray, i: int) -> np.ndarray:
        if tau is not None:
            n = np.array([np.sum(setup.data[i][1] == c) for c in range(3)])
            with np.errstate(divide="ignore"):
                scores = scores - tau * n**-0.25
        return softmax(scores) - np.eye(3)[y]

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        ours, theirs = layers(w), layers(x)
        passed = forward(ours, bx)
        q = softmax(passed[-1] / T)
        slopes = own * error(passed[-1], by, i)
        total = [np.zeros(weight.size + bias.size) for weight, bias in ours]
        for count in hybrids:
            net = ours[:count] + theirs[count:]
            through = forward(net, bx)
            p = softmax(through[-1] / T)
            each = np.sum(p * np.log(p / q), axis=1, keepdims=True)
            hybrid = branch * error(through[-1], by, i) + apart * p * (np.log(p / q) - each) / T
            found = backward(net, through, hybrid / len(hybrids) / len(bx))
            for depth in range(count):  # what is received does not move
                total[depth] += found[depth]
            slopes = slopes + apart * (q - p) / T / len(hybrids)
        for depth, found in enumerate(backward(ours, passed, slopes / len(bx))):
            total[depth] += found
        return np.concatenate(total)

    return averaged(setup, COHORTS, gradient, LR, **local)


def both(
    expression: str, epochs: int = 2, labels: list | None = None, **local: object
) -> tuple[TrainingSetup, Federation]:
    setup = TrainingSetup(epochs=epochs, labels=labels)
    network = deep()
    setup.start = flat(network.params)
    settings = Local(lr=LR, epochs=epochs, batch_size=setup.batch, **local)
    return setup, Federation(expression, network, setup.data, settings, setup.batches)


@each("lambdas", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.0), (1.5, 0.0, 3.0)])
@each("T", [1.0, 2.5])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedmlb(lambdas: tuple[float, float, float], T: float, local: dict) -> None:
    options = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    inside = ", ".join(f"lambda{i}={v}" for i, v in enumerate(lambdas, start=1))
    setup, ours = both(f"fedmlb({inside}, temperature={T})", **options)
    agree(ours, fedmlb(setup, lambdas, T, **local), COHORTS)


@pytest.mark.parametrize(
    ("begin", "hybrids"), [("last", (2,)), ("second, last", (1, 2)), ("second", (1,))]
)
def test_fedmlb_with_blocks_of_ones_own(begin: str, hybrids: tuple[int, ...]) -> None:
    setup, ours = both(f"fedmlb(begin='{begin}')")
    agree(ours, fedmlb(setup, (1.0, 1.0, 1.0), hybrids=hybrids), COHORTS)


def test_hybrids_have_the_loss_that_the_clients_minimise() -> None:
    setup, ours = both(
        "fedlc(tau=1.0)+fedmlb(lambda1=0.5)", labels=[[0, 1], [1, 2], [0, 1, 2], [2, 0]]
    )
    agree(ours, fedmlb(setup, (0.5, 1.0, 1.0), tau=1.0), COHORTS)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weights_are_fedavg_bit_for_bit(local: object) -> None:
    nothing = "fedmlb(lambda2=0.0, lambda3=0.0)"
    assert equal(play(nothing, local=local), play("fedavg", local=local))
    assert gap(play("fedmlb", local=local), play("fedavg", local=local)) > 1e-3


def test_divergences_are_nothing_in_a_first_step() -> None:
    ours = play("fedmlb(lambda2=0.0, lambda3=50.0)", batches=one_step, rounds=1)
    assert gap(ours, play("fedavg", batches=one_step, rounds=1)) < 1e-12


def test_a_first_step_counts_local_blocks_once_more() -> None:
    """Of two blocks there is one hybrid, and it gives the first the loss's gradient again."""
    ours = federation("fedmlb", batches=one_step).round()
    theirs = federation("fedavg", batches=one_step).round()
    for k, update in ours.deltas.items():
        for name, v in theirs.deltas[k].items():
            times = 2.0 if name.startswith("fc1") else 1.0
            assert float((update[name] - times * v).abs().max()) < 1e-15


def owners(found: list[list[str]]) -> list[set[str]]:
    return [{name.split(".")[0] for name in names} for names in found]


def test_the_blocks_of_a_resnet_are_the_papers() -> None:
    """Stem, four stages and classifier: five hybrids."""
    params = dict(make("resnet18_gn", (3, 8, 8), 10, {"width": 4}).named_parameters())
    stages = [{f"layer{i}"} for i in range(1, 5)]
    assert owners(FedMLB().blocks(params)) == [{"conv1", "bn1"}, *stages, {"fc"}]
    found = FedMLB(begin="layer1,layer3,fc").blocks(params)
    assert owners(found) == [
        {"conv1", "bn1"},
        {"layer1", "layer2"},
        {"layer3", "layer4"},
        {"fc"},
    ]
    assert [name for names in found for name in names] == list(params)


def test_a_block_that_the_model_does_not_have_is_refused() -> None:
    params = dict(Deep().named_parameters())
    with pytest.raises(CompositionError, match="no parameters under 'third'"):
        FedMLB(begin="second,third").blocks(params)


def test_it_needs_blocks() -> None:
    with pytest.raises(CompositionError, match="fedmlb needs BLOCKS"):
        parse("fedmlb", frozenset())
