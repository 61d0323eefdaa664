"""Tokens: whole numbers stay whole from the data to the model, in a run and in its evaluation."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.errors import CompositionError, DataError, FedkeelError, ModelError
from fedkeel.runner.result import Result
from fedkeel.task.models import make

SIGNS, LENGTH = 7, 5
NET = partial(make, "char_lstm", (LENGTH,), SIGNS, {"embedding": 6, "hidden": 16, "layers": 1})


def text(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences that count on by one sign; each client knows some first signs best."""
    first = np.random.default_rng(seed).integers(0, SIGNS, size=n)
    x = (first[:, None] + np.arange(LENGTH)) % SIGNS
    return x, (first + LENGTH) % SIGNS


def clients(count: int = 4, n: int = 24) -> fk.Federation:
    x, y = text(count * n, seed=0)
    data = fk.dataset(x, y, classes=SIGNS, tokens=True)
    return fk.federation(data, np.split(np.argsort(y, kind="stable"), [n // 2, 2 * n, 3 * n]))


def run(method: str = "fedavg", rounds: int = 6, **more: object) -> Result:
    values = {
        "task": fk.Task(NET),
        "clients": clients(),
        "test": text(40, seed=1),
        "rounds": rounds,
        "local": fk.Local(lr=0.5, epochs=2, batch_size=8),
        "engine": fk.Engine(kind="sequential"),
    }
    return fk.run(method, **{**values, **more})


# --- data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_tokens_are_int64(kind: type) -> None:
    x, y = text(6, seed=0)
    data = fk.dataset(x.astype(kind), y, tokens=True)
    assert data.x.dtype == torch.int64
    assert np.array_equal(data.x.numpy(), x)
    assert data.to(torch.float64) is data
    assert data.take(np.array([3, 1])).x.dtype == torch.int64


@pytest.mark.parametrize(
    "divide",
    [
        partial(fk.iid, clients=4),
        partial(fk.dirichlet, clients=4, alpha=1.0),
        partial(fk.by_classes, clients=4, k=2),
        partial(fk.by_client, client_ids=np.arange(24) % 4),
    ],
)
def test_every_division_takes_tokens(divide: partial) -> None:
    x, y = text(24, seed=0)
    made = divide(x, y, tokens=True)
    assert len(made) == 4
    assert made.data.x.dtype == torch.int64
    assert divide(x, y).data.x.dtype == torch.float32


def test_the_way_out_is_named_where_a_network_asks_for_whole_numbers() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Embedding(SIGNS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, SIGNS))

    x, y = text(24, seed=0)
    ways = r"fk\.dataset\(x, y, tokens=True\), fk\.from_clients\(.*experiment file"
    with pytest.raises(ModelError, match=ways):
        run(task=fk.Task(net), clients=fk.iid(x, y, clients=4, classes=SIGNS))
    made = fk.iid(x, y, clients=4, classes=SIGNS, tokens=True)
    assert run(task=fk.Task(net), clients=made, rounds=1).record.status == "finished"


def test_without_the_word_whole_numbers_are_numbers() -> None:
    x, y = text(6, seed=0)
    assert fk.dataset(x, y).x.dtype == torch.float32
    assert fk.dataset(x, y).fingerprint() != fk.dataset(x, y, tokens=True).fingerprint()


@pytest.mark.parametrize(
    ("value", "says"), [(1.5, "got 1.5 in row 2"), (-1, "got -1"), (np.nan, "NaN or infinite")]
)
def test_what_is_no_token(value: float, says: str) -> None:
    x, y = text(6, seed=0)
    x = x.astype(np.float64)
    x[2, 3] = value
    with pytest.raises(DataError, match=re.escape(says)):
        fk.dataset(x, y, tokens=True)


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedprox(mu=0.01)+gcfed"])
def test_a_character_network_learns_to_count(method: str) -> None:
    result = run(method)
    losses = [row.test["loss"] for row in result.rows if row.test is not None]
    assert losses[0] > 1.5  # about log 7
    assert losses[-1] < 0.6 * losses[0]
    assert result.last > 0.6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_engines_agree_on_tokens(dtype: str) -> None:
    one, two = (
        run(rounds=2, engine=fk.Engine(kind=kind, workers=workers, dtype=dtype))
        for kind, workers in (("sequential", None), ("workers", 2))
    )
    assert all(torch.equal(one.params[k], two.params[k]) for k in one.params)
    assert {p.dtype for p in one.params.values()} == {getattr(torch, dtype)}


def test_the_test_set_may_be_a_dataset() -> None:
    x, y = text(40, seed=1)
    a, b = run(rounds=1), run(rounds=1, test=fk.dataset(x, y, classes=SIGNS, tokens=True))
    assert a.rows[-1].test == b.rows[-1].test


def test_no_gradient_of_a_character() -> None:
    with pytest.raises(CompositionError) as caught:
        run("fedreg")
    assert "fedreg needs INPUT_GRADIENT" in str(caught.value)
    assert "use floating-point inputs" in str(caught.value)


def test_numbers_are_no_characters() -> None:
    x, y = text(40, seed=1)
    with pytest.raises(ModelError, match="reads characters as whole numbers") as caught:
        run(clients=fk.federation(fk.dataset(x, y), [np.arange(40)]))
    assert "dataset(..., tokens=True)" in str(caught.value)
    with pytest.raises(ModelError, match="reads characters as whole numbers"):
        run(test=fk.dataset(x, y))


def test_a_character_that_the_network_does_not_know() -> None:
    few = partial(make, "char_lstm", (LENGTH,), SIGNS, {"vocabulary": 2})
    with pytest.raises(FedkeelError, match="CharLSTM cannot take the data"):
        run(task=fk.Task(few))
