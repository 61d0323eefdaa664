"""Named losses against torch, scikit-learn, lifelines and sums by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from torch import Tensor

import fedkeel as fk
from each import each
from fedkeel.errors import ModelError
from fedkeel.task.losses import LOSSES, SOFT_TARGETS
from fedkeel.task.metrics.base import TaskInfo
from fedkeel.task.metrics.survival import concordance

SURVIVAL = json.loads(
    (Path(__file__).parents[1] / "oracles" / "survival.json").read_text(encoding="utf-8")
)["cases"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes: int, *shape: int) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1))


@each("axes", [(), (1,), (3,)])
@each("name", ["mse", "l1", "huber", "poisson", "bce"])
def test_losses_of_quantities_are_those_of_torch(name: str, axes: tuple[int, ...]) -> None:
    output, y = draw(7, *axes), (draw(7, *axes, seed=2) > 0).double()
    function = {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "huber": F.huber_loss,
        "poisson": F.poisson_nll_loss,
        "bce": F.binary_cross_entropy_with_logits,
    }[name]
    expected = function(output, y, reduction="none").reshape(7, -1).mean(dim=1)
    losses = LOSSES[name](output, y)
    assert losses.shape == (7,)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    if axes == ():  # a model returns a column, and targets may be whole numbers
        torch.testing.assert_close(LOSSES[name](output[:, None], y.long()), expected)


def test_cross_entropy_of_labels_masks_and_tokens() -> None:
    output, y = draw(6, 4), labels(4, 6)
    expected = sk.log_loss(y, output.softmax(1), labels=range(4))
    assert float(LOSSES["cross_entropy"](output, y).mean()) == pytest.approx(expected, rel=1e-12)
    masks, truth = draw(5, 3, 4, 4), labels(3, 5, 4, 4)
    by_place = F.cross_entropy(masks, truth, reduction="none").flatten(1).mean(dim=1)
    torch.testing.assert_close(LOSSES["cross_entropy"](masks, truth), by_place)
    tokens, following = draw(5, 4, 6), labels(6, 5, 4)
    following[0, 2:] = -100
    following[1] = -100
    losses = LOSSES["token_cross_entropy"](tokens, following)
    of_first = F.cross_entropy(tokens[0, :2], following[0, :2])
    assert float(losses[0]) == pytest.approx(float(of_first), rel=1e-12)
    assert float(losses[1]) == 0.0


@pytest.mark.parametrize("case", SURVIVAL)
def test_concordance_is_that_of_lifelines(case: dict[str, list[float]]) -> None:
    risk, time, event = (torch.tensor(case[k]).double() for k in ("risk", "time", "event"))
    metric = concordance(TaskInfo((1,), (2,), 0))
    value = metric.of_all(metric.values(risk[:, None], torch.stack([time, event], dim=1)))
    assert value == pytest.approx(case["concordance"], rel=1e-12)


@pytest.mark.parametrize("case", [case for case in SURVIVAL if "score" in case])
def test_cox_is_the_partial_likelihood_of_lifelines(case: dict[str, list[float]]) -> None:
    score, time, event = (torch.tensor(case[k]).double() for k in ("score", "time", "event"))
    loss = LOSSES["cox"](score[:, None], torch.stack([time, event], dim=1))
    assert float(loss * event.sum()) == pytest.approx(-case["log_likelihood"], rel=1e-8)


def test_cox_with_equal_times_is_that_of_breslow() -> None:
    score, time, event = draw(30), labels(6, 30).double(), (draw(30, seed=3) > -0.5).double()
    total = 0.0
    for i in range(30):
        if event[i]:
            at_risk = sum(math.exp(score[j]) for j in range(30) if time[j] >= time[i])
            total += math.log(at_risk) - float(score[i])
    y = torch.stack([time, event], dim=1)
    assert float(LOSSES["cox"](score, y)) == pytest.approx(total / float(event.sum()), rel=1e-12)
    nobody = torch.stack([time, torch.zeros(30).double()], dim=1)
    assert float(LOSSES["cox"](score, nobody)) == 0.0


def test_dice_of_one_class_and_of_several() -> None:
    output, y = draw(4, 1, 5, 5), labels(2, 4, 5, 5)
    share = output[:, 0].sigmoid().flatten(1)
    truth = y.flatten(1).double()
    both, areas = (share * truth).sum(1), share.sum(1) + truth.sum(1)
    expected = 1 - (2 * both + 1) / (areas + 1)
    torch.testing.assert_close(LOSSES["dice"](output, y), expected)
    pair = torch.cat([torch.zeros_like(output), output], dim=1)
    torch.testing.assert_close(LOSSES["dice"](pair, y), expected)


@pytest.mark.parametrize("loss", SOFT_TARGETS)
def test_what_a_model_predicts_is_a_target_of_its_loss(loss: fk.Task) -> None:
    """Nothing is closer to it than the prediction itself."""
    output = draw(5, 3, 4) if loss.__name__ == "token_cross_entropy" else draw(5, 4)
    target = SOFT_TARGETS[loss](output)
    output.requires_grad_()
    losses = loss(output, target)
    assert losses.shape == (5,)
    (slope,) = torch.autograd.grad(losses.sum(), output)
    assert float(slope.abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("mes", "did you mean 'mse'"),
        ("math:sqrt", "a module of Python's own"),
        ("torch.nn.functional:mse_los", "did you mean 'mse_loss'"),
        ("nothing_there:loss", "nothing_there"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(loss: str, words: str) -> None:
    with pytest.raises(ModelError) as error:
        fk.Task(torch.nn.Linear(2, 1), loss=loss)
    assert words in str(error.value)
    assert len(error.value.lines()) <= 4


def test_a_target_of_another_shape_than_the_output_is_refused() -> None:
    data = fk.dataset(torch.zeros(6, 2), torch.rand(6, 3))
    with pytest.raises(ModelError) as error:
        fk.Task(torch.nn.Linear(2, 2), loss="mse").network(data, 0, torch.float32)
    assert "an output [4, 2] and targets [4, 3]" in str(error.value)
    assert len(error.value.lines()) <= 5
