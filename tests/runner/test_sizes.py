"""Sizes beyond memory are refused in words, before anything of that size is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel.config import load
from fedkeel.data.read import inputs as loading
from fedkeel.errors import CompositionError, ConfigError, DataError, FedkeelError, ModelError
from fedkeel.runner import batch_checks
from fedkeel.runner.ingredients import gather
from fedkeel.runner.prepare import prepare
from fedkeel.task import models
from fedkeel.task.models import make

EXPERIMENT = """\
rounds = 1
[data]
source = "digits"
limit = 40
[partition]
clients = 4
[model]
name = "mlp"
[local]
lr = 0.1
epochs = 1
"""


def check(path: Path, settings: tuple[str, ...]) -> None:
    experiment = load(path, settings)
    prepare(experiment, gather(experiment))


def refusal(folder: Path, *settings: str) -> FedkeelError:
    path = folder / "try.toml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    with pytest.raises(FedkeelError) as caught:
        check(path, settings)
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        (["local.epochs=1_000_000_000_000"], ConfigError, "lower local.epochs"),
        (["local.epochs=unset", "local.steps=9_000_000_000_000_000_000"], ConfigError, "steps"),
        (["data.shape=[3, 1_000_000, 1_000_000]"], DataError, "data.shape"),
        (["data.shape=[1_000_000_000_000, 8, 8]"], DataError, "data.shape"),
        (["model.args.hidden=[1_000_000_000_000]"], ModelError, "smaller"),
        (["model.args.hidden=[1_000_000, 1_000_000]"], ModelError, "smaller"),
        (["model.args.hidden=[9_000_000_000_000_000_000]"], ModelError, "mlp"),
        (["model.name=vit", "model.args={depth=1_000_000_000}"], ModelError, "at most 1000"),
        (["model.name=vit", "model.args={width=3_000_000}"], ModelError, "smaller"),
        (["engine.memory_gb=1e300"], ConfigError, "less than or equal"),
        ([f"method=topk(fraction={'9' * 400})"], CompositionError, "64 bits"),
        ([f"method=fedprox(mu={'9' * 5000})"], CompositionError, "a number"),
        ([f"method=fedprox(mu={'-' * 5000}1)"], CompositionError, "a number"),
        ([f"data.source={'a' * 300}.csv"], DataError, "no file or folder"),
        ([f"model.name={'a' * 3000}"], ModelError, "there is no model"),
        (["partition.clients=1_000_000_000_000"], DataError, "1..40"),
        (["cohort.clients=1_000_000_000_000"], ConfigError, "1..4"),
    ],
)
def test_sizes_beyond_memory(
    tmp_path: Path, settings: list[str], kind: type[FedkeelError], says: str
) -> None:
    error = refusal(tmp_path, *settings)
    assert isinstance(error, kind)
    assert says in str(error)


def test_the_bound_is_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mlp of 64, 64 and 10 units has 4,810 parameters; 397 images are tested."""
    numbers = 64 * 65 + 65 * 10
    monkeypatch.setattr(models, "free_memory", lambda: 4 * 4 * numbers - 1)
    assert f"{numbers:,} parameters" in str(refusal(tmp_path).got)
    monkeypatch.setattr(models, "free_memory", lambda: 4 * 4 * numbers)
    make("mlp", (64,), 10)
    monkeypatch.setattr(loading, "free_memory", lambda: 10_000)
    assert "of shape" in str(refusal(tmp_path).got)
    monkeypatch.setattr(loading, "free_memory", lambda: None)
    monkeypatch.setattr(batch_checks, "free_memory", lambda: 2 * (200 + 8 * 10) - 1)
    assert str(refusal(tmp_path).got).startswith("one step for 10 examples")


def test_counting_parameters_draws_no_numbers() -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(6, 4)
    torch.manual_seed(0)
    again = make("logistic", (6,), 4)
    for ours, theirs in zip(again.parameters(), first.parameters(), strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(ours, theirs)
