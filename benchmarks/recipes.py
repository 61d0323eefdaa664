"""The work that is timed: sizes, models, data and schedules, without any library.

Every peer imports this file in its own environment, so that model, initial weights, data, cohort
size, local steps and learning rate are the same. It needs torch and NumPy, nothing else.

The data are synthetic, because speed does not depend on their meaning: Gaussian noise plus a faint
pattern for each class, so that accuracies can be compared too. They are made once from the seed and
kept in `.data/` beside this file, from where they are mapped into memory.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FOLDER = Path(__file__).parent / ".data"


@dataclass(frozen=True)
class Data:
    """A training set divided among clients, and a test set. N examples.

    Args:
        clients: number of clients.
        size: examples of each client; the mean where `spread` is positive.
        shape: shape of one input.
        classes: number of classes.
        spread: deviation of the logarithm of the clients' sizes.
        signal: root mean square of the class patterns, beside noise of deviation 1.
        test: number of test examples.
        seed: what everything is drawn from.
    """

    clients: int
    size: int
    shape: tuple[int, ...]
    classes: int = 10
    spread: float = 0.0
    signal: float = 0.15
    test: int = 10_000
    seed: int = 2026

    def sizes(self) -> np.ndarray:
        """[clients] number of examples of each client, at least 1."""
        if not self.spread:
            return np.full(self.clients, self.size)
        random = np.random.default_rng(self.seed)
        middle = math.log(self.size) - self.spread**2 / 2
        draws = random.lognormal(middle, self.spread, self.clients)
        return np.maximum(draws.round().astype(np.int64), 1)

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        return (
            f"{self.clients}x{self.size}-{self.spread:g}-{shape}-{self.classes}"
            f"-{self.signal:g}-{self.test}-{self.seed}"
        )


@dataclass(frozen=True)
class Arrays:
    """Data in memory. Client k owns rows ``offsets[k]:offsets[k + 1]``.

    Args:
        x: [N, ...] float32.
        y: [N] int64.
        offsets: [clients + 1] int64.
        test_x: [T, ...] float32.
        test_y: [T] int64.
    """

    x: Tensor
    y: Tensor
    offsets: np.ndarray
    test_x: Tensor
    test_y: Tensor

    def to(self, device: str) -> Arrays:
        if device == "cpu":
            return self
        moved = {k: getattr(self, k).to(device) for k in ("x", "y", "test_x", "test_y")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Recipe:
    """One piece of work.

    Args:
        name: short name.
        title: what it is, in words.
        data: the clients.
        model: builds the network; takes nothing.
        per_round: clients in each round.
        batch: examples in a local step; a client's last batch may be smaller.
        lr: local learning rate of plain SGD.
        epochs: local passes over a client's data.
        rounds: rounds of one measurement.
        every: the test set is evaluated after so many rounds.
        method: "fedavg" or "scaffold".
        where: "cpu", or "gpu" for what takes too long elsewhere.
        few: rounds for a peer that needs minutes for one.
    """

    name: str
    title: str
    data: Data
    model: Callable[[], nn.Module]
    per_round: int
    batch: int
    lr: float
    rounds: int
    every: int = 10
    epochs: int = 1
    method: str = "fedavg"
    where: str = "cpu"
    few: int = 3
    evaluation_batch: int = 250
    seed: int = 0

    def network(self) -> nn.Module:
        """Build the network with its initial weights."""
        torch.manual_seed(self.seed)
        return self.model()

    def cohort(self, round: int) -> np.ndarray:
        """[per_round] clients of a round, for peers that do not draw them by themselves."""
        random = np.random.default_rng((self.seed, round))
        return random.choice(self.data.clients, self.per_round, replace=False)

    def examples(self) -> float:
        """Mean number of examples that a round processes."""
        return float(self.data.sizes().mean()) * self.per_round * self.epochs

    def steps(self) -> float:
        """Mean number of local steps of a round."""
        batches = -(-self.data.sizes() // self.batch)
        return float(batches.mean()) * self.per_round * self.epochs

    def multiply_adds(self) -> float:
        """Multiply-adds of one example's forward and backward pass: see `Work.gradient`."""
        return work(self.network(), self.data.shape).gradient


def pfl_cnn() -> nn.Module:
    """The network of pfl-research's CIFAR10 benchmark, in PyTorch's layout of images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def two_nn() -> nn.Module:
    """784-512-256-10."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def logistic() -> nn.Module:
    """784-10."""
    return nn.Sequential(nn.Linear(784, 10))


def mcmahan_cnn() -> nn.Module:
    """The CNN of FedAvg's paper, for 62 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 62),
    )


def tutorial_cnn() -> nn.Module:
    """The CNN of BlazeFL's examples, which is that of PyTorch's CIFAR10 tutorial."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


CIFAR = Data(1000, 50, (3, 32, 32))
TINY = Data(1000, 60, (784,))
A = Recipe("A", "CIFAR10 of pfl-research", CIFAR, pfl_cnn, 50, 10, 0.1, 20)
C = Recipe("C10", "logistic regression", TINY, logistic, 10, 10, 0.05, 1000, few=5)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        A,
        Recipe("B", "2NN", Data(20, 640, (784,)), two_nn, 20, 128, 0.1, 30),
        Recipe("B2", "2NN, small clients", Data(200, 20, (784,)), two_nn, 200, 10, 0.1, 20),
        C,
        replace(C, name="C100", per_round=100, rounds=200),
        Recipe(
            "D",
            "FEMNIST's shape, ragged clients",
            Data(3400, 200, (1, 28, 28), classes=62, spread=0.5, signal=0.3),
            mcmahan_cnn,
            10,
            20,
            0.1,
            20,
        ),
        Recipe(
            "E",
            "2NN with SCAFFOLD",
            Data(10_000, 24, (784,)),
            two_nn,
            100,
            12,
            0.05,
            20,
            method="scaffold",
        ),
        Recipe("F", "2NN, 50,000 clients", Data(50_000, 1, (784,)), two_nn, 100, 1, 0.01, 30),
        Recipe("F5", "2NN, 5,000 clients", Data(5_000, 1, (784,)), two_nn, 100, 1, 0.01, 30),
        replace(A, name="A1500", title="A at full length", rounds=1500, where="gpu"),
        Recipe(
            "BlazeFL",
            "CIFAR10 of BlazeFL",
            replace(CIFAR, clients=100, size=500),
            tutorial_cnn,
            100,
            50,
            0.1,
            5,
            every=5,
            epochs=5,
            where="gpu",
        ),
    )
}


def load(data: Data) -> Arrays:
    """Map the data into memory; make them first where they have not been made."""
    folder = FOLDER / data.name
    if not folder.exists():
        aside = folder.with_name(f"{folder.name}.{os.getpid()}")
        aside.mkdir(parents=True)
        for name, array in _made(data).items():
            np.save(aside / f"{name}.npy", array)
        try:
            aside.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(aside)

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

    offsets = np.concatenate([[0], np.cumsum(data.sizes())])
    return Arrays(tensor("x"), tensor("y"), offsets, tensor("test_x"), tensor("test_y"))


def _made(data: Data) -> dict[str, np.ndarray]:
    """Draw labels, then noise, and add the class patterns, 4096 examples at a time."""
    random = torch.Generator().manual_seed(data.seed)
    patterns = _patterns(data, random)
    arrays = {}
    for prefix, count in (("test_", data.test), ("", int(data.sizes().sum()))):
        y = torch.randint(data.classes, (count,), generator=random)
        x = torch.empty(count, *data.shape)
        for rows, labels in zip(x.split(4096), y.split(4096), strict=True):
            rows.normal_(generator=random).add_(patterns[labels])
        arrays[f"{prefix}x"], arrays[f"{prefix}y"] = x.numpy(), y.numpy()
    return arrays


def _patterns(data: Data, random: torch.Generator) -> Tensor:
    """[classes, ...] smooth for images, so that convolutions can find them."""
    if len(data.shape) == 1:
        patterns = torch.randn(data.classes, *data.shape, generator=random)
    else:
        channels, height, width = data.shape
        coarse = torch.randn(data.classes, channels, height // 4, width // 4, generator=random)
        patterns = F.interpolate(coarse, (height, width), mode="bilinear")
    return data.signal * patterns / patterns.square().mean().sqrt()


@dataclass(frozen=True)
class Work:
    """Multiply-adds of convolutions and dense layers for one example.

    Args:
        forward: of a forward pass.
        first: of the first layer's part of it.
    """

    forward: float
    first: float

    @property
    def gradient(self) -> float:
        """Of the gradient with respect to the weights.

        Backward takes twice the forward's, for the gradients of weights and inputs; that of the
        first layer's inputs is not needed.
        """
        return 3 * self.forward - self.first

    @property
    def input_gradient(self) -> float:
        """Of the gradient with respect to the inputs."""
        return 2 * self.forward


def work(model: nn.Module, shape: tuple[int, ...]) -> Work:
    """What a model does with one example of a shape."""
    counts: list[float] = []

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        weights = layer.get_parameter("weight")[0].numel()  # inputs of one output
        counts.append(float(weights * out[0].numel()))

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    with torch.no_grad():
        model(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return Work(sum(counts), counts[0])


@torch.no_grad()
def accuracy(model: nn.Module, arrays: Arrays, batch: int) -> float:
    """Share of the test set that the model gets right."""
    model.eval()
    hits = 0
    for x, y in zip(arrays.test_x.split(batch), arrays.test_y.split(batch), strict=True):
        hits += int((model(x).argmax(1) == y).sum())
    return hits / len(arrays.test_y)
