"""Metrics of single examples by hand, and their means by group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeel.records.rows import Scores
from fedkeel.task.losses import Loss
from fedkeel.task.metrics import COLUMNS, by_group, measure
from fedkeel.task.network import Network


class Given(nn.Module):
    """Its input is its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def mean_loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y)


def found(
    scores: list[list[float]],
    y: list[int],
    network: Network | None = None,
) -> Tensor:
    network = network or Network(Given())
    return measure(network, network.params, network.buffers, torch.tensor(scores), torch.tensor(y))


def test_scores_that_are_no_numbers_hit_nothing() -> None:
    rows = found([[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0]], [0, 3, 0])
    assert rows[:, :2].tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert rows[:, 2].isnan().tolist() == [True, True, False]


def test_hits_and_loss_of_each_example() -> None:
    scores = [[4.0, 3.0, 2.0, 1.0]] * 4
    rows = found(scores, [0, 1, 2, 3])
    total = sum(math.exp(s) for s in scores[0])
    assert rows.dtype == torch.float64
    assert rows.shape == (4, len(COLUMNS))
    assert rows[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert rows[:, 1].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert rows[:, 2].tolist() == pytest.approx([math.log(total) - s for s in scores[0]], rel=1e-6)


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_with_three_classes_or_fewer_every_example_is_within_rank_3(classes: int) -> None:
    scores = [[float(-c) for c in range(classes)]] * classes
    rows = found(scores, list(range(classes)))
    assert rows[:, 0].tolist() == [1.0] + [0.0] * (classes - 1)
    assert rows[:, 1].tolist() == [1.0] * classes


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]))
SMOOTHED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]), label_smoothing=0.1)
IGNORING = nn.CrossEntropyLoss(ignore_index=0)


@pytest.mark.parametrize("loss", [mean_loss, WEIGHTED, SMOOTHED, IGNORING])
def test_a_loss_that_is_a_mean_is_that_of_all_examples_of_a_group(loss: Loss) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, y = torch.randn(40, 3, generator=generator), torch.arange(40) % 5 % 3
    y[:7] = 0  # a first batch without a label that counts
    group = torch.tensor([2] * 12 + [0] * 28)
    network = Network(Given(), loss=loss)
    for size in (40, 13, 7, 1):
        parts = zip(scores.split(size), y.split(size), strict=True)
        rows = torch.cat([found(a.tolist(), b.tolist(), network) for a, b in parts])
        total = by_group(network, rows, y, torch.zeros_like(group), 1)[0]
        assert total.loss == pytest.approx(float(loss(scores, y)), rel=1e-6)
        there = by_group(network, rows, y, group, 3)
        assert [score.examples for score in there] == [28, 0, 12]
        for g in (0, 2):
            expected = float(loss(scores[group == g], y[group == g]))
            assert there[g].loss == pytest.approx(expected, rel=1e-6)


def test_measuring_changes_no_statistics_and_needs_no_tape() -> None:
    network = Network(nn.Sequential(nn.BatchNorm1d(2)), batch_statistics=True)
    before = {k: v.clone() for k, v in network.buffers.items()}
    rows = found([[2.0, 0.0], [0.0, 1.0]], [0, 0], network)
    assert all(torch.equal(v, before[k]) for k, v in network.buffers.items())
    assert not rows.requires_grad


def test_means_by_group() -> None:
    rows = torch.tensor([[1, 1, 0.5], [0, 1, 1.5], [0, 0, 4.0], [1, 1, 0.0]], dtype=torch.float64)
    group = torch.tensor([2, 2, 0, 2])
    assert by_group(Network(Given()), rows, torch.zeros_like(group), group, 4) == [
        Scores(examples=1, top1=0.0, top3=0.0, loss=4.0),
        Scores(examples=0, top1=0.0, top3=0.0, loss=0.0),
        Scores(examples=3, top1=2 / 3, top3=1.0, loss=2 / 3),
        Scores(examples=0, top1=0.0, top3=0.0, loss=0.0),
    ]


def test_means_of_groups_do_not_depend_on_how_examples_were_batched() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(50, 3, generator=generator, dtype=torch.float64)
    group = torch.randint(0, 3, (50,), generator=generator)
    scores = by_group(Network(Given()), rows, torch.zeros_like(group), group, 3)
    for g, score in enumerate(scores):
        expected = rows[group == g].mean(dim=0).tolist()
        assert [score.top1, score.top3, score.loss] == pytest.approx(expected, rel=1e-13)
        assert score.examples == int((group == g).sum())
