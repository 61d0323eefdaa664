"""Quantities as the targets of files, frames and experiments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedkeel as fk
from commands import call
from fedkeel import config
from fedkeel.data.read.load import load
from fedkeel.errors import DataError, FedkeelError

FILE = """
rounds = 3
[data]
source = ["a.csv", "b.csv"]
label = "score"
target = "quantity"
normalize = "standardize"
test_fraction = 0.25
[partition]
kind = "source"
[model]
name = "mlp"
args = { hidden = [4] }
[task]
loss = "mse"
metrics = ["mae", "r2"]
[local]
lr = 0.1
epochs = 2
batch_size = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for name, shift in (("a", 0.0), ("b", 2.0)):
        x = random.normal(size=(40, 3))
        y = np.round(x @ [1.0, -1.0, 2.0] + shift, 3)
        lines = [",".join(map(str, [*row, v])) for row, v in zip(x, y, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["u,v,w,score", *lines]) + "\n")
    (tmp_path / "e.toml").write_text(FILE)
    return tmp_path


def data(**values: object) -> config.Data:
    return config.build(config.Data, {"target": "quantity", "label": "score", **values}, "test")


def test_a_regression_from_an_experiment_file(folder: Path) -> None:
    done = call("run", "e.toml", "--out", "run", "--json")
    assert done.code == 0, done.err
    rows = (folder / "run" / "rounds.jsonl").read_text().splitlines()
    assert '"mae"' in rows[-1]
    assert done.json["best"] <= done.json["last"] < 2.0


def test_quantities_of_tables_and_arrays(folder: Path) -> None:
    train, test = load(data(source="a.csv"))
    assert (train.classes, train.y.dtype) == (0, torch.float64)
    assert len(train) + len(test) == 40
    values = np.loadtxt("a.csv", delimiter=",", skiprows=1)[:, -1]
    assert sorted([*train.y.tolist(), *test.y.tolist()]) == sorted(values)
    x, y = np.zeros((9, 2), np.float32), np.arange(18.0).reshape(9, 2)
    np.savez("two.npz", x=x, score=y)
    train, test = load(data(source="two.npz"))
    assert (tuple(train.y.shape[1:]), train.classes) == ((2,), 0)
    assert sorted([*train.y[:, 0].tolist(), *test.y[:, 0].tolist()]) == y[:, 0].tolist()


def test_quantities_of_frames(folder: Path) -> None:
    import pyarrow as pa

    table = pa.table({"u": [0.5, 1.0, 2.0], "score": [1, 2, 3]})
    data = fk.dataset(table, target="score", classes=0)
    assert (data.classes, data.y.tolist()) == (0, [1.0, 2.0, 3.0])
    clients = fk.from_clients({"a": table, "b": table}, target="score", classes=0)
    assert clients.data.y.tolist() == [1.0, 2.0, 3.0] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,score\n1,2\n3,high\n", "score"),
        ("x,score\n1,2\n3,\n", "gap"),
        ("x,score\n1,inf\n", "finite"),
    ],
)
def test_a_target_that_is_no_number_is_refused(folder: Path, text: str, words: str) -> None:
    Path("bad.csv").write_text(text)
    with pytest.raises(DataError, match=words) as error:
        load(data(source="bad.csv"))
    assert len(error.value.lines()) <= 4


def test_sources_with_labels_are_refused() -> None:
    with pytest.raises(DataError, match=r"digits has labels, and data\.target asks for quantities"):
        load(data(source="digits"))


def test_labels_that_are_quantities_are_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(FedkeelError, match=r"set data\.target = 'quantity'"):
        load(config.build(config.Data, {"source": "a.csv", "label": "score"}, "test"))
