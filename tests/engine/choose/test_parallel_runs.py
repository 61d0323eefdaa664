"""How many runs train side by side: as many as fit, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.engine.choose import parallel_runs
from fedkeel.engine.choose.memory import estimate_run
from fedkeel.engine.choose.parallel_runs import DifferingNumbers, with_parallel_runs
from fedkeel.engine.prepared import Ingredients, Prepared
from fedkeel.records.run_record import EngineChoice
from fedkeel.runner.prepare import prepare
from toys import federation, held

CHOICE = EngineChoice(kind="vectorized", workers=1, parallel_clients=4, device="cpu")


def ready(method: str, model: Any = None, **engine: Any) -> Prepared:
    settings = config.Run(
        method=method,
        rounds=50,
        local=fk.Local(lr=0.1, epochs=3, batch_size=2),
        cohort=fk.Cohort(clients=3),
        engine=fk.Engine(kind="vectorized", workers=1, **engine),
    )
    data = federation()
    model = model or (lambda: nn.Sequential(nn.Flatten(), nn.Linear(data.data.x[0].numel(), 3)))
    return prepare(settings, Ingredients(fk.Task(model), lambda seed: data, held(), "small"))


def chosen(run: Prepared, choice: EngineChoice = CHOICE) -> int | None:
    return with_parallel_runs(choice, run, DifferingNumbers()).parallel_runs


def state_of(run: Prepared) -> int:
    """The bytes that clients and server of one run keep."""
    estimate = estimate_run(run)
    return estimate.client_state * estimate.clients + estimate.server_state


def test_the_state_of_all_runs_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ready("scaffold")
    assert state_of(run) > 0
    assert (chosen(run) or 0) > 3
    for fitting in (3, 2):
        monkeypatch.setattr(parallel_runs, "COMFORTABLE_BYTES", fitting * state_of(run) + 1)
        assert chosen(run) == fitting
    for bound in (2 * state_of(run) - 1, 1):
        monkeypatch.setattr(parallel_runs, "COMFORTABLE_BYTES", bound)
        assert chosen(run) is None


def test_what_keeps_nothing_or_keeps_it_on_disk_is_not_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = chosen(ready("scaffold"))
    monkeypatch.setattr(parallel_runs, "COMFORTABLE_BYTES", 100)
    assert state_of(ready("fedavg")) == 0
    assert (chosen(ready("fedavg")) or 0) > 3
    on_disk = ready("scaffold", state="disk")
    assert estimate_run(on_disk).state == "disk"
    assert chosen(on_disk) == before


def test_large_models_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parameters of all their clients, whatever the method keeps."""
    run = ready("fedavg")
    entries = sum(t.numel() for t in run.setup.training.network.params.values())
    monkeypatch.setattr(parallel_runs, "GROUP_ENTRIES", 6 * entries)
    assert chosen(run) == 2  # of three clients each
    monkeypatch.setattr(parallel_runs, "GROUP_ENTRIES", 5 * entries)
    assert chosen(run) is None


def test_a_number_that_is_asked_for_is_taken() -> None:
    assert chosen(ready("fedavg", parallel_runs=5)) == 5
    assert chosen(ready("fedavg", parallel_runs=1)) in (None, 1)
