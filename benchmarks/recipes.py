"""The work that is timed: sizes, models, data and schedules, without any library.

Every peer imports this file in its own environment, so that model, initial weights, data, cohort
size, local steps and learning rate are the same. It needs torch and NumPy, and for the deep
networks, which it takes from fedkeel's list, pydantic and safetensors.

The data are synthetic, because speed does not depend on their meaning: Gaussian noise plus a faint
pattern for each class, so that accuracies can be compared too. They are made once from the seed and
kept in `.data/` beside this file, from where they are mapped into memory.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        vocabulary: number of tokens of which inputs consist; 0 where they are not tokens.
        every_place: whether a token is predicted at each place of an input.
    """

    clients: int
    size: int
    shape: tuple[int, ...]
    classes: int = 10
    spread: float = 0.0
    signal: float = 0.15
    test: int = 10_000
    seed: int = 2026
    vocabulary: int = 0
    every_place: bool = False

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
            + f"-{self.vocabulary}-{self.every_place:d}"
            * bool(self.vocabulary)
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
        small: examples in a local step on a processor, of a network for a GPU.
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
    small: int = 0

    def smaller(self) -> Recipe:
        """Return it for a processor: two clients, two steps each; all where steps are as small."""
        if self.small == self.batch:
            return self
        data = replace(self.data, clients=2, size=2 * self.small, test=20)
        name = f"{self.name}-small"
        return replace(self, name=name, data=data, per_round=2, batch=self.small)

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
        return work(self.network(), self.data).gradient


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


def named(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network of fedkeel's list."""
    sys.path.append(str(Path(__file__).parent.parent / "src"))  # where fedkeel is not installed
    from fedkeel.task.models import make

    return make(name, shape, classes)


def next_character() -> nn.Module:
    """The transformer of `examples/shakespeare.py`."""
    sys.path[:0] = [str(Path(__file__).parent.parent / part) for part in ("src", "examples")]
    module: nn.Module = importlib.import_module("shakespeare").Transformer(65)
    return module


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


def _deep(name: str, clients: int, size: int, batch: int, small: int, **data: Any) -> Recipe:
    """A network of a paper; all clients take part. `small` is the batch on a processor."""
    values = {"shape": (3, 32, 32), "test": 200, **data}
    whole = Data(clients, size, **values)
    build = next_character if name == "transformer" else named_model(name, whole)
    return Recipe(name, name, whole, build, clients, batch, 0.01, 6, small=small)


def named_model(name: str, data: Data) -> Callable[[], nn.Module]:
    """What builds a network of fedkeel's list for data."""
    return functools.partial(named, name, data.shape, data.classes)


DEEP = {
    recipe.name: recipe
    for recipe in (
        _deep("resnet18_gn", 10, 500, 50, small=5),
        _deep("fixup_resnet9", 20, 100, 20, small=5, classes=100),
        _deep("vgg11", 10, 250, 50, small=5),
        _deep("densenet121_gn", 10, 100, 20, small=4, shape=(3, 64, 64)),
        _deep("resnet20", 10, 320, 64, small=16),
        _deep("vit", 10, 250, 25, small=10),
        _deep("lenet5", 10, 320, 64, small=32),
        _deep("char_lstm", 10, 200, 20, small=10, shape=(80,), classes=80, vocabulary=80),
        _deep(
            "transformer",
            10,
            200,
            20,
            small=20,
            shape=(64,),
            classes=65,
            vocabulary=65,
            every_place=True,
        ),
    )
}
RECIPES |= DEEP
RECIPES |= {f"{name}-small": recipe.smaller() for name, recipe in DEEP.items()}


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
    counts = (("test_", data.test), ("", int(data.sizes().sum())))
    if data.vocabulary:
        return _tokens(data, counts, random)
    patterns = _patterns(data, random)
    arrays = {}
    for prefix, count in counts:
        y = torch.randint(data.classes, (count,), generator=random)
        x = torch.empty(count, *data.shape)
        for rows, labels in zip(x.split(4096), y.split(4096), strict=True):
            rows.normal_(generator=random).add_(patterns[labels])
        arrays[f"{prefix}x"], arrays[f"{prefix}y"] = x.numpy(), y.numpy()
    return arrays


def _tokens(
    data: Data, counts: Iterable[tuple[str, int]], random: torch.Generator
) -> dict[str, np.ndarray]:
    """Draw tokens, and a target for each input or for each of its places."""
    arrays = {}
    for prefix, count in counts:
        shape = (count, *data.shape) if data.every_place else (count,)
        x = torch.randint(data.vocabulary, (count, *data.shape), generator=random)
        y = torch.randint(data.classes, shape, generator=random)
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


def work(model: nn.Module, data: Data) -> Work:
    """What a model does with one example."""
    counts: list[float] = []
    model.eval()  # batch normalisation takes a single example

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        weights = layer.get_parameter("weight")[0].numel()  # inputs of one output
        counts.append(float(weights * out[0].numel()))

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]
    with torch.no_grad():
        model(torch.zeros(1, *data.shape, dtype=torch.long if data.vocabulary else None))
    for hook in hooks:
        hook.remove()
    return Work(sum(counts), counts[0])


@torch.no_grad()
def accuracy(model: nn.Module, arrays: Arrays, batch: int) -> float:
    """Share of the test set that the model gets right."""
    model.eval()
    hits = 0
    for x, y in zip(arrays.test_x.split(batch), arrays.test_y.split(batch), strict=True):
        hits += int((model(x).argmax(-1) == y).sum())
    return hits / arrays.test_y.numel()
