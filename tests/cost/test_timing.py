"""What engines take, which `auto` chooses by."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.cost import timing as module
from fedkeel.cost.timing import SEQUENTIAL
from fedkeel.engine.base import ClientJob, TrainingSetup
from fedkeel.engine.prepared import Ingredients
from fedkeel.engine.trainer import SequentialTrainer
from fedkeel.engine.vectorized.facts import establish
from fedkeel.method.context import Ints
from fedkeel.runner.prepare import prepare
from toys import four_each


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (0.6, {SEQUENTIAL: 0.068, 1: 0.034, 7: 0.0408, 20: 0.0408}),
        (0.25, {SEQUENTIAL: 0.068, 7: 0.017, 20: 0.017}),  # one lane never gets there
    ],
)
def test_engines_are_compared_by_the_same_work(
    lanes: float, expected: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [2, 2, 60, 38, 4, 90, 42, 40, 2, 60] * 4  # a mean of 34
    x = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(0))
    data = fk.dataset(x, torch.arange(len(x)) % 3)
    lists = np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    settings = four_each(40).settings.model_copy(update={"rounds": 30})
    task = fk.Task(lambda: nn.Linear(6, 3))
    prepared = prepare(settings, Ingredients(task, lambda _: fk.federation(data, lists), data, "n"))
    first = []

    def seconds(train: object, _: object, jobs: list[ClientJob], *__: object) -> float:
        first.append([sizes[job.client] for job in jobs][:3])
        each = (
            2e-3
            if isinstance(train, SequentialTrainer)
            else 1e-3
            if len(jobs) <= 3
            else lanes * 2e-3
        )
        return each * sum(sizes[job.client] for job in jobs) / len(jobs)

    monkeypatch.setattr(module, "_seconds", seconds)
    found = module.time_engines(prepared, 2, "cpu").seconds
    assert found == pytest.approx(expected)
    assert first[1] == [38, 38, 38]


def sizes_to_try(setup: TrainingSetup, per_round: int, workers: int, device: str) -> list[int]:
    return module._group_sizes(setup, per_round, workers, device, establish(setup).pads)


def forms(setup: TrainingSetup, clients: Ints, lanes: int = 1) -> int:
    return module._shape_count(setup, clients, establish(setup).pads, lanes)


def test_a_pause_is_not_the_engines() -> None:
    def train(*_: object) -> Iterator[None]:
        time.sleep(0.2)
        yield

    assert module._seconds(train, None, [ClientJob(row=0, client=0, steps_done=0)]) < 0.1  # type: ignore[arg-type]


def test_convolutions_are_tried_with_few_lanes_first() -> None:
    dense = four_each(200).setup
    assert sizes_to_try(dense, 200, 2, "cpu") == [
        25,
        1,
        100,
        8,
    ]  # four chunks of 25, not 32
    assert sizes_to_try(dense, 10, 2, "cpu") == [5, 1, 10]
    assert sizes_to_try(dense, 20, 2, "cpu") == [
        10,
        1,
        5,
        20,
    ]  # a share, before one does all
    task = fk.Task(lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten()))
    setup = four_each(200).setup
    other = prepare(
        four_each(200).settings,
        Ingredients(task, lambda _: setup.federation, setup.test, "net"),
    ).setup
    assert sizes_to_try(other, 200, 2, "cpu") == [1, 8, 25, 100]


@pytest.mark.parametrize(
    ("step", "tried"), [(8e-3, [SEQUENTIAL, 1]), (1e-3, [SEQUENTIAL, 1, 5, 10])]
)
def test_convolutions_that_fill_a_processor_are_not_tried_side_by_side(
    step: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = four_each(10).setup
    layers = (nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten())
    task = fk.Task(lambda: nn.Sequential(*layers))
    settings = four_each(10).settings.model_copy(update={"rounds": 1000})
    given = Ingredients(task, lambda _: setup.federation, setup.test, "net")
    each = 2 * step  # four examples in batches of two
    monkeypatch.setattr(
        module,
        "_seconds",
        lambda train, *_: 1.5 * each if isinstance(train, SequentialTrainer) else each,
    )
    assert list(module.time_engines(prepare(settings, given), 2, "cpu").seconds) == tried


def test_a_gpu_is_given_as_many_lanes_as_there_are_first() -> None:
    dense = four_each(200).setup
    assert sizes_to_try(dense, 50, 1, "cuda") == [50, 25, 8, 1]
    assert sizes_to_try(dense, 1000, 1, "cuda") == [500, 125, 32, 8, 1]
    assert sizes_to_try(dense, 1, 1, "cuda") == [1]


def test_batch_normalisation_is_recorded_for_each_size_of_a_batch() -> None:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    data = fk.dataset(x, torch.arange(60) % 3)
    layers = (nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    task = fk.Task(lambda: nn.Sequential(*layers), buffers="local")  # which is never padded
    settings = config.Run(method="fedavg", rounds=3, local=fk.Local(lr=0.1, epochs=1, batch_size=8))
    ragged = fk.federation(data, [np.arange(0, 19), np.arange(19, 40), np.arange(40, 60)])
    even = fk.federation(data, [np.arange(20 * k, 20 * k + 20) for k in range(3)])
    one, two = (
        prepare(settings, Ingredients(task, lambda _, f=f: f, data, "net")).setup
        for f in (ragged, even)
    )
    assert forms(one, one.federation.sizes) == 4  # of 8, 3, 5 and 4 examples
    assert forms(one, one.federation.sizes[:1]) == 2
    assert forms(two, two.federation.sizes) == 2
    assert sizes_to_try(one, 3, 1, "cpu") == [1]
    assert sizes_to_try(two, 3, 1, "cpu") == [3, 1]
    averaged = fk.Task(lambda: nn.Sequential(*layers), buffers="average")
    padded = prepare(settings, Ingredients(averaged, lambda _: ragged, data, "net")).setup
    assert forms(padded, padded.federation.sizes) == 2  # of 8 and of 4
    assert sizes_to_try(padded, 3, 1, "cpu") == [3, 1]


def test_what_is_measured_side_by_side_is_as_ragged_as_a_round() -> None:
    data = fk.dataset(torch.randn(155, 6), torch.arange(155) % 3)
    ends = np.cumsum([0, 10, 20, 30, 40, 5, 50])
    federation = fk.federation(data, [np.arange(a, b) for a, b in pairwise(ends)])
    task = fk.Task(lambda: nn.Sequential(nn.Linear(6, 3)))
    settings = config.Run(method="fedavg", rounds=3, local=fk.Local(lr=0.1, epochs=1, batch_size=8))
    setup = prepare(settings, Ingredients(task, lambda _: federation, data, "net")).setup
    sample = module._group_sample(setup, 2, 4)  # a round of 5, 10, 30 and 50, say
    assert [job.client for job in sample.jobs] == [5, 2]
    assert sample.relative_work == pytest.approx((50 + 30) / 2 / (155 / 6))
    assert len(module._group_sample(setup, 8, 6).jobs) == 6
    sizes = setup.federation.sizes
    assert forms(setup, sizes) == 3  # batches of 8, of 4, and of 2
    assert forms(setup, sizes, lanes=4) == 3 * 3  # and lanes are halved twice
    assert forms(setup, sizes[:1], lanes=4) == 2


def test_clients_that_are_prepared_together_record_one_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 5 to 50 examples, padded to 8, 16, 32 or 64: a chunk is padded to its longest."""
    data = fk.dataset(torch.randn(155, 6), torch.arange(155) % 3)
    ends = np.cumsum([0, 10, 20, 30, 40, 5, 50])
    federation = fk.federation(data, [np.arange(a, b) for a, b in pairwise(ends)])
    task = fk.Task(lambda: nn.Sequential(nn.Linear(6, 3)))
    settings = config.Run(
        method="fedreg",
        rounds=3,
        local=fk.Local(lr=0.1, epochs=1, batch_size=8),
        cohort={"clients": 4},
    )
    prepared = prepare(settings, Ingredients(task, lambda _: federation, data, "net"))
    times = iter([1.0, 1.0, 10.0, 1.0])  # alone, twice; side by side, recorded and again
    monkeypatch.setattr(module, "_seconds", lambda *given: next(times))
    monkeypatch.setattr(module, "_group_sizes", lambda *given: [2])
    found = module.time_engines(prepared, 1, "cpu")
    share = module._group_sample(prepared.setup, 2, 4).relative_work
    assert found.seconds[2] == pytest.approx((1.0 + 9.0 * 2 * 4 / 12) / share)
