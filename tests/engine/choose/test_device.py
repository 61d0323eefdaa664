"""Where clients train, as far as that can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.base import TrainingSetup
from fedkeel.engine.choose.device import choose_device, device_error
from fedkeel.engine.prepared import Ingredients
from fedkeel.errors import RunError
from fedkeel.runner.prepare import prepare

AUTO, CUDA = fk.Engine(), fk.Engine(kind="vectorized", device="cuda")


def setup(loss: object = None) -> TrainingSetup:
    data = fk.dataset(torch.randn(12, 3), torch.arange(12) % 2)
    task = fk.Task(lambda: nn.Linear(3, 2), **({"loss": loss} if loss else {}))
    settings = config.Run(method="fedavg", rounds=1, local=fk.Local(lr=0.1, epochs=1, batch_size=4))
    federation = fk.federation(data, [torch.arange(12).numpy()])
    return prepare(settings, Ingredients(task, lambda _: federation, data, "net")).setup


def on_the_processor(logits: Tensor, y: Tensor) -> Tensor:
    """Its table is not made where the scores are."""
    table = torch.zeros(len(y), 2).index_add_(0, y * 0, logits)
    return nn.functional.cross_entropy(logits + table, y, reduction="none")


def test_a_loss_that_makes_tensors_on_the_processor_is_found_out() -> None:
    elsewhere = torch.device("meta")
    assert device_error(setup(), elsewhere) == ""
    assert "same device" in device_error(setup(on_the_processor), elsewhere)


def test_a_model_that_does_not_run_on_a_gpu_is_trained_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "it is said why")
    assert choose_device(AUTO, setup()) == (
        "cpu",
        ["clients are not trained on the GPU: it is said why"],
    )
    assert choose_device(fk.Engine(device="cpu"), setup()) == ("cpu", [])
    with pytest.raises(RunError, match=r"(?s)does not run on a GPU.*it is said why.*x.device"):
        choose_device(CUDA, setup())
    monkeypatch.setattr("fedkeel.engine.choose.device.device_error", lambda *_: "")
    assert choose_device(AUTO, setup()) == ("cuda", [])


def test_no_gpu_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(AUTO, setup()) == ("cpu", [])
    with pytest.raises(RunError, match="no GPU that torch can use"):
        choose_device(CUDA, setup())
