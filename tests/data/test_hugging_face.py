"""Data sets of Hugging Face that a test has written, text, its networks, and adapters."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import fedkeel as fk
from fedkeel import config
from fedkeel.data.read.hugging_face import load_tokenizer
from fedkeel.errors import ConfigError, DataError, ModelError
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.task.models import make

WORDS = ("calm", "good", "fine", "bad", "sharp", "ill")
TINY = {
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # of peft
]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of short notes of two hospitals, and a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("notes")
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 40), ("test", 20)):
        labels = random.integers(0, 2, size=count)
        words = [
            random.choice(WORDS[3 * y : 3 * y + 3], size=1 + i % 6) for i, y in enumerate(labels)
        ]
        splits[split] = datasets.Dataset.from_dict(
            {
                "note": [" ".join(line) for line in words],
                "hospital": [("north", "south")[i % 2] for i in range(count)],
                "label": labels.tolist(),
            }
        ).cast_column("label", datasets.ClassLabel(names=["well", "ill"]))
    datasets.DatasetDict(splits).save_to_disk(folder / "data")
    ids = {"[PAD]": 0, "[UNK]": 1, **{word: 2 + i for i, word in enumerate(WORDS)}}
    whole = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8
    )
    fast.save_pretrained(folder / "tokenizer")
    return folder


def experiment(notes: Path, **model: object) -> config.Experiment:
    values = {
        "rounds": 2,
        "data": {
            "source": f"hf:{notes / 'data'}",
            "client": "hospital",
            "text": {"tokenizer": str(notes / "tokenizer"), "length": 6},
        },
        "partition": {"kind": "client"},
        "model": {"name": "hf:bert", "args": {"config": TINY}, **model},
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 10},
        "engine": {"kind": "sequential"},
    }
    return config.build(config.Experiment, values, "test")


def test_an_experiment_file_trains_adapters_of_a_network_on_text(notes: Path) -> None:
    lora = {"rank": 2, "layers": ["query", "value"], "train": ["classifier"]}
    settings = experiment(notes, lora=lora)
    ingredients = gather(settings)
    assert ingredients.test.label_names == ("well", "ill")
    x = ingredients.test.x
    assert isinstance(x, dict)
    first = datasets.load_from_disk(notes / "data")["test"][0]["note"].split()
    assert x["input_ids"][0].tolist()[: len(first)] == [2 + WORDS.index(word) for word in first]
    assert x["attention_mask"][0].sum() == len(first)
    assert x["input_ids"].shape == (20, 6)

    result = start(prepare(settings, ingredients))
    assert result.record.partition.names == ["north", "south"]
    adapters = 2 * (2 * 8 + 8 * 2)  # of query and value: A [2, 8] and B [8, 2]
    classifier = 8 * 2 + 2
    assert sum(t.numel() for t in result.params.values()) == adapters + classifier
    assert sum(result.rows[1].bytes_up.values()) == 2 * 4 * (adapters + classifier)
    assert result.last > result.scores()[0][1] - 0.2
    (warning,) = (text for text in result.record.warnings if "adapters" in text)
    assert "random and frozen, base_model.model.bert.embeddings.word_embeddings.weight" in warning
    before = prepare(settings, ingredients).server.params
    assert any(not torch.equal(before[name], result.params[name]) for name in before)
    assert result.record.key == prepare(settings, gather(settings)).key


def test_a_column_a_partition_or_a_partitioner_divides(notes: Path) -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(30, 4)).astype("float32"), random.integers(0, 3, size=30)
    table = datasets.Dataset.from_dict(
        {**{f"x{i}": x[:, i] for i in range(4)}, "y": y, "site": (np.arange(30) % 3).tolist()}
    )
    by_site = fk.from_hf(table, client="site")
    assert by_site.names == ("0", "1", "2")
    for k in range(3):
        rows = by_site.client(k)
        assert rows.tolist() == list(range(k, 30, 3))
    assert torch.equal(by_site.data.x, torch.from_numpy(x))

    split = {"kind": "dirichlet", "clients": 3, "alpha": 0.5}
    drawn = fk.from_hf(table, partition=split, drop=["site"], seed=3)
    same = fk.dirichlet(x, y, clients=3, alpha=0.5, seed=3)
    assert [drawn.client(k).tolist() for k in range(3)] == [
        same.client(k).tolist() for k in range(3)
    ]

    text = fk.from_hf(str(notes / "data"), client="hospital", tokenizer=str(notes / "tokenizer"))
    assert text.test is not None
    assert (len(text.test), text.data.x["input_ids"].shape) == (20, (40, 128))
    with pytest.raises(ConfigError, match="not clear how the data set is divided"):
        fk.from_hf(table)


def test_a_table_to_test_on_is_made_ready_as_the_training_table() -> None:
    train = {"age": [1.0, None, 3.0, 5.0], "sex": ["f", "m", "x", "f"], "y": ["ill", "well"] * 2}
    test = {"age": [None, 10.0], "sex": ["x", "m"], "y": ["well", "well"]}
    splits = {
        name: datasets.Dataset.from_dict({**columns, "site": [0, 1] * (len(columns["y"]) // 2)})
        for name, columns in (("train", train), ("test", test))
    }
    clients = fk.from_hf(
        datasets.DatasetDict(splits), client="site", categories=["sex"], missing="mean"
    )
    assert clients.test is not None
    assert clients.test.columns == clients.data.columns == ("age", "sex=f", "sex=m", "sex=x")
    assert clients.test.x.tolist() == [[3.0, 0.0, 0.0, 1.0], [10.0, 0.0, 1.0, 0.0]]
    assert clients.test.y.tolist() == [1, 1]
    assert clients.test.label_names == ("ill", "well")


def test_a_setting_for_other_sources_is_refused(notes: Path) -> None:
    settings = experiment(notes)
    data = settings.data.model_copy(update={"normalize": "standardize"})
    with pytest.raises(DataError, match=r"data\.normalize is not for"):
        gather(settings.model_copy(update={"data": data}))


def test_a_partitioner_of_flwr_datasets_is_taken_as_it_is(notes: Path) -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    whole = datasets.load_from_disk(notes / "data")
    clients = fk.from_hf(
        whole,
        partitioner=partitioners.NaturalIdPartitioner(partition_by="hospital"),
        tokenizer=str(notes / "tokenizer"),
        drop=["hospital"],
    )
    hospitals = np.asarray(whole["train"]["hospital"])
    assert [set(hospitals[clients.client(k)]) for k in range(2)] == [{"north"}, {"south"}]


def test_trained_weights_are_taken_from_a_folder(notes: Path, tmp_path: Path) -> None:
    made = make("hf:bert", (), 2, {"config": TINY})
    made.save_pretrained(tmp_path / "bert")
    read = make(f"hf:{tmp_path / 'bert'}", (), 2)
    assert isinstance(read, nn.Module)
    assert all(torch.equal(read.state_dict()[k], v) for k, v in made.state_dict().items())


FOREIGN = """\
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

class Config(BertConfig):
    model_type = "foreign"

class Net(BertForSequenceClassification):
    config_class = Config

class Words(BertTokenizerFast):
    pass
"""


class Touching:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return Path.touch, (self.marker,)


def test_code_that_comes_with_weights_is_never_run(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor asked about: transformers would ask whoever sits at the terminal."""
    monkeypatch.setattr("builtins.input", lambda text="": "y")
    marker, folder = tmp_path / "marker", tmp_path / "net"
    make("hf:bert", (), 2, {"config": TINY}).save_pretrained(folder)  # type: ignore[operator]
    (folder / "foreign.py").write_text(FOREIGN.format(marker=str(marker)))
    file, classes = folder / "config.json", "AutoModelForSequenceClassification"
    own = json.loads(file.read_text())
    named = {"AutoConfig": "foreign.Config", classes: "foreign.Net"}
    file.write_text(json.dumps({**own, "model_type": "foreign", "auto_map": named}))
    with pytest.raises(ModelError, match="transformers cannot make it"):
        make(f"hf:{folder}", (), 2)
    fresh = {"config": {**TINY, "auto_map": {classes: f"{folder}--foreign.Net"}}}
    assert make("hf:bert", (), 2, fresh).__class__.__module__.startswith("transformers.")
    words = Path(shutil.copytree(notes / "tokenizer", tmp_path / "words"))
    shutil.copy(folder / "foreign.py", words)
    settings = json.loads((words / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Words", "auto_map": {"AutoTokenizer": [None, "foreign.Words"]}}
    (words / "tokenizer_config.json").write_text(json.dumps(settings))
    with suppress(DataError):
        load_tokenizer(str(words))
    assert not marker.exists()


def test_pickled_weights_are_read_as_tensors_only(tmp_path: Path) -> None:
    folder, marker = tmp_path / "net", tmp_path / "marker"
    make("hf:bert", (), 2, {"config": TINY}).save_pretrained(folder)  # type: ignore[operator]
    (folder / "model.safetensors").unlink()
    torch.save({"classifier.bias": Touching(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="transformers cannot make it"):
        make(f"hf:{folder}", (), 2)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["hf-hub:somebody/net", "local-dir:net", "somebody/net"])
def test_weights_that_timm_does_not_list_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="that timm itself lists"):
        make(f"timm:{name}", (3, 32, 32), 10)
    for word in ("checkpoint_path", "pretrained_cfg_overlay"):
        with pytest.raises(ModelError, match="that timm itself lists"):
            make("timm:resnet18", (3, 32, 32), 10, {word: "weights.pth"})


def test_what_is_not_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="needs the package 'timm'"):
        make("timm:resnet18", (3, 32, 32), 10)
    with pytest.raises(ModelError, match="there is no task 'translate'"):
        make("hf:bert", (), 2, {"task": "translate", "config": TINY})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        fk.from_hf(str(tmp_path / "empty"), client="site")


def test_a_class_that_one_split_lacks() -> None:
    """Labels of both splits are numbered alike, by their names."""

    def split(*names: str) -> datasets.Dataset:
        columns = {
            "x": [[[float(i), 1.0]] for i in range(12)],  # no table
            "label": [i % len(names) for i in range(12)],
        }
        data = datasets.Dataset.from_dict(columns)
        return data.cast_column("label", datasets.ClassLabel(names=list(names)))

    def labels(train: datasets.Dataset, test: datasets.Dataset) -> list[str]:
        both = datasets.DatasetDict({"train": train, "test": test})
        clients = fk.from_hf(both, partition={"kind": "iid", "clients": 2})
        assert clients.test is not None
        assert clients.data.label_names == clients.test.label_names == ("a", "b", "c")
        assert clients.data.classes == clients.test.classes == 3
        return [clients.test.label_names[label] for label in clients.test.labels]

    assert labels(split("a", "b", "c"), split("b", "a")) == ["b", "a"] * 6
    assert labels(split("a", "b", "c"), split("c", "a", "b")) == ["c", "a", "b"] * 4
    with pytest.raises(DataError, match="holds a label that is not known") as error:
        labels(split("a", "b"), split("a", "b", "c"))
    assert "leave out examples with this label" in str(error.value)
