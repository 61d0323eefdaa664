"""The doctor says what was planted, repeats itself, and leaves a file that runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.config import load
from fedkeel.errors import DataError
from fedkeel.records.doctor import DoctorRecord
from fedkeel.report.doctor_page import render_doctor_page
from fedkeel.runner.prepare import gather
from fedkeel.study.doctor import examine, measure_data
from fedkeel.study.tune import tune

RANDOM = np.random.default_rng(0)
CENTRES = 3.0 * RANDOM.normal(size=(4, 6))
SEQUENTIAL = fk.Engine(kind="sequential")


def clients(
    sizes: list[int], classes: list[list[int]], shift: float = 0.0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Clients with so many examples of these classes, whose inputs are moved apart by `shift`."""
    made = {}
    for k, (size, own) in enumerate(zip(sizes, classes, strict=True)):
        y = np.resize(own, size)
        x = CENTRES[y] + RANDOM.normal(size=(size, 6)) + shift * np.eye(6)[k % 6]
        made[f"client {k}"] = x.astype(np.float32), y.astype(np.int64)
    return made


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def ask(data: dict[str, tuple[np.ndarray, np.ndarray]], **settings: object) -> DoctorRecord:
    model = settings.pop(
        "model", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    )
    buffers = settings.pop("buffers", "refuse")
    federation = fk.from_clients(data, test=data, classes=4)
    local = settings.pop("local", fk.Local(lr=0.1, epochs=1, batch_size=10))
    return fk.doctor(
        task=fk.Task(model, buffers=buffers),
        clients=federation,
        rounds=4,
        local=local,
        engine=SEQUENTIAL,
        **settings,
    )


def levels(record: DoctorRecord) -> dict[str, str]:
    return {finding.key: finding.level for finding in record.findings}


ALL = [[0, 1, 2, 3]] * 4


def test_nothing_is_said_of_clients_that_are_alike() -> None:
    federation = fk.from_clients(clients([80] * 4, ALL), classes=4)
    measured = measure_data(federation, 0)
    assert measured.label_skew == 0.0
    assert measured.input_skew < 0.2
    assert measured.sizes.gini == 0.0


def test_one_class_at_each_client_is_label_skew() -> None:
    record = ask(clients([40] * 4, [[0], [1], [2], [3]]))
    found = record.finding("labels")
    assert found is not None
    assert found.level == "problem"
    assert found.numbers["total_variation"] == pytest.approx(0.75)
    assert levels(record)["inputs"] == "fine"  # other labels alone are no other inputs
    assert levels(record)["sizes"] == "fine"
    assert record.histogram == ((40, 0, 0, 0), (0, 40, 0, 0), (0, 0, 40, 0), (0, 0, 0, 40))


def test_unequal_sizes_are_quantity_skew() -> None:
    record = ask(clients([8, 8, 8, 200], ALL))
    found = record.finding("sizes")
    assert found is not None
    assert found.level == "problem"
    assert found.numbers["ratio"] == 25.0
    assert found.numbers["fewest_steps"] == 1.0  # ceil(8 / 10), and ceil(200 / 10)
    assert found.numbers["most_steps"] == 20.0
    assert levels(record)["labels"] == "fine"
    assert "weights" in levels(record)
    assert "fednova" not in [advice.method for advice in record.excluded]


def test_other_inputs_with_batch_normalisation_ask_for_personal_normalisation() -> None:
    torch.manual_seed(0)

    def model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    record = ask(
        clients([60] * 4, ALL, shift=12.0),
        model=model,
        buffers="local",
        evaluation=fk.Evaluation(model="personal"),
    )
    assert levels(record)["inputs"] == "problem"
    assert levels(record)["labels"] == "fine"
    assert "fedbn" in [run.method for run in record.pilot]
    assert {"fedbn", "fedbn+finetune"} & set(record.methods)
    assert record.excluded == ()


def test_a_learning_rate_that_is_too_large_is_named() -> None:
    record = ask(clients([40] * 4, ALL), local=fk.Local(lr=20.0, epochs=1, batch_size=10))
    found = record.finding("rate")
    assert found is not None
    assert found.level == "problem"
    assert found.numbers["best"] == pytest.approx(2.0)
    assert "too large" in found.says or "diverges" in found.says


FILE = """
name = "small"
rounds = 3
[data]
source = "digits"
limit = 300
[partition]
kind = "dirichlet"
clients = 5
alpha = 0.1
min_size = 10
[model]
name = "mlp"
args = { hidden = [8] }
[local]
lr = 0.1
epochs = 1
[cohort]
clients = 3
[engine]
kind = "sequential"
[tune]
trials = 1
"""


def test_the_file_runs_and_a_second_call_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(FILE)
    experiment = load(tmp_path / "small.toml")
    parts = gather(experiment)
    record = examine(experiment, parts, out=tmp_path / "pilot")
    again = examine(experiment, parts)  # in memory, so every run is made again
    assert json.dumps(record.to_json()) == json.dumps(again.to_json())
    page = render_doctor_page(record)
    assert all(advice.method in page for advice in record.advised)

    (tmp_path / "advised.toml").write_text(record.experiment)
    advised = load(tmp_path / "advised.toml")
    assert advised.compare.methods == record.methods
    assert len(set(record.methods)) == 3
    result = tune(advised, gather(advised), record.methods, advised.tune, tmp_path / "tune")
    assert [row.method for row in result.rows] == list(record.methods)
    assert all(row.value is not None for row in result.rows)


def test_clients_without_examples_to_hold_out_are_refused() -> None:
    data = {k: (x[:2], y[:2]) for k, (x, y) in clients([10] * 4, ALL).items()}
    with pytest.raises(DataError, match="hold any out"):
        ask(data)
