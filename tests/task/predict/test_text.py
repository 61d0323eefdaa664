"""New text is made tokens as that of the training, wherever it stands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fedkeel as fk
from commands import call
from fedkeel.errors import DataError
from fedkeel.records.files import SEAL
from fedkeel.task.predict.trained_model import TrainedModel

WORDS = ("calm", "good", "fine", "bad", "sharp", "ill")
NEW = ["good calm", "sharp ill bad", "fine"]
EXPERIMENT = """\
rounds = 20
[data]
source = "hf:./notes"
client = "hospital"
[data.text]
tokenizer = "./words"
length = 6
[partition]
kind = "client"
[model]
name = "hf:bert"
args = { config = { vocab_size = 8, hidden_size = 8, num_hidden_layers = 1, \
num_attention_heads = 2, intermediate_size = 16, max_position_embeddings = 8 } }
[local]
optimiser = "adamw"
lr = 0.02
epochs = 1
batch_size = 10
[engine]
kind = "sequential"
"""
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def write_data(folder: Path) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, size=60)
    notes = [" ".join(random.choice(WORDS[3 * y : 3 * y + 3], size=3)) for y in labels]
    columns = {"note": notes, "hospital": ["north", "south"] * 30, "label": labels.tolist()}
    data = datasets.Dataset.from_dict(columns)
    data = data.cast_column("label", datasets.ClassLabel(names=["well", "ill"]))
    data.save_to_disk(folder / "notes")
    ids = {"[PAD]": 0, "[UNK]": 1, **{word: 2 + i for i, word in enumerate(WORDS)}}
    whole = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "words")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedModel]:
    """A trained model; the current folder is that in which it was trained."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(folder)
        Path("e.toml").write_text(EXPERIMENT, encoding="utf-8")
        done = call("run", "e.toml", "--out", "run", "-q")
        assert done.code == 0, done.err
        yield fk.load("run")


def test_text_of_every_kind_gives_the_same_answers(model: TrainedModel) -> None:
    answers = model.predict(NEW)
    assert answers.labels == ["well", "ill", "well"]
    assert answers.others == {"note": NEW}
    table = {"id": [7, 8, 9], "note": NEW, "label": [0, 0, 0], "hospital": ["east"] * 3}
    data = datasets.Dataset.from_dict(table)
    data.save_to_disk("new")
    frame = pd.DataFrame(table)
    frame.to_csv("new.csv", index=False)
    frame.to_parquet("new.parquet", index=False)
    several = datasets.Dataset.from_dict({k: [*reversed(v)] for k, v in table.items()})
    given = (
        tuple(NEW),
        np.array(NEW),
        frame["note"],
        frame,
        table,
        data,
        datasets.DatasetDict({"test": data}),
        several.select([2, 1, 0]),
        "new",
        Path("new"),
        "hf:./new",
        "new.csv",
        "new.parquet",
    )
    for value in given:
        again = model.predict(value)
        assert again.scores.tolist() == answers.scores.tolist(), value
    assert again.others["id"] == ["7", "8", "9"]
    assert again.others["note"] == NEW

    done = call("predict", "run", "new.csv")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == (
        "id,note,label,hospital,prediction,probability well,probability ill"
    )
    assert [line.split(",")[4] for line in done.out.splitlines()[1:]] == answers.labels


def test_tokens_by_name_are_taken_as_they_are(model: TrainedModel) -> None:
    tokens = {"input_ids": np.array([[3, 2, 0, 0, 0, 0]]), "attention_mask": np.ones((1, 6), int)}
    tokens["attention_mask"][0, 2:] = 0
    assert model.predict(tokens).scores.tolist() == model.predict(NEW[:1]).scores.tolist()


def test_what_holds_no_text(model: TrainedModel, tmp_path: Path) -> None:
    for value in (np.zeros((3, 6)), {"note": ["good", None]}):
        with pytest.raises(DataError, match="does not hold text in every row"):
            model.predict(value)
    Path("net.npz").touch()
    for path in ("none.txt", "net.npz"):
        with pytest.raises(DataError, match="trained on text") as error:
            model.predict(path)
        assert "a list of texts" in str(error.value)
    two = {name: datasets.Dataset.from_dict({"note": ["bad"]}) for name in ("train", "test")}
    datasets.DatasetDict(two).save_to_disk("two")
    with pytest.raises(DataError, match="has several splits") as error:
        model.predict("two")
    assert "two/train" in str(error.value)
    assert model.predict("two/test").labels == ["ill"]


def test_the_column_of_text_is_that_of_the_training(model: TrainedModel) -> None:
    assert model.record.data.text_column == "note"
    both = model.predict({"comment": ["bad", "ill"], "note": ["good", "fine"]})
    assert (both.labels, both.warnings) == (["well", "well"], ())
    for columns in ({"id": [1]}, {"id": [1], "doctor": ["Miller"]}, {"text": ["bad"]}):
        with pytest.raises(DataError, match="has no column 'note', which held the text") as error:
            model.predict(columns)
        assert "call the column of text 'note'" in str(error.value)
    with pytest.raises(DataError, match=r"did you mean 'Note'\?"):
        model.predict({"Note": ["bad"]})


def test_a_run_that_does_not_record_the_column_of_text(model: TrainedModel) -> None:
    shutil.copytree("run", "earlier")
    values = json.loads(Path("earlier/run.json").read_text("utf-8"))
    del values["data"]["text_column"], values[SEAL]
    Path("earlier/run.json").write_text(json.dumps(values), encoding="utf-8")
    earlier = fk.load("earlier")
    one = earlier.predict({"id": [1], "words": ["bad"]})
    assert one.labels == ["ill"]
    assert "the text is taken from the column 'words'" in one.warnings[0]
    assert earlier.predict({"one": ["good"], "text": ["bad"]}).labels == ["ill"]
    Path("numbers.csv").write_text("id\n1\n2\n", encoding="utf-8")
    for value in ("numbers.csv", {"id": ["1"]}, {"one": ["good"], "two": ["bad"]}):
        with pytest.raises(DataError, match="which column holds the text"):
            earlier.predict(value)


def test_text_without_a_known_word_is_told(model: TrainedModel) -> None:
    (told,) = model.predict(["fine", "", "zzz qqq", "zzz bad"], name="new").warnings
    assert "new: the text is empty, or has only words that the tokenizer does not know" in told
    assert "in 2 of 4 rows, first in row 1 (counted from 0)" in told


def test_text_that_is_cut_is_told(model: TrainedModel) -> None:
    assert model.predict(["good bad"]).warnings == ()
    (told,) = model.predict(["good", "good bad " * 40], name="new").warnings
    assert "tokens or more in 1 of 2 rows: what is longer is cut" in told


def test_the_tokenizer_has_to_be_there(
    model: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = Path("run").absolute()
    monkeypatch.chdir(tmp_path)
    there = fk.load(run)
    with pytest.raises(DataError, match=r"The tokenizer '\./words'") as error:
        there.predict(NEW)
    assert "where the run was started" in str(error.value)
    shutil.copytree(run.parent / "words", "words")
    assert there.predict(NEW).labels == ["well", "ill", "well"]
