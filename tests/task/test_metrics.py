"""Metrics against scikit-learn, torchmetrics and numbers by hand, however examples are batched."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

from each import each
from fedkeel.errors import ModelError
from fedkeel.records.rows import Scores
from fedkeel.task.losses import LOSSES, Loss
from fedkeel.task.metrics.base import SumMetric, TaskInfo
from fedkeel.task.metrics.metric_set import MetricSet, make_metric_set
from fedkeel.task.metrics.registry import METRICS, MetricLike, make_metric, metric
from fedkeel.task.network import Network

torchmetrics = pytest.importorskip("torchmetrics")


class Given(nn.Module):
    """Its input is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def network_of(loss: Loss, output: Tensor, y: Tensor) -> Network:
    network = Network(Given(), loss=loss, dtype=output.dtype)
    network.has_mean_loss = loss(output[:2], y[:2]).ndim == 0
    return network


def metric_set(
    given: Sequence[MetricLike] | None, output: Tensor, y: Tensor, loss: Loss, classes: int
) -> tuple[Network, MetricSet]:
    network = network_of(loss, output, y)
    info = TaskInfo(tuple(output.shape[1:]), tuple(y.shape[1:]), classes)
    return network, make_metric_set(network, given, None, info, output[:2], y[:2])


def scores_of(
    given: Sequence[MetricLike] | None,
    output: Tensor,
    y: Tensor,
    loss: Loss = LOSSES["cross_entropy"],
    classes: int | None = None,
    size: int = 7,
    group: Tensor | None = None,
) -> list[Scores]:
    """Return the scores of each group, measured in batches of so many examples."""
    if classes is None:
        classes = 0 if y.is_floating_point() else max(2, int(y.max()) + 1)
    network, metrics = metric_set(given, output, y, loss, classes)
    group = torch.zeros(len(y), dtype=torch.int64) if group is None else group
    groups = int(group.max()) + 1
    parts = [
        metrics.measure(partial(network.test_output, network.params, {}), a, b, g, groups)
        for a, b, g in zip(output.split(size), y.split(size), group.split(size), strict=True)
    ]
    states = torch.cat([part.states for part in parts])
    states = metrics.merged(states, torch.arange(groups).repeat(len(parts)), groups)
    kept = torch.cat([part.kept for part in parts])
    return metrics.scores(states, torch.bincount(group, minlength=groups), kept, group)


def value(given: MetricLike, output: Tensor, y: Tensor, **more: Any) -> float:
    name = next(iter(scores_of([given], output, y, **more)[0].values))
    return scores_of([given], output, y, **more)[0][name]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int, classes: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, classes, (count,), generator=generator)


def of_sklearn(function: Callable[..., float], *arrays: Any, **more: Any) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that do not occur
        return float(function(*arrays, **more))


# ---- labels -------------------------------------------------------------------------------------


@each("classes", [2, 3, 7])
@each("count", [1, 2, 60])
def test_metrics_of_labels_are_those_of_scikit_learn(classes: int, count: int) -> None:
    output, y = draw(count, classes), labels(count, classes)
    found = output.argmax(dim=1)
    expected = {
        "accuracy": of_sklearn(sk.accuracy_score, y, found),
        "confusion": of_sklearn(sk.accuracy_score, y, found),
        "macro_f1": of_sklearn(sk.f1_score, y, found, average="macro"),
        "balanced_accuracy": of_sklearn(sk.balanced_accuracy_score, y, found),
        "loss": of_sklearn(sk.log_loss, y, output.softmax(1), labels=range(classes)),
    }
    scores = scores_of([name for name in expected if name != "loss"], output, y, classes=classes)[0]
    assert scores.examples == count
    assert scores.values == pytest.approx(expected, rel=1e-12)


def test_metrics_of_many_classes_keep_three_numbers_for_each() -> None:
    output, y = draw(30, 20_000), labels(30, 20_000)
    y[::2] = output[::2].argmax(dim=1)
    names = ["macro_f1", "balanced_accuracy"]
    _, metrics = metric_set(names, output, y, LOSSES["cross_entropy"], 20_000)
    assert metrics.sizes == (60_000, 60_000, 1)
    scores, found = scores_of(names, output, y, classes=20_000)[0], output.argmax(dim=1)
    assert scores["macro_f1"] == of_sklearn(sk.f1_score, y, found, average="macro")
    assert scores["balanced_accuracy"] == of_sklearn(sk.balanced_accuracy_score, y, found)


def test_top_k_is_that_of_scikit_learn() -> None:
    output, y = draw(50, 6), labels(50, 6)
    for name, k in (("top1", 1), ("top3", 3), ("top(k=5)", 5), ("top9", 6)):
        expected = of_sklearn(sk.top_k_accuracy_score, y, output.softmax(1), k=k, labels=range(6))
        assert value(name, output, y) == pytest.approx(expected)


def test_scores_that_are_no_numbers_hit_nothing() -> None:
    output = torch.tensor([[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0]])
    scores = scores_of(None, output.double(), torch.tensor([0, 3, 0]))[0]
    assert (scores["accuracy"], scores["top3"]) == (1 / 3, 1 / 3)
    assert math.isnan(scores["loss"])


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_with_three_classes_or_fewer_every_example_is_within_rank_3(classes: int) -> None:
    output = torch.tensor([[float(-c) for c in range(classes)]] * classes).double()
    scores = scores_of(None, output, torch.arange(classes), classes=classes)[0]
    assert (scores["accuracy"], scores["top3"]) == (1 / classes, 1.0)


@pytest.mark.parametrize("columns", [1, 2])
def test_two_classes_by_one_score_or_two(columns: int) -> None:
    output, y = draw(80, columns), labels(80, 2)
    margin = output[:, 0] if columns == 1 else output[:, 1] - output[:, 0]
    loss = LOSSES["bce"] if columns == 1 else LOSSES["cross_entropy"]
    found = (margin > 0).long()
    (negative, alarm), (miss, hit) = sk.confusion_matrix(y, found)
    expected = {
        "accuracy": sk.accuracy_score(y, found),
        "sensitivity": hit / (hit + miss),
        "specificity": negative / (negative + alarm),
        "balanced_accuracy": sk.balanced_accuracy_score(y, found),
    }
    scores = scores_of(list(expected), output, y, loss)[0]
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert scores["loss"] == pytest.approx(sk.log_loss(y, margin.sigmoid()), rel=1e-12)


# ---- probabilities ------------------------------------------------------------------------------


AREAS = ["auroc", "auprc", "sensitivity(at_specificity=0.9)"]


def of_nodes(
    given: Sequence[MetricLike], output: Tensor, y: Tensor, loss: Loss, classes: int
) -> Scores:
    """Return the scores of what ten nodes send."""
    _, metrics = metric_set(given, output, y, loss, classes)
    group = torch.arange(len(y)) * 10 // len(y)
    measured = metrics.measure(lambda x: x, output, y, group, 10)
    scores = metrics.scores(measured.states, torch.bincount(group), measured.kept, group)
    sent = metrics.node_states(measured.states, measured.kept, group, scores)
    server, none = metrics.on_nodes(), torch.zeros(0, dtype=torch.int64)
    states = server.merged(sent, torch.zeros(10, dtype=torch.int64), 1)
    return server.scores(states, torch.tensor([len(y)]), torch.zeros(0, 0), none)[0]


def rated(y: Tensor, odds: Tensor) -> dict[str, float]:
    """Return what scikit-learn says of scores of two classes."""
    alarms, hits, _ = sk.roc_curve(y, odds)
    areas = sk.roc_auc_score(y, odds), sk.average_precision_score(y, odds)
    return dict(zip(AREAS, (*areas, hits[1 - alarms >= 0.9 - 1e-12].max()), strict=True))


def test_areas_are_exact_on_one_machine_and_close_to_it_on_nodes() -> None:
    count, noise = 100_000, draw(100_000).float()
    even, rare = labels(count, 2), (labels(count, 1000) == 0).long()
    cases = {
        "even": (even, noise + even),
        "rare": (rare, noise + 1.5 * rare - 7),
        "rare, and all of them near": (rare, 0.2 * noise + 0.3 * rare - 7),
        "almost 1": (even, 3 * noise + 3 * even + 20),
        "almost 0": (even, 3 * noise + 3 * even - 40),
        "equal": (even, (noise + even).round()),
        "all the same": (even, torch.full_like(noise, 0.3)),
    }
    for name, (y, odds) in cases.items():
        exact = rated(y, odds)
        one = scores_of(AREAS, odds[:, None], y, LOSSES["bce"], size=9000)[0]
        nodes = of_nodes(AREAS, odds[:, None], y, LOSSES["bce"], 2)
        for area in AREAS:
            assert one[area] == pytest.approx(exact[area], rel=1e-12), (name, area)
            bound = 0.002 if area in ("auroc", "auprc") else 0.01
            assert nodes[area] == pytest.approx(exact[area], abs=bound), (name, area)


@pytest.mark.parametrize("classes", [3, 5])
def test_areas_of_several_classes_are_means_against_the_rest(classes: int) -> None:
    y = labels(2000, classes)
    output = 8 * draw(2000, classes) + 10 * nn.functional.one_hot(y, classes)  # many near 0 and 1
    output[:400] = output[400:800]  # equal scores
    odds = [
        output[:, c] - output[:, [k for k in range(classes) if k != c]].logsumexp(1)
        for c in range(classes)
    ]
    found = scores_of(["auroc", "auprc"], output, y)[0]
    nodes = of_nodes(["auroc", "auprc"], output, y, LOSSES["cross_entropy"], classes)
    for name in ("auroc", "auprc"):
        expected = np.mean([rated((y == c).long(), odds[c])[name] for c in range(classes)])
        assert found[name] == pytest.approx(expected, rel=1e-9)
        assert nodes[name] == pytest.approx(expected, abs=0.002)


def test_areas_in_bins_are_the_same_on_nodes() -> None:
    output, y = draw(500, 2), labels(500, 2)
    name = "auroc(bins=20)"
    found = value(name, output, y)
    assert found != value("auroc", output, y)
    nodes = of_nodes([name], output, y, LOSSES["cross_entropy"], 2)["auroc"]
    assert nodes == found == pytest.approx(value("auroc", output, y), abs=0.1)


# ---- scores that are not numbers, equal scores, what is ignored ----------------------------------


def test_scores_that_are_no_numbers_are_wrong_everywhere() -> None:
    y = torch.tensor([1, 1, 0, 0])
    output = torch.tensor([[math.nan], [4.0], [math.nan], [-4.0]]).double()
    names = ["accuracy", "confusion", "balanced_accuracy", "macro_f1", "sensitivity", "specificity"]
    scores = scores_of([*names, *AREAS], output, y, LOSSES["bce"])[0]
    half = dict.fromkeys(names, 0.5) | {"macro_f1": 2 / 3}
    assert {name: scores[name] for name in names} == pytest.approx(half)
    lowest = torch.tensor([-9.0, 4.0, 9.0, -4.0])
    assert (scores["auroc"], scores["auprc"]) == (
        sk.roc_auc_score(y, lowest),
        sk.average_precision_score(y, lowest),
    )
    assert scores[AREAS[2]] == 0.0  # one of two negatives is a false alarm at any threshold
    assert value("sensitivity(at_specificity=0)", output, y, loss=LOSSES["bce"]) == 0.5
    nodes = of_nodes(AREAS, output.repeat(10, 1), y.repeat(10), LOSSES["bce"], 2)
    assert nodes["auroc"] == scores["auroc"]
    several = torch.tensor([[math.nan, 4.0], [4.0, -4.0]]).double()
    f1 = value(
        "macro_f1", several, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), loss=LOSSES["bce"], classes=2
    )
    assert f1 == pytest.approx((2 / 3 + 1) / 2)
    assert value("calibration_error", output[:1], y[:1], loss=LOSSES["bce"]) == 1.0
    mask, truth = torch.full((1, 2, 2), math.nan).double(), torch.tensor([[[1, 0], [0, 0]]])
    assert value("iou", mask, truth, loss=LOSSES["bce"]) == 0.0
    assert value("dice", mask, 0 * truth, loss=LOSSES["bce"], classes=2) == 0.0
    tokens = torch.tensor([[[math.nan, 1.0], [0.0, 1.0]]]).double()
    loss = LOSSES["token_cross_entropy"]
    assert value("token_accuracy", tokens, torch.tensor([[0, 1]]), loss=loss) == 0.5


def test_of_equal_scores_the_first_class_ranks_first() -> None:
    output, y = torch.zeros(4, 5).double(), torch.tensor([0, 1, 2, 4])
    names = ["accuracy", "confusion", "top2", "top3", "top(k=4)"]
    scores = scores_of(names, output, y)[0]
    assert [scores[name] for name in ("accuracy", "confusion")] == [0.25, 0.25]
    assert [scores[name] for name in ("top2", "top3", "top4")] == [0.5, 0.75, 0.75]


def test_examples_that_are_wholly_ignored_do_not_count() -> None:
    for loss, output, y, names in (
        ("token_cross_entropy", draw(8, 5, 7), labels(40, 7).view(8, 5), ["perplexity"]),
        ("cross_entropy", draw(8, 3, 4, 4), labels(128, 3).view(8, 4, 4), ["accuracy", "dice"]),
        ("cross_entropy", draw(8, 3), labels(8, 3), ["auroc", "macro_f1"]),
        ("bce", draw(8, 3), labels(24, 2).view(8, 3), ["accuracy", "auroc", "macro_f1"]),
    ):
        names = [*names, "calibration_error"] if loss == "cross_entropy" else names
        expected = scores_of(names, output[:6], y[:6], LOSSES[loss], classes=7)[0].values
        y[6:] = -100
        found = scores_of(names, output, y, LOSSES[loss], classes=7)[0].values
        if y.ndim == 1:  # data without the only label of an example are refused
            del found["loss"], expected["loss"]
        assert found == pytest.approx(expected, rel=1e-12), loss


def test_areas_are_not_defined_for_one_class_alone() -> None:
    output = draw(9, 2)
    for y in (torch.zeros(9, dtype=torch.int64), torch.ones(9, dtype=torch.int64)):
        assert math.isnan(value("auroc", output, y, classes=2))
    assert value("auprc", output, torch.ones(9, dtype=torch.int64)) == 1.0
    assert math.isnan(value("sensitivity", output, torch.zeros(9, dtype=torch.int64), classes=2))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_sensitivity_at_a_specificity_is_that_of_the_curve(share: float) -> None:
    output, y = draw(150, 2), labels(150, 2)
    alarms, hits, _ = sk.roc_curve(y, output.softmax(1)[:, 1])
    expected = hits[1 - alarms >= share - 1e-12].max()
    found = value(f"sensitivity(at_specificity={share})", output, y)
    assert found == pytest.approx(expected, rel=1e-12)


def test_calibration_error_is_that_of_torchmetrics() -> None:
    for classes in (2, 5):
        output, y = 2 * draw(300, classes), labels(300, classes)
        other = torchmetrics.CalibrationError("multiclass", num_classes=classes, n_bins=15)
        expected = float(other(output.softmax(1), y))
        assert value("calibration_error", output, y) == pytest.approx(expected, rel=1e-5)


def test_several_labels_for_each_example() -> None:
    output, y = draw(120, 4), (draw(120, 4, seed=3) > 0.5).double()
    found = (output > 0).long()
    scores = scores_of(["accuracy", "macro_f1", "auroc"], output, y, LOSSES["bce"], classes=2)[0]
    assert scores["accuracy"] == pytest.approx(float((found == y).double().mean()))
    assert scores["macro_f1"] == pytest.approx(sk.f1_score(y, found, average="macro"), rel=1e-12)
    assert scores["auroc"] == pytest.approx(sk.roc_auc_score(y, output), rel=1e-12)


# ---- quantities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 3), (2,)])
def test_metrics_of_quantities_are_those_of_scikit_learn(shape: tuple[int, ...]) -> None:
    output, y = draw(*shape), 3 * draw(*shape, seed=5) + 20
    expected = {
        "mae": sk.mean_absolute_error(y, output),
        "r2": sk.r2_score(y.numpy(), output.numpy()),
        "loss": sk.mean_squared_error(y, output),
    }
    rmse = float(sk.mean_squared_error(y, output) ** 0.5)
    scores = scores_of(["mae", "rmse", "r2"], output, y, LOSSES["mse"])[0]
    assert scores.values == pytest.approx({**expected, "rmse": rmse}, rel=1e-11)


def test_r2_of_quantities_that_are_far_from_0() -> None:
    y = draw(60, 2, seed=5) + torch.tensor([1e8, -3e9])
    output = y + 0.3 * draw(60, 2)
    expected = sk.r2_score(y.numpy(), output.numpy())
    for size in (1, 7, 60):
        assert value("r2", output, y, loss=LOSSES["mse"], size=size) == pytest.approx(expected)
    nodes = of_nodes(["r2"], output, y, LOSSES["mse"], 0)
    assert nodes["r2"] == pytest.approx(expected)


def test_r2_of_a_quantity_that_does_not_vary() -> None:
    y = torch.full((5,), 0.1, dtype=torch.float64)
    assert value("r2", y.clone(), y, loss=LOSSES["mse"]) == 1.0 == sk.r2_score(y.numpy(), y.numpy())
    assert value("r2", y + 1, y, loss=LOSSES["mse"]) == 0.0 == sk.r2_score(y.numpy(), y.numpy() + 1)
    assert math.isnan(value("r2", y[:1], y[:1], loss=LOSSES["mse"]))


# ---- masks, tokens, times -----------------------------------------------------------------------


def test_overlap_of_masks() -> None:
    output, y = draw(11, 6, 5), (draw(11, 6, 5, seed=8) > 0).long()
    y[3], output[3] = 0, -1.0  # neither has a place
    found = (output > 0).long().flatten(1).numpy()
    truth = y.flatten(1).numpy()
    flat = truth.ravel(), found.ravel()
    each = [
        of_sklearn(sk.f1_score, a, b, zero_division=1.0) for a, b in zip(truth, found, strict=True)
    ]
    names = ["dice", "dice(pooled=True)", "iou(pooled=True)", "accuracy"]
    scores = scores_of(names, output, y, LOSSES["dice"], size=4)[0]
    assert scores["dice"] == pytest.approx(np.mean(each), rel=1e-12)
    assert scores["dice(pooled=True)"] == pytest.approx(sk.f1_score(*flat))
    assert scores["iou(pooled=True)"] == pytest.approx(sk.jaccard_score(*flat))
    assert scores["accuracy"] == pytest.approx((found == truth).mean(), rel=1e-12)


def test_overlap_of_several_classes() -> None:
    output, y = draw(9, 3, 4, 4), labels(9 * 16, 3).view(9, 4, 4)
    found = output.argmax(dim=1).flatten().numpy()
    expected = sk.f1_score(y.flatten().numpy(), found, average="macro", labels=[1, 2])
    scores = scores_of(["dice(pooled=True)"], output, y)[0]
    assert scores["dice(pooled=True)"] == pytest.approx(expected, rel=1e-12)


def test_metrics_of_tokens_do_not_count_the_ignored_ones() -> None:
    output, y = draw(8, 5, 7), labels(40, 7).view(8, 5)
    y[2, 1:] = y[6] = -100
    counted = (y != -100).flatten()
    flat, truth = output.flatten(0, 1)[counted], y.flatten()[counted]
    scores = scores_of(["perplexity", "token_accuracy"], output, y, LOSSES["token_cross_entropy"])[
        0
    ]
    nll = sk.log_loss(truth, flat.softmax(1), labels=range(7))
    assert scores["perplexity"] == pytest.approx(math.exp(nll), rel=1e-12)
    assert scores["token_accuracy"] == pytest.approx(
        float((flat.argmax(1) == truth).double().mean())
    )


def mean_square_of_risk(output: Tensor, y: Tensor) -> Tensor:
    return output.square().mean(dim=1)


def pairs(risk: Tensor, time: Tensor, event: Tensor) -> float:
    """Return the concordance, pair by pair."""
    right = total = 0.0
    for i in range(len(time)):
        for j in range(len(time)):
            ends_later = time[j] > time[i] or (time[j] == time[i] and not event[j])
            if event[i] and ends_later:
                total += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right / total if total else math.nan


def test_concordance_of_many_takes_no_square_of_them() -> None:
    y = torch.stack([draw(200_000, seed=2).abs(), (labels(200_000, 3) > 0).double()], dim=1)
    risk = draw(200_000, 1) - y[:, :1]
    assert 0.5 < value("concordance", risk, y, loss=mean_square_of_risk, size=200_000) < 1


def test_concordance_counts_ties_and_ends_of_observation() -> None:
    risk = torch.round(2 * draw(40)) / 2
    time, event = labels(40, 9).double(), (labels(40, 3, seed=4) > 0).double()
    y = torch.stack([time, event], dim=1)
    found = value("concordance", risk[:, None], y, loss=LOSSES["cox"])
    assert found == pytest.approx(pairs(risk, time, event), rel=1e-12)
    risk[::3] = math.nan  # which orders no pair
    found = value("concordance", risk[:, None], y, loss=LOSSES["cox"])
    assert found == pytest.approx(pairs(risk, time, event), rel=1e-12)
    y[:, 1] = 0
    assert math.isnan(value("concordance", risk[:, None], y, loss=LOSSES["cox"]))


# ---- a loss that is one number for a batch ------------------------------------------------------


def mean_loss(scores: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, y)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]).double())
SMOOTHED = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]).double(), label_smoothing=0.1)
IGNORING = nn.CrossEntropyLoss(ignore_index=0)


@pytest.mark.parametrize("loss", [mean_loss, WEIGHTED, SMOOTHED, IGNORING])
def test_a_loss_that_is_a_mean_is_that_of_all_examples_of_a_group(loss: Loss) -> None:
    output, y = draw(40, 3), torch.arange(40) % 5 % 3
    y[:7] = 0  # a first batch without a label that counts
    group = torch.tensor([2] * 12 + [0] * 28)
    for size in (40, 13, 7, 1):
        total = scores_of(None, output, y, loss, size=size)[0]
        assert total["loss"] == pytest.approx(float(loss(output, y)), rel=1e-12)
        by_group = scores_of(None, output, y, loss, size=size, group=group)
        assert [scores.examples for scores in by_group] == [28, 0, 12]
        assert math.isnan(by_group[1]["loss"])
        for g in (0, 2):
            expected = float(loss(output[group == g], y[group == g]))
            assert by_group[g]["loss"] == pytest.approx(expected, rel=1e-12)


# ---- metrics of one's own, and of torchmetrics --------------------------------------------------


def test_a_function_with_a_value_for_each_example_is_a_metric() -> None:
    output, y = draw(20, 1), draw(20, seed=2)

    def error(output: Tensor, y: Tensor) -> Tensor:
        return (output[:, 0] - y).abs()

    scores = scores_of([error, metric(error, name="worse")], output, y, LOSSES["mse"])[0]
    expected = sk.mean_absolute_error(y, output)
    assert (scores["error"], scores["worse"]) == pytest.approx((expected, expected))


def test_metrics_of_torchmetrics_of_one_score_for_each_example() -> None:
    """The model returns [N, 1]; quantities and labels are [N]."""
    output, y = draw(40, 1), draw(40, seed=5)
    scores = scores_of([torchmetrics.MeanAbsoluteError()], output, y, LOSSES["mse"])[0]
    expected = sk.mean_absolute_error(y, output)
    assert scores["MeanAbsoluteError"] == pytest.approx(expected, rel=1e-6)
    y = labels(40, 2)
    scores = scores_of([torchmetrics.AUROC("binary")], output, y, LOSSES["bce"], classes=2)[0]
    assert scores["BinaryAUROC"] == pytest.approx(sk.roc_auc_score(y, output), rel=1e-6)


def test_metrics_of_torchmetrics_by_sums_and_by_all_examples() -> None:
    output, y = draw(50, 3), labels(50, 3)
    by_sums = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
    by_all = torchmetrics.AUROC("multiclass", num_classes=3)  # keeps every score
    _, metrics = metric_set([by_sums, by_all], output, y, LOSSES["cross_entropy"], 3)
    assert [m.name for m in metrics.pooled] == ["MulticlassAUROC"]
    group = torch.arange(50) % 3
    found = scores_of([by_sums, by_all], output, y, group=group, size=6)
    for g, scores in enumerate(found):
        rows = group == g
        for one in (by_sums, by_all):
            one.reset()
            expected = float(one(output[rows], y[rows]))
            assert scores[type(one).__name__] == pytest.approx(expected, rel=1e-5)


def test_measuring_needs_no_tape() -> None:
    network, metrics = metric_set(None, draw(4, 3), labels(4, 3), LOSSES["cross_entropy"], 3)
    group = torch.zeros(4, dtype=torch.int64)
    predict = partial(network.test_output, network.params, {})
    measured = metrics.measure(predict, draw(4, 3), labels(4, 3), group, 1)
    assert not measured.states.requires_grad


# ---- sums add up, and only sums -----------------------------------------------------------------

CASES: dict[str, tuple[Tensor, Tensor, str]] = {
    "labels": (draw(90, 4), labels(90, 4), "cross_entropy"),
    "two": (draw(90, 2), labels(90, 2), "cross_entropy"),
    "quantities": (draw(90, 2), draw(90, 2, seed=3), "mse"),
    "masks": (draw(90, 4, 4), (draw(90, 4, 4, seed=4) > 0).long(), "bce"),
    "tokens": (draw(90, 3, 5), labels(270, 5).view(90, 3), "token_cross_entropy"),
    "times": (draw(90, 1), torch.stack([draw(90, seed=6).abs(), labels(90, 2).double()], 1), "cox"),
}


def fitting(case: str) -> list[str]:
    output, y, loss = CASES[case]
    names = []
    for name in METRICS:
        try:
            metric_set([name], output, y, LOSSES[loss], 0 if y.is_floating_point() else 4)
        except (ModelError, ValueError, RuntimeError):
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("case", CASES)
def test_metrics_do_not_depend_on_batches_or_their_order(case: str) -> None:
    output, y, loss = CASES[case]
    classes = 0 if y.is_floating_point() else (2 if case in ("two", "masks") else 4)
    names = [n for n in fitting(case) if classes != 4 or n not in ("sensitivity", "specificity")]
    assert names
    whole = scores_of(names, output, y, LOSSES[loss], classes, size=90)[0]
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    for size, rows in ((1, torch.arange(90)), (17, torch.arange(90)), (31, order)):
        scores = scores_of(names, output[rows], y[rows], LOSSES[loss], classes, size=size)[0]
        assert scores.values == pytest.approx(whole.values, rel=1e-11, nan_ok=True)


def test_every_metric_is_tried_on_a_case() -> None:
    tried = {name for case in CASES for name in fitting(case)}
    assert tried == set(METRICS)


recalls = partial(torchmetrics.Recall, "multiclass", num_classes=3)
rocs = partial(torchmetrics.ROC, "multiclass", num_classes=3)

# ---- refusals -----------------------------------------------------------------------------------


@each(
    ("given", "output", "y", "words"),
    [
        (["accuracy"], draw(4, 1), draw(4), "'accuracy' needs labels"),
        (["acuracy"], draw(4, 2), labels(4, 2), "did you mean 'accuracy'"),
        (["top(5)"], draw(4, 9), labels(4, 9), "write each argument as name=value"),
        (["top(n=5)"], draw(4, 9), labels(4, 9), "The arguments of the metric"),
        (["sensitivity"], draw(4, 3), torch.tensor([0, 1, 2, 0]), "is of two classes"),
        (["dice"], draw(4, 2), labels(4, 2), "is of masks"),
        (["perplexity"], draw(4, 2), labels(4, 2), "is of tokens"),
        (["concordance"], draw(4, 1), draw(4), "times until an event"),
        (["mae", "mae"], draw(4, 1), draw(4), "Two metrics have the name 'mae'"),
        (["confusion"], draw(4, 20_000), labels(4, 20_000), "'confusion' keeps too much"),
        (
            [recalls(average=None)],
            draw(4, 3),
            torch.tensor([0, 1, 2, 0]),
            "does not give one number",
        ),
        ([rocs()], draw(4, 3), torch.tensor([0, 1, 2, 0]), "does not give one number"),
        ([rocs(thresholds=5)], draw(4, 3), torch.tensor([0, 1, 2, 0]), "does not give one number"),
        (["auroc(bins=0)"], draw(4, 2), labels(4, 2), "'bins' is a number of bins"),
        ([7], draw(4, 1), draw(4), "This is not a metric"),
        ([lambda output, y: output.mean()], draw(4, 1), draw(4), "not one number for each example"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(
    given: list[Any], output: Tensor, y: Tensor, words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        scores_of(given, output, y, LOSSES["mse"] if y.is_floating_point() else mean_loss)
    text = str(caught.value)
    assert words in text
    assert len(text.splitlines()) <= 5


def test_a_score_that_is_no_metric_is_refused() -> None:
    output, y = draw(4, 1), draw(4)
    network = network_of(LOSSES["mse"], output, y)
    with pytest.raises(ModelError, match="The score 'mse' is not a metric of the task"):
        make_metric_set(network, ["mae"], "mse", TaskInfo((1,), (), 0), output, y)


@each("unit", ["m" * 13, " mm", "m\nm", 3, None])
def test_the_unit_of_a_metric_is_a_short_text(unit: Any) -> None:
    with pytest.raises(ModelError, match="not a short text"):
        metric(lambda output, y: y, unit=unit)
    with pytest.raises(ModelError, match="not a short text"):
        make_metric(SumMetric("own", lambda output, y: output, unit=unit), TaskInfo((3,), (), 3))


def test_an_example_without_a_value_is_left_out_of_the_mean_of_a_users_metric() -> None:
    output, y = draw(9, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    gone = torch.where(y == 2, torch.nan, output[:, 0])
    group = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 1])  # group 1 has no example with a value
    own = [metric(lambda output, y: torch.where(y == 2, torch.nan, output[:, 0]), name="own")]
    one, two = scores_of(own, output, y, size=2, group=group)
    assert one["own"] == pytest.approx(float(gone[(group == 0) & (y < 2)].mean()))
    assert math.isnan(two["own"])
    assert math.isfinite(two["loss"])


def test_no_loss_that_is_not_a_number_is_left_out() -> None:
    output, y = draw(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    output[1] = torch.nan
    assert math.isnan(scores_of([], output, y)[0]["loss"])


@each("values", [[True, False, True], [1, 0, 1], [0.1, 0.7, 0.3]])
def test_a_users_metric_has_the_bits_of_a_mean(values: list[Any]) -> None:
    own = metric(lambda output, y: torch.tensor(values)[y], name="own")
    of_each = torch.tensor(values).double()
    found = value(own, draw(6, 3), torch.tensor([0, 1, 2, 0, 1, 2]), size=3)
    assert found == 2 * sum(of_each.tolist()) / 6
