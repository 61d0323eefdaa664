"""What is held out: by class, and in whole groups that a model has never seen."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from numpy.typing import NDArray

import fedkeel as fk
from fedkeel import config
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.hold_out import set_aside
from fedkeel.data.read.load import load
from fedkeel.errors import FedkeelError
from fedkeel.flower.node.local_data import read_local_data
from fedkeel.runner.ingredients import gather
from fedkeel.runner.split_warnings import split_warnings

PATIENTS, EACH = 40, 12


def patients() -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Inputs, labels and patients: a patient's examples are alike, and say nothing of others'."""
    random = np.random.default_rng(0)
    patient = np.repeat(np.arange(PATIENTS), EACH)
    x = random.normal(size=(PATIENTS, 4))[patient] + 0.01 * random.normal(size=(len(patient), 4))
    return x, random.integers(0, 2, PATIENTS)[patient], patient


def nearest(train: Dataset, test: Dataset) -> float:
    """Accuracy of the label of the nearest training example."""
    a, b = (part.x.numpy() for part in (train, test))  # type: ignore[union-attr]
    place = ((b[:, None] - a[None]) ** 2).sum(axis=2).argmin(axis=1)
    return float((train.labels[place] == test.labels).mean())


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    x, y, patient = patients()
    with (folder / "scans.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "patient", "b", "c", "d", "hospital", "label"])
        for values, label, of in zip(x.tolist(), y, patient, strict=True):
            rows.writerow([values[0], f"p{of}", *values[1:], f"h{of % 3}", label])
    pyarrow.parquet.write_table(
        pyarrow.csv.read_csv(folder / "scans.csv"), folder / "scans.parquet"
    )
    np.savez(folder / "scans.npz", x=x, label=y, patient=patient, hospital=patient % 3)
    return folder / "scans.csv"


def experiment(source: Path, **partition: object) -> config.Experiment:
    values = {
        "rounds": 1,
        "local": {"lr": 0.1, "epochs": 1},
        "data": {"source": str(source), "client": "hospital"},
        "partition": {"kind": "client", **partition},
        "model": {"name": "mlp"},
    }
    return config.build(config.Experiment, values, "test")


def groups_of(federation: Federation) -> tuple[set[int], set[int]]:
    """Groups that are trained on, and those that are held out."""
    group, held = federation.data.group, federation.holdout_rows
    assert group is not None
    assert held is not None
    return set(group[federation.rows].tolist()), set(group[held].tolist())


def test_groups_stay_whole_and_classes_keep_their_share() -> None:
    random = np.random.default_rng(1)
    for clients, groups, classes, fraction in (
        (1, 60, 1, 0.2),
        (4, 200, 3, 0.3),
        (3, 12, 2, 0.5),
        (5, 7, 4, 0.1),
    ):
        n = 900
        offsets = np.linspace(0, n, clients + 1).astype(np.int64)
        group, strata = random.integers(0, groups, n), random.integers(0, classes, n)
        aside = set_aside(strata, offsets, fraction, random, group)
        assert not set(group[aside]) & set(group[~aside])
        for start, end in pairwise(offsets):
            assert not aside[start:end].all()
        if groups >= 60:
            for label in range(classes):
                assert abs(aside[strata == label].mean() - fraction) < 0.08

    strata = np.repeat([0, 1, 2, 3], [50, 10, 2, 1])
    aside = set_aside(strata, np.array([0, 63]), 0.2, random)
    assert [int(aside[strata == label].sum()) for label in range(4)] == [10, 2, 1, 0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_new_patients_are_not_those_that_were_trained_on(table: Path, suffix: str) -> None:
    """A draw of rows says 1.0 where new patients have a half: their examples are known."""
    source = table.with_suffix(suffix)
    by_rows = config.Data(
        source=str(source), client="hospital", drop=("patient",) if suffix != ".npz" else ()
    )
    assert nearest(*load(by_rows)) == 1.0

    settings = experiment(source, holdout=0.25, holdout_by="patient", stratify=True)
    parts = gather(settings)
    federation, test = parts.clients(0), parts.test
    data = federation.data
    assert nearest(data, test) < 0.8
    assert data.x.shape[1] == 4  # type: ignore[union-attr]
    assert "patient" not in data.columns
    trained, held = groups_of(federation)
    assert test.group is not None
    tested = set(test.group.tolist())
    assert len(trained) + len(held) + len(tested) == PATIENTS
    assert len(tested) == 8
    assert 6 <= len(held) <= 9
    for k in range(3):
        assert federation.holdout_offsets is not None
        start, end = federation.holdout_offsets[k : k + 2]
        assert set(data.labels[federation.holdout_rows[start:end]]) == {0, 1}  # type: ignore[index]
    assert f"held out by class, the whole of {len(held)} values of 'patient'" in str(
        federation.how["says"]
    )
    again = federation.hold_out(0.5, 3)  # as a search does, of what is trained on
    trained, held = groups_of(again)
    assert not trained & held
    assert held


def test_groups_of_arrays_and_frames() -> None:
    x, y, patient = patients()
    names = [f"p{k}" for k in patient]
    parts = {f"h{k}": (x[patient % 3 == k], y[patient % 3 == k]) for k in range(3)}
    of_client = {f"h{k}": patient[patient % 3 == k] for k in range(3)}
    frame = pd.DataFrame(x, columns=list("abcd")).assign(label=y, patient=names)
    frames = {name: frame[patient % 3 == k] for k, name in enumerate(parts)}
    held = {"holdout": 0.3, "seed": 1}
    made: list[Callable[[], Federation]] = [
        lambda: fk.from_clients(parts, holdout_by=of_client, **held),
        lambda: fk.from_clients(parts, holdout_by=list(of_client.values()), **held),
        lambda: fk.from_clients(parts, holdout_by=np.concatenate([*of_client.values()]), **held),
        lambda: fk.from_clients(frames, holdout_by="patient", **held),
        lambda: fk.by_client(x, y, patient % 3, holdout_by=names, **held),
        lambda: fk.by_client(frame, None, patient % 3, holdout_by="patient", **held),
        lambda: fk.iid(x, y, 3, holdout_by=names, stratify=True, **held),
        lambda: fk.dirichlet(x, y, 3, 1.0, holdout_by=patient, **held),
        lambda: fk.by_classes(frame, clients=3, k=2, holdout_by="patient", **held),
    ]
    for make in made:
        federation = make()
        trained, out = groups_of(federation)
        assert federation.data.x.shape[1] == 4  # type: ignore[union-attr]
        assert not trained & out
        assert 0.15 < len(out) / PATIENTS < 0.45
    by_name, by_list, by_all = (make() for make in made[:3])
    for other in (by_list, by_all):
        np.testing.assert_array_equal(by_name.holdout_rows, other.holdout_rows)


def test_what_cannot_be_held_out_is_said(table: Path) -> None:
    x, y, patient = patients()
    clients = {f"h{k}": (x[patient == k], y[patient == k]) for k in range(4)}
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: fk.from_clients(clients, holdout=0.3, holdout_by=[[k] * EACH for k in "abcd"]),
            "No client can hold out",
        ),
        (
            lambda: fk.iid(x, 0.5 * y, 2, classes=0, holdout=0.3, stratify=True),
            "these have no classes",
        ),
        (lambda: fk.iid(x, y, 2, stratify=True), "'stratify' needs 'holdout'"),
        (lambda: fk.iid(x, y, 2, holdout=0.3, holdout_by=patient[:5]), "one group for each"),
        (
            lambda: fk.iid(x, y, 2, holdout=0.3, holdout_by="patient"),
            "the examples are not a table",
        ),
        (
            lambda: fk.from_clients(clients, holdout=0.3, holdout_by={"h0": patient[:EACH]}),
            "do not have the same names: 'h1'",
        ),
        (lambda: gather(experiment(table, holdout_by="patiennt")), "has no column 'patiennt'"),
        (lambda: gather(experiment(table, holdout_by="label")), "names the column of labels"),
        (
            lambda: gather(experiment(Path("digits"), holdout_by="patient")),
            "is for a column of a table, and digits is not a table",
        ),
    ]
    for call, words in cases:
        with pytest.raises(FedkeelError) as caught:
            call()
        assert words in str(caught.value)
    some = fk.from_clients(
        clients, holdout=0.4, holdout_by=[[0] * EACH, *([0] * 6 + [1] * 6 for _ in range(3))]
    )
    warnings = [text for text in split_warnings(some, some.data) if "hold nothing out" in text]
    assert "1 of 4 clients hold nothing out ('h0')" in warnings[0]


def test_a_node_sets_whole_groups_aside(table: Path) -> None:
    values = experiment(table).model_dump(exclude_none=True)
    values["data"] = {"source": "nodes", "labels": ("0", "1"), "drop": ("hospital",)}
    values["partition"] = {"kind": "nodes", "clients": 2, "holdout_by": "patient"}
    settings = config.build(config.Experiment, values, "test")
    parts = read_local_data(settings, str(table), 1)
    federation = parts.clients(0)
    assert federation.data.columns == tuple("abcd")
    assert parts.test.group is not None
    tested = set(parts.test.group.tolist())
    assert len(tested) == 8
    assert len(parts.test) == 8 * EACH
    assert nearest(federation.data.take(federation.rows), parts.test) < 0.8


def test_what_is_not_new_is_warned_of(table: Path, tmp_path: Path) -> None:
    walk = np.cumsum(np.random.default_rng(0).normal(size=1500)).astype(np.float32)
    labels = np.arange(1500) // 5 % 2

    def told(length: int, stride: int) -> list[str]:
        starts = np.arange(0, len(walk) - length, stride)
        windows = np.stack([walk[start : start + length] for start in starts])
        made = fk.iid(windows[:, None], labels[starts], 2, holdout=0.2)
        return [text for text in split_warnings(made, made.data.part(slice(0, 0))) if text]

    assert "overlap with one that is trained on" in told(24, 6)[0]
    assert told(24, 24) == []
    noise = np.random.default_rng(0).integers(0, 3, (400, 12)).astype(np.float32)
    plain = fk.iid(noise, labels[:400], 2, holdout=0.2)
    assert not any("overlap" in text for text in split_warnings(plain, plain.data))
    counts = np.random.default_rng(0).integers(0, 200, (2000, 64)).astype(np.float32)
    double = fk.iid(counts, np.arange(2000) % 2, 2, holdout=0.2)  # few bits of each number differ
    double = replace(double, data=double.data.to(torch.float64))
    assert not any(split_warnings(double, double.data.part(slice(0, 0))))

    clients = {"h": (walk[:20, None], labels[:20]), "i": (walk[20:60, None], labels[20:60])}
    tested = fk.from_clients(clients, test={"i": (walk[60:90, None], labels[60:90])})
    assert tested.test is not None
    assert [text for text in split_warnings(tested, tested.test) if text] == []

    rows = table.read_text().splitlines()
    (tmp_path / "test.csv").write_text("\n".join([rows[0], *rows[1 + EACH : 1 + 4 * EACH]]))
    values = experiment(table, holdout_by="patient").model_dump(exclude_none=True)
    values["data"]["test"] = str(tmp_path / "test.csv")
    parts = gather(config.build(config.Experiment, values, "test"))
    texts = " ".join(split_warnings(parts.clients(0), parts.test))
    assert "3 of 3 values of 'patient' in the test data are trained on, too" in texts
