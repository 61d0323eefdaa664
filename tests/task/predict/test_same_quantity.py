"""A metric of a run is that of the answers of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn

import fedkeel as fk

torchmetrics = pytest.importorskip("torchmetrics")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(300, 3)).astype(np.float32)
COUNTS = RANDOM.poisson(np.exp(X @ [0.5, 1.0, -0.5])).astype(np.float32)
LABELS = (X.sum(axis=1) > 0).astype(np.int64)


def run(folder: Path, loss: Any, y: Any, metrics: list[Any], classes: int | None) -> fk.Result:
    return fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(3, 1), loss=loss, metrics=metrics),
        clients=fk.iid(X[:200], y[:200], clients=2, classes=classes),
        test=(X[200:], y[200:]),
        rounds=8,
        local=fk.Local(lr=0.05, epochs=1, batch_size=20),
        engine=fk.Engine(kind="sequential"),
        out=folder,
        progress=False,
    )


@pytest.mark.parametrize("loss", ["poisson", nn.PoissonNLLLoss(), "mse"])
def test_metrics_of_counts_are_those_of_the_rates_that_are_answered(
    tmp_path: Path,
    loss: Any,
) -> None:
    names = ["mae", "rmse", "r2", torchmetrics.MeanAbsoluteError()]
    result = run(tmp_path / "run", loss, COUNTS, names, classes=0)
    said = fk.load(tmp_path / "run", model=lambda: nn.Linear(3, 1)).predict(X[200:])
    values, truth = said.values.numpy(), COUNTS[200:]
    assert said.probabilities is None
    test = result.rows[-1].test
    assert test["mae"] == pytest.approx(sk.mean_absolute_error(truth, values), rel=1e-6)
    assert test["MeanAbsoluteError"] == pytest.approx(test["mae"], rel=1e-6)
    assert test["rmse"] == pytest.approx(sk.root_mean_squared_error(truth, values), rel=1e-6)
    assert test["r2"] == pytest.approx(sk.r2_score(truth, values), rel=1e-6)
    if loss != "mse":
        torch.testing.assert_close(said.values, said.scores[:, 0].exp())


@pytest.mark.parametrize("loss", ["bce", nn.BCEWithLogitsLoss()])
def test_metrics_of_one_score_are_those_of_the_label_and_its_probability(
    tmp_path: Path,
    loss: Any,
) -> None:
    y = LABELS if loss == "bce" else LABELS[:, None].astype(np.float32)
    result = run(tmp_path / "run", loss, y, ["accuracy", "rmse"], classes=None)
    said = fk.load(tmp_path / "run", model=lambda: nn.Linear(3, 1)).predict(X[200:])
    test, truth = result.rows[-1].test, LABELS[200:]
    assert said.probabilities is not None
    assert test["accuracy"] == pytest.approx(sk.accuracy_score(truth, said.values))
    brier = sk.brier_score_loss(truth, said.probabilities)
    assert test["rmse"] == pytest.approx(np.sqrt(brier), rel=1e-6)
