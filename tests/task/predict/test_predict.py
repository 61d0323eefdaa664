"""A trained model answers new examples as the run that trained it scored its test set."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from commands import call
from fedkeel.errors import ModelError
from fedkeel.records.files import SEAL
from fedkeel.task.predict import export
from fedkeel.task.predict.answers import Predictions, answer
from fedkeel.task.predict.preparation import InputPreparation
from fedkeel.task.predict.trained_model import TrainedModel, load

EXPERIMENT = """\
name = "table"
rounds = 8
[data]
source = "train.csv"
test = "test.csv"
label = "outcome"
client = "hospital"
drop = ["id"]
normalize = "NORMALIZE"
missing = "MISSING"
categories = ["sex"]
[partition]
kind = "client"
[model]
name = "mlp"
args = { hidden = [8] }
[local]
lr = 0.3
epochs = 2
batch_size = 16
[engine]
kind = "sequential"
"""
COLUMNS = ("id", "hospital", "age", "sex", "dose", "outcome")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, rows[0])
        out.writeheader()
        out.writerows(rows)


def patients(count: int, seed: int, gaps: bool = True) -> list[dict[str, object]]:
    """Rows of two hospitals, whose ages differ by their mean."""
    random, rows = np.random.default_rng(seed), []
    for i in range(count):
        hospital = i % 2
        z, sex = random.normal(), "fm"[int(random.integers(2))]
        ill = z + (0.7 if sex == "m" else -0.7) > 0
        dose = "" if gaps and i % 5 == 0 else f"{random.normal(3, 1):.3f}"
        age = f"{50 + 6 * hospital + 10 * z:.2f}"
        values = (f"p{i}", ("north", "south")[hospital], age, sex, dose, "ill" if ill else "well")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with tables and a run of each preparation."""
    path, before = tmp_path_factory.mktemp("predict"), Path.cwd()
    os.chdir(path)
    write(path / "train.csv", patients(200, 0))
    write(path / "test.csv", patients(80, 1))
    for normalize, missing in (("standardize", "indicator"), ("client", "mean")):
        text = EXPERIMENT.replace("NORMALIZE", normalize).replace("MISSING", missing)
        (path / f"{normalize}.toml").write_text(text, encoding="utf-8")
        done = call("run", f"{normalize}.toml", "--out", normalize, "-q", "--json")
        assert done.code == 0, done.err
        (path / f"{normalize}.json").write_text(done.out, encoding="utf-8")
    yield path
    os.chdir(before)


def truth(path: str = "test.csv") -> list[str]:
    with Path(path).open(encoding="utf-8") as file:
        return [row["outcome"] for row in csv.DictReader(file)]


def accuracy(labels: list[str]) -> float:
    return float(np.mean(np.array(labels) == np.array(truth())))


@pytest.mark.parametrize("normalize", ["standardize", "client"])
def test_predictions_have_the_accuracy_of_the_run(folder: Path, normalize: str) -> None:
    """Categories, gaps, and the scale of all or of each client are those of the training."""
    scored = json.loads((folder / f"{normalize}.json").read_text(encoding="utf-8"))
    for which in ("last", "best"):
        found = load(normalize, which=which).predict("test.csv")
        assert accuracy(found.labels) == pytest.approx(scored[which], abs=1e-9)
    assert scored["last"] > 0.7  # so that wrong inputs would be seen
    assert torch.allclose(found.probabilities.sum(1), torch.ones(80))


def test_rows_without_a_label_in_another_order_of_columns(folder: Path) -> None:
    rows = patients(80, 1)
    order = ("dose", "id", "sex", "age")
    write(folder / "new.csv", [{name: row[name] for name in order} for row in rows])
    done = call("predict", "standardize", "new.csv", "--out", "answers.csv")
    assert done.code == 0, done.err
    with (folder / "answers.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["id", "prediction", "probability ill", "probability well"]
    assert [row["id"] for row in table] == [row["id"] for row in rows]
    expected = load("standardize").predict("test.csv")
    assert [row["prediction"] for row in table] == expected.labels
    shares = [float(row["probability ill"]) for row in table]
    assert shares == pytest.approx(expected.probabilities[:, 0].tolist(), abs=1e-8)


def test_a_column_with_the_name_of_an_answer_is_not_written_over(folder: Path) -> None:
    rows = [{**row, "prediction": "mine"} for row in patients(4, 1)]
    write(folder / "taken.csv", rows)
    done = call("predict", "standardize", "taken.csv", "--out", "lost.csv")
    assert (done.code, "'prediction'" in done.err) == (2, True)
    assert not Path("lost.csv").exists()
    assert len(load("standardize").predict("taken.csv").labels) == 4


@pytest.mark.parametrize(
    ("scores", "loss", "classes", "told"),
    [
        (torch.zeros(2, 3, 4, 4), "cross_entropy", 3, "class of each place"),
        (torch.zeros(2, 1, 4, 4), "dice", 2, "class of each place"),
        (torch.zeros(2, 1), "mse", 0, "a tensor of the quantities"),
    ],
)
def test_answers_that_are_not_one_label_say_where_they_are(
    scores: torch.Tensor, loss: str, classes: int, told: str
) -> None:
    values, shares = answer(scores, loss, classes)
    with pytest.raises(fk.FedkeelError, match=told) as caught:
        _ = Predictions(values, shares, scores).labels
    assert "take .values" in str(caught.value)


def test_whose_rows_they_are_has_to_be_known(folder: Path) -> None:
    rows = [row for row in patients(80, 1) if row["hospital"] == "south"]
    write(
        folder / "south.csv",
        [{name: row[name] for name in ("age", "sex", "dose")} for row in rows],
    )
    model = load("client")
    with pytest.raises(fk.FedkeelError, match="it is not known whose examples these are"):
        model.predict("south.csv")
    with pytest.raises(fk.FedkeelError, match="no client 'east'"):
        model.predict("south.csv", client="east")
    found = model.predict("south.csv", client="south").labels
    assert found == model.predict("test.csv").labels[1::2]


def test_a_frame_and_a_gap_that_training_filled(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    frame = pa.table({"age": [61.5, 48.0], "sex": ["m", "x"], "dose": [None, 2.0]})
    model = load("standardize")
    found = model.predict(frame)
    assert len(found) == 2
    assert ["'x', in 1 of 2 rows" in text for text in found.warnings] == [True]
    without = pa.table({"age": [61.5], "sex": ["m"]})
    assert "no column 'dose'" in model.predict(without).warnings[0]
    assert torch.allclose(model.predict(without).scores, found.scores[:1])


@pytest.fixture(scope="module")
def strict(folder: Path) -> TrainedModel:
    """A model of a table without gaps, where none may be."""
    write(folder / "whole.csv", patients(60, 2, gaps=False))
    text = EXPERIMENT.replace("NORMALIZE", "standardize").replace('missing = "MISSING"\n', "")
    text = text.replace("train.csv", "whole.csv").replace('test = "test.csv"\n', "")
    (folder / "strict.toml").write_text(text, encoding="utf-8")
    assert call("run", "strict.toml", "--out", "strict", "-q", "-s", "rounds=1").code == 0
    return fk.load("strict")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"age": 1, "sex": "f"}], "no column 'dose'"),
        ([{"age": 1, "sex": "f", "dose": ""}, {"age": 1, "sex": "f", "dose": 2}], "has a gap"),
        ([{"age": 1, "sex": "x", "dose": 2}], "a category that is not known"),
        ([{"age": "old", "sex": "f", "dose": 2}], "holds text"),
        ([{"age": "inf", "sex": "f", "dose": 2}], "not finite"),
    ],
)
def test_rows_that_do_not_fit(
    folder: Path, strict: TrainedModel, rows: list[dict[str, object]], message: str
) -> None:
    write(folder / "odd.csv", rows)
    with pytest.raises(fk.FedkeelError, match=message):
        strict.predict("odd.csv")


def test_inputs_of_another_shape(strict: TrainedModel) -> None:
    with pytest.raises(fk.FedkeelError, match="another shape"):
        strict.predict(np.zeros((2, 3)))  # there are four: f, m are two


def test_a_run_from_python_needs_its_class(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(5.0, 3.0, size=(60, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    model = nn.Linear(3, 1)
    result = fk.run(
        "fedavg",
        task=fk.Task(model, loss="mse"),
        clients=fk.from_clients(
            {"a": (x[:30], y[:30]), "b": (x[30:], y[30:])}, normalize="standardize"
        ),
        test=(x, y),
        rounds=2,
        local=fk.Local(lr=0.1, epochs=1, batch_size=10),
        out=tmp_path / "run",
    )
    with pytest.raises(fk.FedkeelError, match="made in Python"):
        fk.load(tmp_path / "run")
    found = fk.load(tmp_path / "run", model=nn.Linear(3, 1)).predict(x)
    assert found.probabilities is None
    error = ((found.values.numpy() - y.astype(np.float32)) ** 2).mean()
    assert error == pytest.approx(result.rows[-1].test["loss"], rel=1e-5)
    with pytest.raises(fk.FedkeelError, match="does not fit Linear"):
        fk.load(tmp_path / "run", model=nn.Linear(3, 2))


def test_images_of_a_folder_without_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for label, shade in (("dark", 60), ("light", 190)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(20):
            pixels = random.normal(shade, 20, size=(6, 6)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i}.png")
    assert call("new", "shades", "--data", "images").code == 0
    done = call("run", "shades.toml", "-q", "-s", "rounds=6", "--json")
    assert done.json["last"] == 1.0, done.err
    answers = call("predict", "runs/shades", "images", "--json").json
    assert len(answers) == 40
    assert all(Path(row["file"]).parent.name == row["prediction"] for row in answers)
    one = call("predict", "runs/shades", "images/light/3.png", "--json").json
    assert [row["prediction"] for row in one] == ["light"]
    Image.new("L", (9, 12)).save("large.png")
    done = call("predict", "runs/shades", "large.png")
    assert "large.png: one image of 12 x 9 pixels was resized to 6 x 6, the size of the" in done.err


class Mask(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 1, 3, padding=1)


@pytest.mark.parametrize("normalize", ["none", "standardize", "pixels"])
def test_images_and_masks_in_another_unit_or_size_are_told(tmp_path: Path, normalize: str) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    x = random.integers(0, 256, (24, 3, 12, 12)).astype(np.float32) / 255
    y = (x[:, 0] > 0.5).astype(np.int64)
    clients = fk.from_clients({"a": (x[:12], y[:12]), "b": (x[12:], y[12:])}, normalize=normalize)
    fk.run(
        "fedavg",
        task=fk.Task(Mask, loss="bce", metrics=["dice"]),
        clients=clients,
        test=(x, y),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1, batch_size=10),
        engine=fk.Engine(kind="sequential"),
        out=tmp_path / "run",
        progress=False,
    )
    model = load(tmp_path / "run", model=Mask)
    new = random.integers(0, 256, (5, 3, 12, 12)).astype(np.float32) / 255
    assert model.predict(new).warnings == ()
    for odd in (new * 255, (new * 255).astype(np.uint8), new / 255, new * 0):
        (told,) = model.predict(odd).warnings
        assert "see whether the values and their unit are right" in told
        assert ("the training had 0 to 1" in told) == (normalize != "pixels")
    np.savez(tmp_path / "large.npz", x=new * 255)
    assert len(model.predict(tmp_path / "large.npz").warnings) == 1

    Image.new("RGB", (30, 20)).save(tmp_path / "large.png")
    with pytest.raises(fk.FedkeelError, match="the masks would not fit the images") as error:
        model.predict(tmp_path / "large.png")
    assert "one image of 20 x 30 pixels" in str(error.value)
    assert "expected images of 12 x 12 pixels" in str(error.value)


def test_numbers_without_names_in_another_unit_are_told(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform([50, 1, 0], [600, 2, 0], (30, 3))
    model = of_arrays(tmp_path, Three, x, tokens=False)
    assert model.predict(x[:5]).warnings == ()
    (told,) = model.predict(x[:5] / 38).warnings
    assert "input 0 (counted from 0) and 1 more hold values unlike those of the training" in told
    assert (
        model.predict(x[:1] + np.array([0, 3, 0])).warnings == ()
    )  # pixels vary little, and may do so
    (told,) = model.predict(x[:1] + np.array([900, 0, 0])).warnings
    assert "input 0 (counted from 0) holds" in told


class Three(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)


def test_what_is_no_file_of_the_kind_that_a_model_takes(folder: Path, strict: TrainedModel) -> None:
    (folder / "tab.tsv").write_text("age\tsex\n", encoding="utf-8")
    for path, got in (("tab.tsv", "a file that ends in '.tsv'"), ("strict", "a folder")):
        done = call("predict", "strict", path)
        assert done.err.startswith(
            f"DataError: {path} is not a .csv or .parquet file.\n  got {got}"
        )
    assert "There is no file 'none.tsv'" in call("predict", "strict", "none.tsv").err


def test_a_run_without_a_model_is_not_said_to_go_on(folder: Path, strict: TrainedModel) -> None:
    """One that was killed leaves the status of one at work."""
    shutil.copytree("strict", "killed")
    values = json.loads(Path("killed/run.json").read_text("utf-8"))
    values = {key: value for key, value in values.items() if key != SEAL} | {"status": "running"}
    Path("killed/run.json").write_text(json.dumps(values), encoding="utf-8")
    Path("killed/model.safetensors").unlink()
    done = call("predict", "killed", "test.csv")
    assert "got no model.safetensors; the run has not ended\n  do   fedkeel run killed" in done.err


def test_what_is_no_finished_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(fk.FedkeelError, match="not a run folder"):
        load(tmp_path)
    with pytest.raises(fk.FedkeelError, match="There are two models"):
        load("strict", which="first")
    assert call("run", "strict.toml", "--out", "alone", "-q", "-s", "method=local").code == 0
    with pytest.raises(fk.FedkeelError, match="no single model"):
        load("alone")
    shutil.copytree("strict", "changed")
    (folder / "changed" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(fk.FedkeelError, match="has changed since"):
        load("changed")
    shutil.copytree("strict", "damaged")
    (folder / "damaged" / "config.toml").write_text("rounds = ", encoding="utf-8")
    with pytest.raises(fk.FedkeelError, match=r"config\.toml"):
        load("damaged")
    done = call("predict", "standardize", "test.csv", "--out", "nowhere/answers.csv")
    assert (done.code, "cannot be written" in done.err) == (2, True)


def test_a_program_for_torch_takes_inputs_as_they_are(folder: Path, strict: TrainedModel) -> None:
    path = strict.export(folder / "model.pt2")
    about = {"fedkeel.json": ""}
    program = torch.export.load(path, extra_files=about)
    assert json.loads(json.loads(about["fedkeel.json"])["columns"]) == [
        *("age", "sex=f", "sex=m", "dose")
    ]
    x = torch.tensor([[61.0, 0.0, 1.0, 3.5], [45.0, 1.0, 0.0, 2.0], [80.0, 1.0, 0.0, 2.5]])
    expected = strict.predict(x.numpy()).scores
    assert torch.allclose(program.module()(x), expected, atol=1e-5)
    with pytest.raises(fk.FedkeelError, match="not written as"):
        strict.export(folder / "model.h5")


def test_rows_with_gaps_are_made_inputs_as_the_guide_says(folder: Path) -> None:
    """By the texts in the file alone, without fedkeel."""
    done = call("export", "standardize", "gaps.pt2")
    assert done.code == 0, done.err
    told = "2 columns of numbers + one column of 2 categories + one gap indicator"
    assert f"needs 5 inputs: {told}, in the order of its 'schema'" in done.err
    page = Path(__file__).parents[3] / "docs" / "getting-started" / "own-data.md"
    names: dict[str, Any] = {}
    source = page.read_text("utf-8").split("```python\ndef inputs_of", 1)[1].split("```", 1)[0]
    exec(f"def inputs_of{source}", names)
    about = {"fedkeel.json": ""}
    program = torch.export.load("gaps.pt2", extra_files=about)
    schema = json.loads(json.loads(about["fedkeel.json"])["schema"])
    with Path("test.csv").open(encoding="utf-8") as file:
        x = torch.tensor([names["inputs_of"](row, schema) for row in csv.DictReader(file)])
    expected = load("standardize").predict("test.csv").scores
    assert torch.allclose(program.module()(x), expected, atol=1e-5)


class Ward(nn.Module):
    """Three measures, and the number of the ward, which has an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.ward, self.out = nn.Embedding(7, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([x[:, :3], self.ward(x[:, 3].long())], dim=1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x).flatten(1))


class Branching(Words):
    """Takes its branch when it is traced: on zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        return 2.0 * scores if torch.compiler.is_compiling() else scores


def of_arrays(folder: Path, net: type[nn.Module], x: Any, tokens: bool) -> TrainedModel:
    """A run on 30 examples."""
    y = np.arange(30) % 3
    fk.run(
        "fedavg",
        task=fk.Task(net),
        clients=fk.iid(x, y, clients=2, tokens=tokens),
        test=(x, y),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1, batch_size=10),
        engine=fk.Engine(kind="sequential"),
        out=folder,
        progress=False,
    )
    return load(folder, model=net)


def test_a_program_takes_inputs_of_the_type_that_was_trained_on(tmp_path: Path) -> None:
    """Whatever layers the module has: an embedding does not make a table one of tokens."""
    random = np.random.default_rng(0)
    table = random.normal(size=(30, 4)).astype(np.float32)
    table[:, 3] = random.integers(0, 7, 30)
    words = random.integers(0, 9, (30, 5))
    for net, x, tokens in ((Ward, table, False), (Words, words, True)):
        model = of_arrays(tmp_path / net.__name__, net, x, tokens)
        assert model.record.data.types == {"": "int64" if tokens else "float32"}
        program = torch.export.load(model.export(tmp_path / f"{net.__name__}.pt2")).module()
        given = torch.tensor(x)
        torch.testing.assert_close(program(given), model.predict(x).scores)
    # a folder of before does not say
    data = replace(model.record.data, types={})
    older = replace(model, preparation=InputPreparation.of(data, None, torch.float32))
    with pytest.warns(UserWarning, match="does not say of what type its inputs were"):
        program = torch.export.load(older.export(tmp_path / "older.pt2")).module()
    torch.testing.assert_close(program(given), model.predict(x).scores)


def test_a_file_that_answers_otherwise_than_the_model_is_not_kept(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 9, (30, 5))
    model = of_arrays(tmp_path / "run", Branching, words, tokens=True)
    with pytest.raises(fk.FedkeelError, match="would answer otherwise than the model"):
        model.export(tmp_path / "model.pt2")
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize(
    ("results", "difference"),
    [
        ([torch.ones(3, 2)], "one output, and 2 of the model"),
        ([torch.ones(3, 2), torch.ones(3)], r"the shape \[3\], and \[3, 1\] of the model"),
        ([torch.ones(3, 2) * torch.nan, torch.ones(3, 1)], "answers that differ by nan"),
        ([torch.ones(3, 2) * 1.01, torch.ones(3, 1)], "answers that differ by 0.01"),
        ([torch.ones(3, 2) * 1.0001, torch.ones(3, 1)], ""),
    ],
)
def test_what_a_file_answers_is_compared(results: list[torch.Tensor], difference: str) -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones(3, 2), torch.ones(3, 1)]

    def check() -> None:
        export._check_answers(model, lambda x: results, [torch.ones(3)], Path("model.pt2"))

    if not difference:
        check()
        return
    with pytest.raises(ModelError, match="would answer otherwise than the model") as caught:
        check()
    assert re.fullmatch(difference, str(caught.value.got))


def test_the_same_gaps_are_the_same_answers() -> None:
    gaps = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    export._check_answers(lambda x: gaps, lambda x: [gaps.clone()], [gaps], Path("model.pt2"))


def test_a_file_that_cannot_be_tried_is_said_once() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise IndexError("no such row")

    with pytest.warns(
        UserWarning, match=r"model\.pt2 answers .* is not known: .*no such row"
    ) as told:
        export._check_answers(fails, lambda x: [], [torch.ones(3)] * 2, Path("model.pt2"))
    assert len(told) == 1


def test_one_of_several_inputs_is_given_in_the_type_of_the_training(tmp_path: Path) -> None:
    class Two(Words):
        def forward(self, ids: torch.Tensor, dose: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * dose[:, None]

    random = np.random.default_rng(0)
    x = {"ids": random.integers(0, 9, (30, 5)), "dose": random.random(30).astype(np.float32)}
    model = of_arrays(tmp_path / "run", Two, x, tokens=False)
    assert model.record.data.types == {"ids": "int64", "dose": "float32"}
    given = {"ids": x["ids"].astype(np.float32), "dose": np.ones(30, np.int64)}
    same = {"ids": x["ids"], "dose": np.ones(30, np.float32)}
    torch.testing.assert_close(model.predict(given).scores, model.predict(same).scores)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_nothing_of_other_packages_is_printed(
    folder: Path, strict: TrainedModel, suffix: str
) -> None:
    """In a process of its own: a logger remembers what it has said."""
    if suffix == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
    done = subprocess.run(
        [sys.executable, "-m", "fedkeel", "export", "strict", f"quiet.{suffix}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(fk.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    needs = "needs 4 inputs: 2 columns of numbers + one column of 2 categories"
    assert done.stdout == ""
    assert done.stderr == f"wrote quiet.{suffix}\n{needs}, in the order of its 'schema'\n"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_answers_the_same(folder: Path, strict: TrainedModel) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(strict.export(folder / "model.onnx"))
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["label_names"]) == ["ill", "well"]
    x = torch.tensor([[61.0, 0.0, 1.0, 3.5], [45.0, 1.0, 0.0, 2.0], [80.0, 1.0, 0.0, 2.5]])
    (scores,) = ReferenceEvaluator(model).run(None, {"inputs": x.numpy()})
    assert np.allclose(scores, strict.predict(x.numpy()).scores.numpy(), atol=1e-5)
