"""Paths with a tilde, halves and percent: read as they are meant, or refused with what to write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedkeel as fk
from commands import call
from fedkeel import config
from fedkeel.data.read.load import load
from fedkeel.errors import ConfigError, DataError, RunError

EXPERIMENT = """
rounds = 1
[data]
source = "~/table.csv"
label = "label"
[partition]
kind = "iid"
clients = 2
[model]
name = "logistic"
[local]
lr = 0.1
epochs = 1
[engine]
kind = "sequential"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a table, beside the current folder."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    rows = "\n".join(f"{i},{i % 3},{'ab'[i % 2]}" for i in range(20))
    (tmp_path / "home" / "table.csv").write_text(f"u,v,label\n{rows}\n")
    (tmp_path / "here" / "e.toml").write_text(EXPERIMENT)
    return tmp_path / "home"


def test_a_tilde_is_the_folder_of_the_user(home: Path) -> None:
    done = call("run", "e.toml", "--out", "~/run", "-q", "--json")
    assert done.code == 0, done.err
    assert (home / "run" / "run.json").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["e.toml"]
    assert call("report", "~/run", "--out", "~/page.html").code == 0
    assert (home / "page.html").exists()
    assert fk.load("~/run").record.status == "finished"


def test_the_folder_of_a_user_who_is_not_there_is_refused(home: Path) -> None:
    done = call("run", "e.toml", "--out", "~nosuchuser/run")
    assert (done.code, "There is no user 'nosuchuser'" in done.err) == (2, True)
    assert not Path("~nosuchuser").exists()
    with pytest.raises(RunError, match="no user 'nosuchuser'"):
        load(config.build(config.Data, {"source": "~nosuchuser/table.csv"}, "test"))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: fk.Local(lr=0.1, epochs=0.5), "leave epochs out, and set steps"),  # type: ignore[arg-type]
        (lambda: fk.Cohort(participation=10), "write 0.1 for 10 %"),
        (lambda: fk.Cohort(participation="10 %"), "write 0.1, without quotes"),  # type: ignore[arg-type]
        (lambda: fk.Cohort(clients=2.5), "write 3"),  # type: ignore[arg-type]
    ],
)
def test_halves_and_percent_in_settings(build: object, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()  # type: ignore[operator]
    assert words in str(error.value.do)


def test_percent_in_a_table(home: Path) -> None:
    path = home / "percent.csv"
    path.write_text("u,label\n" + "".join(f"{i} %,{'ab'[i % 2]}\n" for i in range(9)))
    with pytest.raises(DataError, match="write it without the percent sign: 0"):
        load(config.build(config.Data, {"source": str(path)}, "test"))


def test_tables_beside_images_are_named(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(6):
            pixels = random.integers(0, 255, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    settings = config.build(config.Data, {"source": str(tmp_path)}, "test")
    assert load(settings)[0].warnings == ()
    (tmp_path / "labels.csv").write_text("file,label\n")
    (tmp_path / "a" / "ages.csv").write_text("file,age\n")
    (warning,) = load(settings)[0].warnings
    assert "labels.csv, a/ages.csv are not read" in warning


def test_a_token_that_only_the_test_set_has() -> None:
    words = np.random.default_rng(0).integers(0, 7, (20, 3))
    unknown = words.copy()
    unknown[4, 1] = 8

    def run(test: np.ndarray) -> None:
        fk.run(
            "fedavg",
            task=fk.Task(lambda: nn.Sequential(nn.Embedding(8, 2), nn.Flatten(), nn.Linear(6, 2))),
            clients=fk.iid(words, np.arange(20) % 2, clients=2, tokens=True),
            test=(torch.tensor(test), np.arange(20) % 2),
            rounds=1,
            local=fk.Local(lr=0.1, epochs=1),
            engine=fk.Engine(kind="sequential"),
            progress=False,
        )

    run(words)
    with pytest.raises(DataError, match="The test set: the model cannot take an input") as error:
        run(unknown)
    assert "the number 8 in row 4" in str(error.value)
