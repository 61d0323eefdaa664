"""Targets that a loss cannot take, and those that do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from torch import Tensor, nn

import fedkeel as fk
from each import each
from fedkeel.errors import DataError, FedkeelError
from fedkeel.task.losses import LOSSES
from fedkeel.task.metrics.base import PooledMetric, TaskInfo
from fedkeel.task.metrics.registry import make_metric

RANDOM = np.random.default_rng(0)
MASK = RANDOM.integers(0, 2, (12, 4, 4))
LABEL = np.arange(12) % 2
SEVERAL = RANDOM.integers(0, 2, (12, 3))
TIMES = np.stack([np.arange(12) + 0.5, LABEL], axis=1)


class Outputs(nn.Module):
    """Scores of any shape, of inputs [B, 2]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, nn.Linear(2, int(np.prod(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, *self.shape)


def run(loss: Any, shape: tuple[int, ...], y: Any, test: Any = None, **more: Any) -> fk.Result:
    test_y = y if test is None else test
    x = np.ones((12, 2), np.float32) * np.arange(12)[:, None]
    return fk.run(
        "fedavg",
        task=fk.Task(lambda: Outputs(*shape), loss=loss, **more),
        clients=fk.iid(x, y, clients=2, classes=0 if loss == "poisson" else None),
        test=(x[: len(test_y)], test_y),
        rounds=1,
        local=fk.Local(lr=0.1, epochs=1, batch_size=4),
        engine=fk.Engine(kind="sequential"),
        progress=False,
    )


def void(mask: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
    changed = mask.copy()
    changed[3, 1] = value
    return changed


REFUSED: dict[str, tuple[Any, tuple[int, ...], Any, Any, str]] = {
    "a mask of 0 and 255": ("bce", (4, 4), MASK, 255 * MASK, "mask // 255"),
    "as a program writes it": ("bce", (1, 4, 4), MASK, np.uint8(255 * MASK), "(mask > 0)"),
    "by torch's own loss": (
        nn.BCEWithLogitsLoss(),
        (4, 4),
        np.float32(MASK),
        np.float32(255 * MASK),
        "mask // 255",
    ),
    "by torch's function": (
        F.binary_cross_entropy_with_logits,
        (4, 4),
        np.float32(MASK),
        np.float32(255 * MASK),
        "mask // 255",
    ),
    "dice of 0 and 255": ("dice", (1, 4, 4), MASK, 255 * MASK, "mask // 255"),
    "a mask of 1 and 2": ("dice", (4, 4), MASK, MASK + 1, "mask - 1"),
    "void of a binary mask": ("bce", (4, 4), MASK, void(MASK, 255), "mask == 255, -100, mask"),
    "void of classes": ("cross_entropy", (2, 4, 4), MASK, void(MASK, 255), "y == 255, -100, y"),
    "void of dice": ("dice", (3, 4, 4), 2 * MASK, void(2 * MASK, 255), "y == 255, -100, y"),
    "classes from 1": ("dice", (2, 4, 4), MASK, MASK + 1, "number the classes from 0: y - 1"),
    "0 and 255 of classes": ("cross_entropy", (2, 4, 4), MASK, 255 * MASK, "mask // 255"),
    "shades of grey": ("bce", (4, 4), MASK, MASK * 200 + 3 * LABEL[:, None, None], "mask > 127"),
    "an unknown label": ("bce", (3,), SEVERAL, void(SEVERAL, -1), "y == -1, -100, y"),
    "an unknown label, as a number": (
        "bce",
        (3,),
        np.float32(SEVERAL),
        np.float32(void(SEVERAL, -1)),
        "y == -1, -100, y",
    ),
    "-100 that is not a whole number": (
        "bce",
        (3,),
        np.float32(SEVERAL),
        np.float32(void(SEVERAL, -100)),
        "y.astype(int)",
    ),
    "-100 in torch's own loss": (
        nn.BCEWithLogitsLoss(),
        (3,),
        np.float32(SEVERAL),
        np.float32(void(SEVERAL, -100)),
        "loss = 'bce'",
    ),
    "three classes in one score": ("bce", (1,), LABEL, np.arange(12) % 3, "'cross_entropy'"),
    "a label of -1": ("bce", (1,), np.float32(0.5 * LABEL), 2.0 * LABEL - 1.5, "0 and 1"),
    "percent": ("bce", (1,), LABEL / 2, LABEL * 12.5, "/ 100"),
    "negative counts": ("poisson", (1,), LABEL, LABEL - 0.5, "'mse'"),
    "negative counts of torch's": (
        nn.PoissonNLLLoss(),
        (2,),
        SEVERAL[:, :2] * 1.5,
        SEVERAL[:, :2] - 0.5,
        "'mse'",
    ),
    "events of 1 and 2": ("cox", (1,), TIMES, TIMES + np.array([0, 1]), "event - 1"),
    "swapped columns": ("cox", (1,), TIMES, TIMES[:, ::-1], "y[:, ::-1]"),
    "competing events": ("cox", (1,), TIMES, TIMES * [1, 3], "event == 1"),
    "a third column": ("cox", (1,), TIMES, np.hstack([TIMES, TIMES[:, :1]]), "numpy.stack"),
    "an unknown token": ("token_cross_entropy", (3, 2), SEVERAL, SEVERAL * 4, "for each class"),
    "a label beyond torch's": (nn.CrossEntropyLoss(), (2,), LABEL, LABEL * 4, "for each class"),
}


@each("case", REFUSED)
def test_targets_that_a_loss_cannot_take_are_refused_in_training_and_test_set(case: str) -> None:
    loss, shape, good, bad, remedy = REFUSED[case]
    run(loss, shape, good)
    for train, test in ((bad, good), (good, bad)):
        with pytest.raises(FedkeelError) as error:
            run(loss, shape, train, test)
        if np.shape(train) == np.shape(test):
            words = str(error.value)
            assert remedy in words or "outputs for" in words, words
            assert len(error.value.lines()) <= 4


@pytest.mark.parametrize(
    ("y", "remedy"),
    [
        (np.where(SEVERAL, 1.0, np.nan), "numpy.nan_to_num(y, nan=-100).astype(int)"),
        (np.where(SEVERAL, 0.3, np.nan), "drop the row"),
    ],
)
def test_an_unknown_label_of_several_is_refused_with_the_way_to_write_it(
    y: Any,
    remedy: str,
) -> None:
    with pytest.raises(DataError) as error:
        fk.dataset(np.zeros((12, 2)), y)
    assert remedy in str(error.value)
    assert "got nan" in str(error.value)


def test_a_data_set_of_which_no_target_counts_is_refused() -> None:
    with pytest.raises(DataError, match="no target of the loss 'bce' counts"):
        run("bce", (3,), np.full((12, 3), -100), SEVERAL)


def slope(loss: Callable[[Tensor, Tensor], Tensor], scores: Tensor, y: Tensor) -> Tensor:
    scores = scores.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(scores, y).sum(), scores)
    return gradient


@pytest.mark.parametrize("name", ["bce", "dice", "dice of classes"])
def test_targets_of_minus_100_count_neither_in_the_loss_nor_in_its_gradient(name: str) -> None:
    """The loss of a mask with a row of -100 is that of the mask without this row."""
    loss, classes = LOSSES[name.partition(" ")[0]], 3 if "classes" in name else 1
    random = torch.Generator().manual_seed(0)
    scores = torch.randn(5, classes, 4, 4, generator=random, dtype=torch.float64)
    y = torch.randint(0, max(2, classes), (5, 4, 4), generator=random)
    left_out = y.clone()
    left_out[:, 1] = -100
    rest = [0, 2, 3]
    torch.testing.assert_close(loss(scores, left_out), loss(scores[:, :, rest], y[:, rest]))
    gradient = slope(loss, scores, left_out)
    torch.testing.assert_close(gradient[:, :, rest], slope(loss, scores[:, :, rest], y[:, rest]))
    assert (gradient[:, :, 1] == 0).all()
    # where everything counts, whole numbers and shares give the same bits
    single = scores.float() if classes > 1 else scores.float()[:, 0]
    assert torch.equal(loss(single, y), loss(single, y.float()))


def test_metrics_leave_out_what_does_not_count() -> None:
    """Each is that of scikit-learn of only the known labels."""
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(80, 60, generator=random, dtype=torch.float64)
    truth = torch.randint(0, 2, (80, 60), generator=random)
    y = torch.where(torch.rand(80, 60, generator=random) < 0.4, -100, truth)
    y[0] = -100  # an example of which nothing is known does not count
    known, hits = (y != -100).numpy(), ((scores > 0) == truth).numpy()
    info = TaskInfo((60,), (60,), 2)

    def value(name: str) -> float:
        metric = make_metric(name, info)
        if isinstance(metric, PooledMetric):
            return metric.of_all(metric.values(scores, y))
        group = torch.zeros(80, dtype=torch.int64)
        state = metric.states(scores, y, group, 1)
        return float(metric.result(state, torch.tensor([80.0]))[0])

    shares = [hits[row][known[row]].mean() for row in range(1, 80)]
    assert value("accuracy") == pytest.approx(np.mean(shares))
    columns = [(truth[known[:, k], k], scores[known[:, k], k]) for k in range(60)]
    of_each = [sk.f1_score(t, s > 0) for t, s in columns]
    assert value("macro_f1") == pytest.approx(np.mean(of_each))
    areas = [sk.roc_auc_score(t, s) for t, s in columns]
    assert value("auroc") == pytest.approx(np.mean(areas))


def test_the_overlap_of_masks_leaves_out_those_of_which_no_place_counts() -> None:
    info = TaskInfo((1, 2, 2), (2, 2), 2)
    scores = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).expand(2, 1, 2, 2)
    y = torch.tensor([[[1, 1], [1, -100]], [[-100, -100], [-100, -100]]])
    for name, expected in (("dice", 4 / 5), ("iou", 2 / 3), ("accuracy", 2 / 3)):
        metric = make_metric(name, info)
        state = metric.states(scores, y, torch.zeros(2, dtype=torch.int64), 1)
        assert float(metric.result(state, torch.tensor([2.0]))[0]) == pytest.approx(expected)


def test_partly_labelled_clients_train_alike_with_every_engine() -> None:
    y = np.where(RANDOM.random((12, 3)) < 0.3, -100, SEVERAL)
    x = RANDOM.normal(size=(12, 2)).astype(np.float32)
    states = [
        fk.run(
            "fedavg",
            task=fk.Task(lambda: Outputs(3), loss="bce", metrics=["macro_f1"]),
            clients=fk.iid(x, y, clients=3),
            test=(x, y),
            rounds=2,
            local=fk.Local(lr=0.1, epochs=1, batch_size=3),
            engine=fk.Engine(kind=kind, workers=1),
            progress=False,
        ).state_dict()
        for kind in ("sequential", "vectorized")
    ]
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])
