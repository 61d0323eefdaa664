"""The histogram of a partition: in run.json while it is small, else in a file of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.errors import RunError
from fedkeel.records.folder import RunFolder
from fedkeel.records.histogram import HISTOGRAM, Histogram
from fedkeel.report.partition_chart import partition_summary
from fedkeel.report.runs import load_runs

CLIENTS, CLASSES = 300, 400


def federation(clients: int, classes: int) -> fk.Federation:
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, 3 * clients)
    return fk.by_client(np.ones((len(y), 2)), y, np.arange(len(y)) % clients, classes=classes)


def run(out: Path, clients: int, classes: int) -> fk.Federation:
    made = federation(clients, classes)
    fk.run(
        "fedavg",
        task=fk.Task(lambda: nn.Linear(2, classes)),
        clients=made,
        test=(torch.ones(4, 2), [0, 1, 2, 3]),
        rounds=1,
        local=fk.Local(lr=0.1, steps=1),
        clients_per_round=2,
        engine=fk.Engine(kind="sequential"),
        out=out,
    )
    return made


def test_counts_are_the_histogram_without_its_zeros() -> None:
    made = federation(7, 5)
    counts = made.class_counts()
    np.testing.assert_array_equal(counts.table(), made.histogram())
    np.testing.assert_array_equal(counts.table(3), made.histogram()[:3])
    assert (counts.count > 0).all()
    assert counts.classes_of_clients().tolist() == (made.histogram() > 0).sum(axis=1).tolist()
    again = Histogram.of_rows(made.histogram().tolist())
    for name, array in counts.arrays().items():
        np.testing.assert_array_equal(array, again.arrays()[name])
    many = Histogram(10**6, 10**6, *(np.array([k]) for k in (999_999, 5, 2)))
    assert many.table() is None


@pytest.mark.parametrize(("clients", "classes"), [(7, 5), (2000, 3), (2000, 1000)])
def test_counts_by_sorting_are_those_of_a_table(clients: int, classes: int) -> None:
    made = federation(clients, classes)
    table = made.histogram()
    assert table.sum() == len(made.rows)
    for name, array in made.class_counts().arrays().items():
        np.testing.assert_array_equal(array, Histogram.of_rows(table).arrays()[name])
    np.testing.assert_array_equal(made.classes_of_clients(), (table > 0).sum(axis=1))


def test_a_large_histogram_is_no_part_of_the_record(tmp_path: Path) -> None:
    made = run(tmp_path / "large", CLIENTS, CLASSES)
    folder = RunFolder(tmp_path / "large")
    assert (folder.path / "run.json").stat().st_size < 20_000
    assert folder.read_run().partition.histogram == []
    saved = folder.histogram()
    assert saved is not None
    np.testing.assert_array_equal(saved.table(), made.histogram())
    (method,) = load_runs([folder])
    summary = partition_summary(method.record, method.runs[0].histogram)
    assert summary is not None
    assert summary.facts[0].value == str(CLIENTS)
    assert method.runs[0].changes == ()
    file = folder.path / HISTOGRAM
    folder.save_histogram(replace(saved, count=saved.count + 1))
    (changed,) = load_runs([folder])[0].runs
    assert changed.changes == (f"{HISTOGRAM} has changed since the run ended",)
    file.write_bytes(b"nothing")
    (run_again,) = load_runs([folder])[0].runs
    assert run_again.histogram is None
    assert f"{file} cannot be read." in run_again.changes


def test_a_small_histogram_stays_where_it_was(tmp_path: Path) -> None:
    made = run(tmp_path / "small", 5, 4)
    folder = RunFolder(tmp_path / "small")
    values = json.loads((folder.path / "run.json").read_text())
    assert values["partition"]["histogram"] == made.histogram().tolist()
    assert folder.histogram() is None
    (method,) = load_runs([folder])
    assert partition_summary(method.record, method.runs[0].histogram) is not None


def test_a_damaged_histogram_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    good = federation(3, 4).class_counts()
    for damaged in (
        {**good.arrays(), "client": good.client + 3},
        {**good.arrays(), "label": good.label[:-1]},
        {"shape": np.array([3, 4])},
        {**good.arrays(), "shape": np.array([3])},
    ):
        folder.save_model(damaged, HISTOGRAM)
        with pytest.raises(RunError, match=r"histogram\.safetensors cannot be read"):
            folder.histogram()
    (tmp_path / HISTOGRAM).write_bytes(b"nothing")
    with pytest.raises(RunError, match="delete it"):
        folder.histogram()
