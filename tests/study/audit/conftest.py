"""Digits of scikit-learn as small pictures, and federations of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.prepared import Prepared
from fedkeel.runner.prepare import prepare
from fedkeel.study.arguments import checked_ingredients
from fedkeel.task.models import make

Arrays = tuple[np.ndarray, np.ndarray]


@pytest.fixture(scope="session")
def digits() -> Arrays:
    """Inputs [1797, 1, 8, 8] in [0, 1], and labels."""
    x, y = load_digits(return_X_y=True)
    return (x / 16.0).astype(np.float32).reshape(-1, 1, 8, 8), y.astype(np.int64)


def lenet() -> torch.nn.Module:
    return make("lenet_dlg", (1, 8, 8), 10)


def prepared(
    method: str, clients: list[Arrays], test: Arrays, model: Any = lenet, **settings: Any
) -> Prepared:
    """A run of clients with these arrays, which can start."""
    values = {"rounds": 3, "local": {"lr": 0.1, "epochs": 1, "batch_size": "all"}, **settings}
    run = config.build(config.Run, {"method": method, **values}, "run")
    federation = fk.from_clients(clients, classes=10)
    return prepare(run, checked_ingredients(fk.Task(model), federation, test))
