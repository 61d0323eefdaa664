"""Quantities that are not known, NaN, are left out where the user declares it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedkeel as fk
from fedkeel import config
from fedkeel.data.read.load import load
from fedkeel.task.losses import LOSSES
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.regression import R2, mae, rmse

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
FULL = (X @ RNG.normal(size=(3, 2)) + 0.1 * RNG.normal(size=(40, 2))).astype(np.float32)
Y = np.where(RNG.random((40, 2)) < 0.3, np.nan, FULL).astype(np.float32)
Y[3] = np.nan  # an example of which nothing is known
EACH = {
    "mse": lambda p, y: (p - y) ** 2,
    "l1": lambda p, y: (p - y).abs(),
    "huber": lambda p, y: F.huber_loss(p, y, reduction="none"),
    "poisson": lambda p, y: F.poisson_nll_loss(p, y, reduction="none"),
}


@pytest.mark.parametrize("name", EACH)
def test_a_loss_is_the_mean_over_the_known_quantities(name: str) -> None:
    output = torch.randn(40, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    losses = LOSSES[name](output, torch.from_numpy(Y))
    for row in range(40):
        known = [d for d in range(2) if not math.isnan(Y[row, d])]
        each = [EACH[name](output[row, d], torch.tensor(Y[row, d])).item() for d in known]
        assert losses[row].item() == pytest.approx(np.mean(each) if each else 0.0, rel=1e-5)
    (gradient,) = torch.autograd.grad(losses.sum(), output)
    assert torch.equal(gradient == 0, torch.from_numpy(np.isnan(Y)))
    losses = LOSSES[name](output, torch.from_numpy(FULL))  # bits of what is known throughout
    plain = EACH[name](output, torch.from_numpy(FULL)).mean(dim=1)
    assert torch.equal(losses, plain)
    pair = (torch.autograd.grad(loss.sum(), output)[0] for loss in (losses, plain))
    assert torch.equal(*pair)


def test_metrics_leave_out_what_is_not_known() -> None:
    output, y = torch.from_numpy(FULL + 0.3 * X[:, :2]), torch.from_numpy(Y)
    info = TaskInfo((2,), (2,), 0)
    error, known = output.numpy().astype(float) - Y, ~np.isnan(Y)
    some = known.any(axis=1)
    r2 = [1 - np.nansum(error[:, d] ** 2) / np.nansum((Y[:, d] - np.nanmean(Y[:, d])) ** 2)
          for d in range(2)]  # fmt: skip
    expected = {
        "mae": np.nanmean(np.abs(error[some]), axis=1).mean(),
        "rmse": math.sqrt(np.nanmean(error[some] ** 2, axis=1).mean()),
        "r2": np.mean(r2),
    }
    group = torch.arange(40) // 14  # three shards, whose states make that of all
    for metric in (mae(info), rmse(info), R2(info)):
        states = metric.states(output, y, group, 3)
        one = torch.zeros(3, dtype=torch.int64)
        both = metric.merge(states, one, 1) if isinstance(metric, R2) else states.sum(0)[None]
        value = metric.result(both, torch.tensor([40.0]))
        assert float(value) == pytest.approx(expected[metric.name], rel=1e-5)
    lost = torch.full((40, 2), math.nan)  # scores that are not numbers still count as wrong
    assert all(m.result(m.states(lost, y, group, 3), torch.ones(3)).isnan().all()
               for m in (mae(info), rmse(info), R2(info)))  # fmt: skip


def masked(output: Tensor, y: Tensor) -> Tensor:
    """The same loss of targets that say by themselves which are known: values, and 1 or 0."""
    values, known = y[:, :2], y[:, 2:]
    return ((output - values) ** 2 * known).sum(1) / known.sum(1).clamp(min=1)


def trained(y: np.ndarray, loss: object, engine: str, **more: object) -> fk.Result:
    return fk.run(
        "fedavg",
        task=fk.Task(nn.Linear(3, 2), loss=loss, metrics=[] if loss is masked else ["mae", "r2"]),
        clients=fk.from_clients({"a": (X[:15], y[:15]), "b": (X[15:30], y[15:30])}, **more),
        test=fk.dataset(X[30:], y[30:], **more),
        rounds=3,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4),
        engine=config.Engine(kind=engine),
        seed=1,
    )


def test_engines_train_on_what_is_known() -> None:
    known = ~np.isnan(Y)
    torch.manual_seed(0)
    own = trained(np.hstack([np.nan_to_num(Y), known]), masked, "sequential")
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        result = trained(Y, "mse", engine, missing_targets="leave_out")
        for name, tensor in own.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
        scores = result.rows[-1].test
        assert all(math.isfinite(scores[name]) for name in ("loss", "mae", "r2"))


def test_what_does_not_leave_them_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fk.FedkeelError, match="missing_targets = 'leave_out'"):
        fk.dataset(X, Y)
    with pytest.raises(fk.FedkeelError, match="drop the row before"):
        fk.dataset(X, Y[:, 0], missing_targets="leave_out")
    for loss in ("bce", lambda output, y: ((output - y) ** 2).mean(dim=1)):
        with pytest.raises(fk.FedkeelError, match="does not leave out targets"):
            trained(Y, loss, "sequential", missing_targets="leave_out")
    with pytest.raises(fk.FedkeelError, match="no target is known"):
        trained(np.full_like(Y, np.nan), "mse", "sequential", missing_targets="leave_out")
    images = np.zeros((40, 4, 4), dtype=np.uint8)  # whose targets nobody looked at
    np.savez(tmp_path / "i.npz", x=images, label=Y)
    settings = config.Data(source=str(tmp_path / "i.npz"), target="quantity")
    with pytest.raises(fk.FedkeelError, match="a target is missing"):
        load(settings, 0)
