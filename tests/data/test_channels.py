"""Series [steps, channels] are standardised by each channel, along the axis that is declared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from each import each
from fedkeel import config
from fedkeel.data.read.load import load
from fedkeel.study.audit.quality import Units

SHAPES = [(6, 3), (3, 3), (6, 1), (2, 5), (4, 2, 3)]
LOCAL = fk.Local(lr=0.1, epochs=1, batch_size=10)


def series(shape: tuple[int, ...], count: int, seed: int) -> np.ndarray:
    """Series whose channels, the last axis, differ in mean and deviation; one never varies."""
    random, channels = np.random.default_rng(seed), shape[-1]
    x = random.normal(size=(count, *shape)) * (1 + np.arange(channels)) + 10 * np.arange(channels)
    x += seed
    if channels > 1:
        x[..., -1] = 7.0
    return x


def standardised(x: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Each channel by its mean and deviation over examples and steps, in numpy."""
    axes = tuple(range(x.ndim - 1))
    std = known.std(axes)
    varies = std > 1e-9
    return np.where(varies, (x - known.mean(axes)) / np.where(varies, std, 1.0), 0.0)


@each("shape", SHAPES)
@each("how", ["standardize", "client"])
def test_each_channel_has_one_mean_and_one_deviation(shape: tuple[int, ...], how: str) -> None:
    train = {name: series(shape, 8 + k, k) for k, name in enumerate("ab")}
    test = {name: series(shape, 5, k + 5) for k, name in enumerate("ab")}
    clients = fk.from_clients(
        {name: (x, np.arange(len(x)) % 2) for name, x in train.items()},
        test={name: (x, np.arange(5) % 2) for name, x in test.items()},
        normalize=how,
        channels="last",
    )
    pooled = np.concatenate(list(train.values()))
    for k, name in enumerate(train):
        known = train[name] if how == "client" else pooled
        rows = clients.test.x[torch.from_numpy(clients.test.source == k)]
        np.testing.assert_allclose(rows, standardised(test[name], known), atol=1e-9)
    if how == "standardize":
        first = clients.data.x[clients.rows]
        np.testing.assert_allclose(first, standardised(pooled, pooled), atol=1e-9)
        raw = Units.of(clients.data.x, clients.data.scale).raw(first)
        np.testing.assert_allclose(raw, pooled, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_new_series_are_made_ready_along_the_same_axis(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 2))

    x, new = series(shape, 20, 1).astype(np.float32), series(shape, 7, 2).astype(np.float32)
    y = np.arange(20) % 2
    clients = {"a": (x[:12], y[:12]), "b": (x[12:], y[12:])}
    module = net()
    result = fk.run(
        "fedavg",
        task=fk.Task(module),
        clients=fk.from_clients(clients, normalize="standardize", channels="last"),
        test=(new, y[:7]),
        rounds=2,
        local=LOCAL,
        out=tmp_path / "run",
    )
    assert "channels" not in " ".join(result.record.warnings)
    model = fk.load(tmp_path / "run", model=net())
    ready = torch.from_numpy(standardised(new, x.astype(np.float64))).float()
    expected = model.module(ready).softmax(1).detach()
    np.testing.assert_allclose(model.predict(new).probabilities, expected, atol=1e-5)
    right = float((expected.argmax(1).numpy() == y[:7]).mean())
    assert result.rows[-1].test["accuracy"] == pytest.approx(right)
    program = torch.export.load(model.export(tmp_path / "model.pt2")).module()
    np.testing.assert_allclose(
        program(torch.from_numpy(new)).softmax(1).detach(), expected, atol=1e-5
    )


@pytest.mark.parametrize("how", ["standardize", "client"])
def test_a_warning_says_how_to_declare_the_axis(how: str) -> None:
    x, y = series((6, 3), 20, 1), np.arange(20) % 2
    result = fk.run(
        "fedavg",
        task=fk.Task(nn.Sequential(nn.Flatten(), nn.Linear(18, 2))),
        clients=fk.from_clients({"a": (x, y)}, test={"a": (x[:5], y[:5])}, normalize=how),
        rounds=1,
        local=LOCAL,
    )
    warnings = " ".join(result.record.warnings)
    assert "series of 6 channels and 3 steps" in warnings
    assert 'channels = "last"' in warnings


def test_files_of_series(tmp_path: Path) -> None:
    x = series((5, 5), 40, 3)
    np.savez(tmp_path / "all.npz", x=x, label=np.arange(40) % 2)
    settings = config.Data(
        source=str(tmp_path / "all.npz"), normalize="standardize", channels="last"
    )
    train, test = load(settings, 0)
    both = torch.cat([train.x, test.x])
    original = np.stack([x[np.abs(x[:, 0, 0] - v).argmin()] for v in _first(both, train.scale)])
    expected = standardised(original, original[: len(train)])
    np.testing.assert_allclose(both, expected, atol=1e-5)


def _first(x: torch.Tensor, scale: tuple[tuple[float, ...], tuple[float, ...]]) -> np.ndarray:
    """Return the first number of each input as it was before."""
    return x[:, 0, 0].numpy() * scale[1][0] + scale[0][0]


def test_what_has_no_such_axis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fk.FedkeelError, match="it is 'pixels'"):
        config.build(
            config.Data, {"source": "a.npz", "normalize": "pixels", "channels": "last"}, "data"
        )
    table = {"a": (np.zeros((4, 3)), [0, 1, 0, 1])}
    with pytest.raises(fk.FedkeelError, match="a table or one axis"):
        fk.from_clients(table, normalize="standardize", channels="last")
    (tmp_path / "t.csv").write_text("a,label\n" + "1,x\n2,y\n" * 10)
    images = np.random.default_rng(0).integers(0, 255, (20, 6, 6, 3)).astype(np.uint8)
    np.savez(tmp_path / "i.npz", x=images, label=np.arange(20) % 2)
    for name, words in (("t.csv", "a table or one axis"), ("i.npz", "images, whose channels")):
        settings = config.Data(
            source=str(tmp_path / name), normalize="standardize", channels="last"
        )
        with pytest.raises(fk.FedkeelError, match=words):
            load(settings, 0)
    with pytest.raises(fk.FedkeelError, match="'first' or 'last'"):
        fk.from_clients(table, normalize="standardize", channels="middle")
