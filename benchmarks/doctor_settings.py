"""The settings on which the doctor's advice is tested: small enough that a run takes seconds.

Each is a function without arguments that returns the settings of a run and its data and model. The
data are those of `fedkeel data` and of the examples: FEDKEEL_DATA is a folder that also has
`heart_disease`, `parkinsons` and `shakespeare`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.load import load
from fedkeel.engine.prepared import Ingredients
from fedkeel.task.models.mlp import mlp

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "heart_disease")]

TEST = 1_000
"""Test examples of image sets, at most."""

Built = tuple[config.Run, Ingredients]


@dataclass(frozen=True)
class Setting:
    """One experiment.

    Args:
        about: what it is, in a few words.
        build: makes it.
        lr: the middle of the learning rates that are tried.
        is_personal: whether the clients' personal models are judged.
    """

    about: str
    build: Callable[[], Built]
    lr: float = 0.1
    is_personal: bool = False


class SmallCNN(nn.Module):
    """Two convolutions of 8 and 16 maps, each with ReLU and pooling, and a linear layer."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * (height // 4) * (width // 4), classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.head(torch.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1))


class NextCharacter(nn.Module):
    """Scores [B, T, V] of the next character, of an embedding and two causal convolutions."""

    def __init__(self, characters: int, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.conv1 = nn.Conv1d(width, width, 4)
        self.conv2 = nn.Conv1d(width, width, 4)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(-1, -2)
        h = torch.relu(self.conv1(nn.functional.pad(h, (3, 0))))
        h = torch.relu(self.conv2(nn.functional.pad(h, (3, 0))))
        return self.head(h.transpose(-1, -2))


def run(
    rounds: int,
    epochs: int,
    batch: int,
    clients: int | None = None,
    is_personal: bool = False,
) -> config.Run:
    return config.Run(
        rounds=rounds,
        local=config.Local(lr=0.1, epochs=epochs, batch_size=batch),
        cohort=config.Cohort(clients=clients),
        evaluation=config.Evaluation(
            every=2 if is_personal else 1, model="personal" if is_personal else "auto"
        ),
        engine=config.Engine(kind="vectorized", workers=1, device="cpu"),
    )


def images(
    data: dict[str, Any],
    partition: dict[str, Any],
    settings: config.Run,
    hidden: Sequence[int] = (32,),
    norm: str = "none",
    is_convolutional: bool = False,
) -> Built:
    train, test = load(config.Data(**data))
    divided = config.Partition(**partition)
    if is_convolutional:
        model = partial(SmallCNN, train.shape, train.classes)
    else:
        model = partial(mlp, train.shape, train.classes, hidden=hidden, norm=norm)
    task = fk.Task(model, buffers="local" if norm == "batch" else "refuse")
    chosen = np.sort(np.random.default_rng(0).permutation(len(test))[:TEST])
    return settings, Ingredients(
        task,
        cache(lambda seed: divide(train, divided, seed)),
        test.take(chosen),
        "small CNN" if is_convolutional else "MLP",
    )


def folder(name: str) -> Path:
    return Path(os.environ["FEDKEEL_DATA"]) / name


def heart(is_personal: bool) -> Built:
    import compare

    train, test = {}, {}
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"doctor-heart-{os.getpid()}"
    out.mkdir(exist_ok=True)
    for hospital in compare.HOSPITALS:
        parts = compare.split(compare.read(folder("heart_disease"), hospital), 0)
        train[hospital] = compare.write(out / f"{hospital}-train.csv", parts[0])
        test[hospital] = compare.write(out / f"{hospital}-test.csv", parts[1])
    clients = fk.from_clients(
        train,
        test=test,
        target="disease",
        categories=compare.CATEGORIES,
        missing="indicator",
        normalize="standardize",
    )
    task = fk.Task(partial(mlp, clients.data.shape, 2, hidden=(16,)))
    return run(20, 2, 16, None, is_personal), _natural(task, clients, "MLP")


def parkinsons(is_personal: bool) -> Built:
    import parkinsons as example

    train, test = example.split(example.read(folder("parkinsons")))
    mean = float(np.concatenate([y for _, y in train.values()]).mean())
    clients = fk.from_clients(train, test=test, normalize="standardize")
    task = fk.Task(partial(example.Net, 19, mean), loss="huber", metrics=["mae", "r2"])
    return run(20, 2, 32, 10, is_personal), _natural(task, clients, "MLP")


def shakespeare(clients_per_round: int) -> Built:
    import shakespeare as example

    texts = dict(list(example.read(folder("shakespeare")).items())[:20])
    texts = {role: text[:4000] for role, text in texts.items()}
    alphabet = "".join(sorted(set("".join(texts.values()))))
    parts = [
        {role: example.examples(part(text), alphabet) for role, text in texts.items()}
        for part in (lambda t: t[: len(t) * 4 // 5], lambda t: t[len(t) * 4 // 5 :])
    ]
    clients = fk.from_clients(parts[0], test=parts[1], tokens=True)
    task = fk.Task(
        partial(NextCharacter, len(alphabet)),
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
    )
    return run(20, 1, 8, clients_per_round), _natural(task, clients, "causal CNN")


def _natural(task: fk.Task, clients: fk.Federation, model: str) -> Ingredients:
    if clients.test is None:
        raise ValueError("the clients have no test examples")
    return Ingredients(task, lambda seed: clients, clients.test, model)


def _digits(settings: config.Run, **partition: Any) -> Callable[[], Built]:  # noqa: ANN401
    return partial(images, {"source": "digits"}, partition, settings)


def _mnist(settings: config.Run, **partition: Any) -> Callable[[], Built]:  # noqa: ANN401
    data = {"source": "mnist", "limit": 2_000, "shape": (1, 14, 14)}
    return partial(images, data, partition, settings)


def _cifar(settings: config.Run, **partition: Any) -> Callable[[], Built]:  # noqa: ANN401
    data = {"source": "cifar10", "limit": 1_500, "shape": (3, 8, 8)}
    return partial(images, data, partition, settings, is_convolutional=True)


SETTINGS: dict[str, Setting] = {
    "digits-iid": Setting(
        "digits, 10 clients, IID, all in each round",
        _digits(run(20, 2, 20), kind="iid", clients=10),
    ),
    "digits-dirichlet": Setting(
        "digits, 20 clients, Dirichlet 0.05, 5 in each round",
        _digits(run(30, 3, 20, 5), kind="dirichlet", clients=20, alpha=0.05, min_size=5),
    ),
    "digits-one-class": Setting(
        "digits, 20 clients of one class, all in each round",
        _digits(run(30, 2, 20), kind="classes", clients=20, classes_per_client=1),
    ),
    "digits-sizes": Setting(
        "digits, 20 clients, IID of unequal sizes (log-normal 1.5), 5 in each round",
        _digits(run(20, 3, 20, 5), kind="iid", clients=20, sizes="power", sigma=1.5),
    ),
    "mnist-two-classes": Setting(
        "MNIST, 20 clients of two classes, 4 in each round",
        _mnist(run(30, 2, 25, 4), kind="classes", clients=20, classes_per_client=2),
    ),
    "mnist-dirichlet": Setting(
        "MNIST, 50 clients, Dirichlet 0.1, 5 in each round",
        _mnist(run(30, 2, 10, 5), kind="dirichlet", clients=50, alpha=0.1, min_size=3),
    ),
    "mnist-iid": Setting(
        "MNIST, 100 clients, IID, 5 in each round",
        _mnist(run(30, 2, 10, 5), kind="iid", clients=100),
    ),
    "mnist-personal": Setting(
        "MNIST, 20 clients of two classes, 10 in each round, personal models judged",
        _mnist(
            run(20, 2, 20, 10, is_personal=True),
            kind="classes",
            clients=20,
            classes_per_client=2,
            holdout=0.3,
        ),
        is_personal=True,
    ),
    "sources-personal": Setting(
        "MNIST, USPS, MNIST-M as 3 clients, batch normalisation, personal models judged",
        partial(
            images,
            {
                "source": ("mnist", "usps", "mnist-m"),
                "limit": 600,
                "shape": (3, 14, 14),
                "normalize": "none",
            },
            {"kind": "source", "holdout": 0.3},
            run(20, 1, 20, is_personal=True),
            norm="batch",
        ),
        is_personal=True,
    ),
    "cifar-dirichlet": Setting(
        "CIFAR-10 at 8 x 8, 20 clients, Dirichlet 0.1, 4 in each round",
        _cifar(run(25, 2, 40, 4), kind="dirichlet", clients=20, alpha=0.1, min_size=3),
        lr=0.2,
    ),
    "heart": Setting("heart disease, 4 hospitals, one model judged", partial(heart, False)),
    "heart-personal": Setting(
        "heart disease, 4 hospitals, personal models judged",
        partial(heart, True),
        is_personal=True,
    ),
    "parkinsons": Setting(
        "Parkinson's, 42 patients, 10 in each round, one model judged",
        partial(parkinsons, False),
        lr=0.03,
    ),
    "parkinsons-personal": Setting(
        "Parkinson's, 42 patients, 10 in each round, personal models judged",
        partial(parkinsons, True),
        lr=0.03,
        is_personal=True,
    ),
    "shakespeare-few": Setting(
        "Shakespeare, 20 roles, 4 in each round", partial(shakespeare, 4), lr=0.5
    ),
    "cifar-mild": Setting(
        "CIFAR-10 at 8 x 8, 10 clients, Dirichlet 0.5, all in each round",
        _cifar(run(15, 1, 40), kind="dirichlet", clients=10, alpha=0.5, min_size=3),
        lr=0.2,
    ),
    "shakespeare-half": Setting(
        "Shakespeare, 20 roles, 10 in each round", partial(shakespeare, 10), lr=0.5
    ),
}
