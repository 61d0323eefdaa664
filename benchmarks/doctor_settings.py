"""The settings on which the doctor's advice is tested: small enough that a run takes seconds.

Each is a function without arguments that returns the settings of a run and its data and model. The
data are those of `fedkeel data` and of the examples: FEDKEEL_DATA is a folder that also has
`heart_disease`, `parkinsons` and `shakespeare`, and for the unseen settings `nuclei_dsb2018`,
`omniglot`, `schools` and `survival`.

The doctor's rules were made with the settings of `SEEN` in view. Those of `UNSEEN` were written
down when the rules did not change any more, and before anything was measured in them.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.base.values import only_tensor
from fedkeel.data.dataset import Dataset
from fedkeel.data.partition.recipes import divide
from fedkeel.data.read.load import load
from fedkeel.engine.prepared import Ingredients
from fedkeel.task.models.mlp import mlp
from fedkeel.task.models.norm import Norm

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

TEST = 1_000
"""Test examples of image sets, at most."""

Built = tuple[config.Run, Ingredients]
Examples = tuple[np.ndarray, np.ndarray]


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
        out: Tensor = self.head(torch.max_pool2d(torch.relu(self.conv2(x)), 2).flatten(1))
        return out


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
        out: Tensor = self.head(h.transpose(-1, -2))
        return out


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
    norm: Norm = "none",
    is_convolutional: bool = False,
) -> Built:
    train, test = load(config.Data(**data))
    divided = config.Partition(**partition)
    shape = shape_of_one(train)
    model: Callable[[], nn.Module] = partial(mlp, shape, train.classes, hidden=hidden, norm=norm)
    if is_convolutional:
        model = partial(SmallCNN, shape, train.classes)
    task = fk.Task(model, buffers="local" if norm == "batch" else "refuse")
    chosen = np.sort(np.random.default_rng(0).permutation(len(test))[:TEST])
    return settings, Ingredients(
        task,
        cache(lambda seed: divide(train, divided, seed)),
        test.take(chosen),
        "small CNN" if is_convolutional else "MLP",
    )


def shape_of_one(data: Dataset) -> tuple[int, ...]:
    """Return the shape of an input, of which there is one."""
    return only_tensor(data.x, "a benchmark").shape[1:]


def example(name: str) -> Any:
    """Return the module of an example, which knows how its data are read."""
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(path.stem + "_example", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a model of it is pickled by this name
    spec.loader.exec_module(module)
    return module


def _early(text: str) -> str:
    return text[: len(text) * 4 // 5]


def _late(text: str) -> str:
    return text[len(text) * 4 // 5 :]


def folder(name: str) -> Path:
    return Path(os.environ["FEDKEEL_DATA"]) / name


def heart(is_personal: bool) -> Built:
    compare = example("heart_disease/compare.py")
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
    task = fk.Task(partial(mlp, shape_of_one(clients.data), 2, hidden=(16,)))
    return run(20, 1, 32, None, is_personal), _natural(task, clients, "MLP")


def parkinsons(is_personal: bool) -> Built:
    module = example("parkinsons.py")
    train, test = module.split(module.read(folder("parkinsons")))
    mean = float(np.concatenate([y for _, y in train.values()]).mean())
    clients = fk.from_clients(train, test=test, normalize="standardize")
    task = fk.Task(partial(module.Net, 19, mean), loss="huber", metrics=["mae", "r2"])
    return run(20, 2, 32, 10, is_personal), _natural(task, clients, "MLP")


def shakespeare(clients_per_round: int) -> Built:
    module = example("shakespeare.py")
    texts = dict(list(module.read(folder("shakespeare")).items())[:20])
    texts = {role: text[:4000] for role, text in texts.items()}
    alphabet = "".join(sorted(set("".join(texts.values()))))
    parts = [
        {role: module.examples(part(text), alphabet) for role, text in texts.items()}
        for part in (_early, _late)
    ]
    clients = fk.from_clients(parts[0], test=parts[1], tokens=True)
    task = fk.Task(
        partial(NextCharacter, len(alphabet)),
        loss="token_cross_entropy",
        metrics=["token_accuracy"],
    )
    return run(20, 1, 8, clients_per_round), _natural(task, clients, "causal CNN")


def exam(is_personal: bool) -> Built:
    """Exam results at the London schools with at least 20 pupils (Goldstein et al., 1993)."""
    rows = _schools("Exam.csv", at_least=20)
    pupils = {
        school: (
            np.stack([_exam_inputs(row) for row in of_school]),
            np.array([float(row["normexam"]) for row in of_school]),
        )
        for school, of_school in rows.items()
    }
    return _quantity(pupils, run(20, 2, 10, 10, is_personal))


def _exam_inputs(row: dict[str, str]) -> np.ndarray:
    is_so = [
        *(row["sex"] == "F", row["schgend"] == "boys", row["schgend"] == "girls"),
        *(row["vr"].startswith(part) for part in ("bottom", "top")),
        *(row["intake"].startswith(part) for part in ("bottom", "top")),
    ]
    return np.array([float(row["standLRT"]), float(row["schavg"]), *map(float, is_so)])


def hsb82() -> Built:
    """Results in mathematics at 160 schools (Raudenbush and Bryk, 2002), mean 0, deviation 1."""
    rows = _schools("Hsb82.csv")
    results = np.array([float(row["mAch"]) for of_school in rows.values() for row in of_school])
    pupils = {
        school: (
            np.array(
                [
                    [
                        *(float(row["ses"]), float(row["meanses"])),
                        *(float(row["minrty"] == "Yes"), float(row["sx"] == "Female")),
                        float(row["sector"] == "Catholic"),
                    ]
                    for row in of_school
                ]
            ),
            (np.array([float(row["mAch"]) for row in of_school]) - results.mean()) / results.std(),
        )
        for school, of_school in rows.items()
    }
    return _quantity(pupils, run(20, 2, 10, 16))


def _schools(name: str, at_least: int = 1) -> dict[str, list[dict[str, str]]]:
    """Return the pupils of each school that has so many."""
    schools: dict[str, list[dict[str, str]]] = {}
    with (folder("schools") / name).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            schools.setdefault(row["school"], []).append(row)
    return {school: rows for school, rows in schools.items() if len(rows) >= at_least}


def _quantity(examples: dict[str, Examples], settings: config.Run) -> Built:
    """Return a regression, with 30 % of each client's examples for the test."""
    train, test = _split(examples)
    clients = fk.from_clients(train, test=test, normalize="standardize")
    model = partial(mlp, shape_of_one(clients.data), 1, hidden=(16,))
    task = fk.Task(model, loss="mse", metrics=["rmse", "r2"])
    return settings, _natural(task, clients, "MLP")


def _split(examples: dict[str, Examples]) -> tuple[dict[str, Examples], dict[str, Examples]]:
    train, test = {}, {}
    for name, (x, y) in examples.items():
        order = np.random.default_rng(0).permutation(len(x))
        cut = len(x) * 3 // 10
        test[name] = x[order[:cut]], y[order[:cut]]
        train[name] = x[order[cut:]], y[order[cut:]]
    return train, test


def nuclei() -> Built:
    """Masks of nuclei at 32 x 32: 54 images of each of three microscopes, dealt to 3 clients."""
    module = example("segmentation.py")
    images = {
        f"{domain} {part}": (x[part:54:3, :, ::2, ::2], y[part:54:3, ::2, ::2])
        for domain, (x, y) in module.read(folder("nuclei_dsb2018")).items()
        for part in range(3)
    }
    train, test = _split(images)
    clients = fk.from_clients(train, test=test)
    task = fk.Task(partial(module.UNet, 4), loss="bce", metrics=["dice", "iou"])
    return run(20, 1, 6, 3), _natural(task, clients, "U-Net")


def omniglot() -> Built:
    """The 24 Greek characters at 15 x 15, each drawn once by each of 20 people."""
    drawn: dict[str, list[tuple[np.ndarray, int]]] = {}
    with zipfile.ZipFile(folder("omniglot") / "images_background_small1.zip") as archive:
        names = [name for name in archive.namelist() if "/Greek/" in name and name.endswith(".png")]
        characters = sorted({name.split("/")[-2] for name in names})
        for name in sorted(names):
            with archive.open(name) as file:
                ink = 1.0 - np.asarray(Image.open(file), dtype=np.float32)
            x = ink.reshape(1, 15, 7, 15, 7).mean((2, 4))
            drawer = name[-len("01.png") : -len(".png")]
            drawn.setdefault(drawer, []).append((x, characters.index(name.split("/")[-2])))
    examples = {
        drawer: (np.stack([x for x, _ in of_drawer]), np.array([y for _, y in of_drawer]))
        for drawer, of_drawer in drawn.items()
    }
    # each drawer tests on other characters
    train, test = {}, {}
    for number, (drawer, (x, y)) in enumerate(examples.items()):
        is_test = (y + number) % 3 == 0
        train[drawer], test[drawer] = (x[~is_test], y[~is_test]), (x[is_test], y[is_test])
    clients = fk.from_clients(train, test=test, normalize="standardize", classes=len(characters))
    shape = shape_of_one(clients.data)
    task = fk.Task(partial(mlp, shape, len(characters), hidden=(32,)))
    return run(20, 5, 8, 5), _natural(task, clients, "MLP")


def survival() -> Built:
    module = example("survival.py")
    sites = {"Rotterdam": module.rotterdam, "Germany": module.gbsg}
    train, test = module.split({k: read(folder("survival")) for k, read in sites.items()}, 0)
    task = fk.Task(module.Cox, loss="cox", metrics=["concordance"])
    return run(20, 1, 128), _natural(task, fk.from_clients(train, test=test), "Cox")


def _natural(task: fk.Task, clients: fk.Federation, model: str) -> Ingredients:
    if clients.test is None:
        raise ValueError("the clients have no test examples")
    return Ingredients(task, lambda seed: clients, clients.test, model)


def _digits(settings: config.Run, **partition: Any) -> Callable[[], Built]:
    return partial(images, {"source": "digits"}, partition, settings)


def _mnist(settings: config.Run, **partition: Any) -> Callable[[], Built]:
    data = {"source": "mnist", "limit": 2_000, "shape": (1, 14, 14)}
    return partial(images, data, partition, settings)


def _cifar(settings: config.Run, **partition: Any) -> Callable[[], Built]:
    data = {"source": "cifar10", "limit": 1_500, "shape": (3, 8, 8)}
    return partial(images, data, partition, settings, is_convolutional=True)


def _usps(settings: config.Run, **partition: Any) -> Callable[[], Built]:
    data = {"source": "usps", "limit": 1_500}
    return partial(images, data, partition, settings)


SEEN: dict[str, Setting] = {
    "digits-iid": Setting(
        "digits, 10 clients, IID, all in each round",
        _digits(run(20, 2, 20), kind="iid", clients=10),
    ),
    "digits-dirichlet": Setting(
        "digits, 20 clients, Dirichlet 0.05, 5 in each round",
        _digits(run(20, 3, 20, 5), kind="dirichlet", clients=20, alpha=0.05, min_size=5),
    ),
    "digits-one-class": Setting(
        "digits, 20 clients of one class, all in each round",
        _digits(run(20, 2, 20), kind="classes", clients=20, classes_per_client=1),
    ),
    "digits-sizes": Setting(
        "digits, 20 clients, IID of unequal sizes (log-normal 1.5), 5 in each round",
        _digits(run(20, 3, 20, 5), kind="iid", clients=20, sizes="power", sigma=1.5),
    ),
    "mnist-two-classes": Setting(
        "MNIST, 20 clients of two classes, 4 in each round",
        _mnist(run(20, 2, 25, 4), kind="classes", clients=20, classes_per_client=2),
    ),
    "mnist-dirichlet": Setting(
        "MNIST, 50 clients, Dirichlet 0.1, 5 in each round",
        _mnist(run(20, 2, 10, 5), kind="dirichlet", clients=50, alpha=0.1, min_size=3),
    ),
    "mnist-iid": Setting(
        "MNIST, 100 clients, IID, 5 in each round",
        _mnist(run(20, 2, 10, 5), kind="iid", clients=100),
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
        _cifar(run(20, 2, 40, 4), kind="dirichlet", clients=20, alpha=0.1, min_size=3),
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

UNSEEN: dict[str, Setting] = {
    "cifar-two-classes": Setting(
        "CIFAR-10 at 8 x 8, 20 clients of two classes, 5 in each round",
        _cifar(run(20, 2, 40, 5), kind="classes", clients=20, classes_per_client=2),
        lr=0.2,
    ),
    "exam": Setting(
        "exam results at London schools of 20 pupils or more, 10 schools in each round",
        partial(exam, False),
        lr=0.05,
    ),
    "omniglot": Setting("Omniglot, Greek characters of 20 drawers, 5 in each round", omniglot),
    "survival": Setting("breast cancer, 2 sites, Cox model", survival, lr=0.1),
    "nuclei": Setting(
        "nuclei at 32 x 32, 9 clients of three microscopes, 3 in each round", nuclei, lr=0.3
    ),
    "usps-dirichlet": Setting(
        "USPS, 30 clients, Dirichlet 0.2, 6 in each round",
        _usps(run(20, 2, 20, 6), kind="dirichlet", clients=30, alpha=0.2, min_size=5),
    ),
    "hsb82": Setting("mathematics at 160 schools, 16 in each round", hsb82, lr=0.05),
    "usps-personal": Setting(
        "USPS, 10 clients of three classes, all in each round, personal models judged",
        _usps(
            run(20, 1, 20, is_personal=True),
            kind="classes",
            clients=10,
            classes_per_client=3,
            holdout=0.3,
        ),
        is_personal=True,
    ),
    "cifar-thirty": Setting(
        "CIFAR-10 at 8 x 8, 30 clients, Dirichlet 0.3, 6 in each round",
        _cifar(run(20, 2, 40, 6), kind="dirichlet", clients=30, alpha=0.3, min_size=5),
        lr=0.2,
    ),
    "digits-three-classes": Setting(
        "digits, 40 clients of three classes, 5 in each round",
        _digits(run(20, 3, 10, 5), kind="classes", clients=40, classes_per_client=3),
    ),
    "exam-personal": Setting(
        "exam results at London schools of 20 pupils or more, 10 schools in each round, "
        "personal models judged",
        partial(exam, True),
        lr=0.05,
        is_personal=True,
    ),
    "mnist-m": Setting(
        "MNIST-M, 10 clients, Dirichlet 0.2, all in each round",
        partial(
            images,
            {"source": "mnist-m", "limit": 1_500, "shape": (3, 14, 14)},
            {"kind": "dirichlet", "clients": 10, "alpha": 0.2, "min_size": 5},
            run(20, 1, 25),
        ),
    ),
}

SETTINGS = SEEN | UNSEEN
