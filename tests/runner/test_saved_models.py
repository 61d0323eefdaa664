"""A saved model is loaded by what stands in run.json, as the documentation says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.prepared import Ingredients
from fedkeel.records.run_record import ModelRecord, RunRecord
from fedkeel.runner.prepare import prepare
from fedkeel.runner.start import start
from fedkeel.task.models import MODELS, make
from test_readme import block, page

IMAGES, CIFAR, MEDICAL = (1, 28, 28), (3, 32, 32), (3, 64, 64)
SLOW = pytest.mark.slow

CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("logistic", (1, 8, 8), {}),
    ("mlp", (6,), {"hidden": [8, 4]}),
    ("2nn", IMAGES, {}),
    ("mlp_gcfed", IMAGES, {}),
    ("tinynn", IMAGES, {"norm": "group"}),
    ("cnn_mcmahan", IMAGES, {}),
    ("cnn_gcfed", IMAGES, {}),
    ("cnn_fedgc", IMAGES, {"final_layer": False}),
    ("cnn_fedgh", CIFAR, {"dropout": 0.1, "relu_last": True}),
    ("cnn_fedreg", IMAGES, {}),
    ("cnn_fedreg_ct", (1, 128, 128), {"width": 2}),
    ("lenet5", CIFAR, {"norm": "none", "dropout": 0.0}),
    ("vgg11", CIFAR, {"width": 2}),
    ("lenet_dlg", (1, 12, 12), {}),
    ("vgg11_gradma", CIFAR, {"width": 2}),
    ("resnet20", (3, 16, 16), {"width": 4}),
    ("resnet18_gn", CIFAR, {"width": 4, "groups": 2}),
    ("resnet18", MEDICAL, {"width": 4}),
    ("fixup_resnet9", CIFAR, {"width": 4}),
    ("densenet121_gn", CIFAR, {"growth": 4}),
    ("vit", CIFAR, {"width": 12, "depth": 2, "heads": 2}),
    ("char_lstm", (5,), {"hidden": 8, "layers": 1, "vocabulary": 20}),
]
QUICK = ("logistic", "mlp", "tinynn", "cnn_fedgh", "lenet5", "vit", "char_lstm")


def test_every_named_model_is_tested() -> None:
    assert sorted(name for name, _, _ in CASES) == sorted(MODELS)


def finished(folder: Path, name: str, shape: tuple[int, ...], args: dict[str, Any]) -> Any:
    """Train a named model for one step, and return the run and its inputs."""
    random = np.random.default_rng(0)
    tokens = name == "char_lstm"
    x = random.integers(0, 20, (8, *shape)) if tokens else random.normal(size=(8, *shape))
    data = fk.dataset(x, np.arange(8) % 3, tokens=tokens)
    settings = config.build(
        config.Run,
        {
            "rounds": 1,
            "local": {"lr": 0.01, "steps": 1, "batch_size": 4},
            "engine": {"kind": "sequential"},
        },
        "test",
    )
    task = fk.Task(partial(make, name, data.shape, data.classes, args), buffers="average")
    clients = fk.federation(data, [np.arange(8)])
    made = Ingredients(task, lambda seed: clients, data, name, model_args=args)
    prepared = prepare(settings, made)
    return start(prepared, folder), prepared.setup.training.network, data.to(torch.float32).x


@pytest.mark.parametrize(
    ("name", "shape", "args"),
    [pytest.param(*case, marks=() if case[0] in QUICK else SLOW, id=case[0]) for case in CASES],
)
def test_the_documented_lines_load_every_named_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    shape: tuple[int, ...],
    args: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    result, network, x = finished(Path("runs/run"), name, shape, args)
    lines = block("python", 1, page("own-data")).split("new = ")[0]
    names: dict[str, Any] = {}
    exec(lines, names)
    module = names["module"]
    buffers = {**network.buffers, **result.buffers}
    with torch.no_grad():
        expected = network.logits(result.params, network.copy_buffers(buffers), x, train=False)
        assert torch.equal(module(x), expected)
    assert not module.training


def test_the_arguments_are_recorded_and_older_records_are_read(tmp_path: Path) -> None:
    result, _, _ = finished(tmp_path, "mlp", (6,), {"hidden": [8, 4]})
    values = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert values["model"]["args"] == {"hidden": [8, 4]}
    assert result.record.model == ModelRecord("mlp", 107, 428, "fc3", {"hidden": [8, 4]})
    content = result.record.content()
    del values["model"]["args"]
    older = RunRecord.from_json(values)
    assert older.model.args == {}
    assert older.content() == content  # so that a comparison takes its finished runs


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [{"a": float("-inf")}], object()])
def test_arguments_that_no_file_can_hold_are_refused(value: object) -> None:
    with pytest.raises(fk.FedkeelError, match="the argument 'x' is"):
        config.Model(name="mlp", args={"x": value})


def test_dates_are_no_arguments(tmp_path: Path) -> None:
    with pytest.raises(fk.FedkeelError, match="the argument 'x' is"):
        config.build(config.Model, config.toml.parse("name='m'\nargs={x=1979-05-27}", "t"), "t")
