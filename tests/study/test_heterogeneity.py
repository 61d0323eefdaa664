"""How clients differ, against numbers worked out by hand."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import pytest
import torch

from fedkeel.data.read.scaling import Moments
from fedkeel.study.doctor.heterogeneity import (
    label_skew,
    moment_skew,
    size_skew,
    tell_clients_apart,
)


def test_label_skew_of_two_clients_of_one_class_each() -> None:
    skew = label_skew(np.array([[3, 0], [0, 1]]))  # pooled (3/4, 1/4)
    assert skew.variation == pytest.approx((0.25 + 0.75) / 2)
    first = 0.5 * (math.log2(8 / 7) + 0.75 * math.log2(6 / 7) + 0.25 * 1.0)
    second = 0.5 * (math.log2(8 / 5) + 0.75 * 1.0 + 0.25 * math.log2(2 / 5))
    assert skew.divergence == pytest.approx((math.sqrt(first) + math.sqrt(second)) / 2)
    assert (skew.classes, skew.of_classes) == (1.0, 2)


def test_chance_explains_the_label_skew_of_samples_of_one_distribution() -> None:
    random = np.random.default_rng(0)
    histogram = random.multinomial(50, [0.1] * 10, size=400)
    skew = label_skew(histogram)
    assert skew.variation == pytest.approx(skew.by_chance, rel=0.02)
    assert skew.beyond_chance < 0.01


def test_clients_without_examples_do_not_count() -> None:
    assert label_skew(np.array([[2, 2], [0, 0], [3, 3]])).variation == 0.0
    assert size_skew([0, 5, 5]).gini == 0.0


def test_gini_is_its_definition() -> None:
    sizes = np.array([4, 1, 1, 10])
    expected = np.abs(sizes[:, None] - sizes).sum() / (2 * len(sizes) ** 2 * sizes.mean())
    skew = size_skew(sizes)
    assert skew.gini == pytest.approx(expected)
    assert (skew.ratio, skew.largest, skew.smallest) == (10.0, 10 / 16, 1)


def test_moments_give_the_distances_that_the_examples_give() -> None:
    random = np.random.default_rng(1)
    parts = [random.normal(shift, 1.0, (40, 3)) for shift in (0.0, 0.0, 2.0)]
    parts = [np.concatenate([part, np.ones((40, 1))], axis=1) for part in parts]  # one constant
    skew = moment_skew([Moments.of(torch.from_numpy(part)) for part in parts], [40] * 3)
    assert skew is not None
    together = np.concatenate(parts)[:, :3]
    means = np.stack([part[:, :3].mean(axis=0) for part in parts])
    scaled = (means - together.mean(axis=0)) / together.std(axis=0)
    assert skew.of_clients == pytest.approx(np.sqrt((scaled**2).mean(axis=1)))
    assert skew.between == pytest.approx((means.var(axis=0) / together.var(axis=0)).mean())
    assert skew.by_chance == pytest.approx(1 / math.sqrt(40))
    assert skew.of_columns[:3] == pytest.approx(np.sqrt((scaled**2).mean(axis=0)))
    assert (skew.of_columns[3], skew.constant) == (0.0, ())  # it varies nowhere
    still = [parts[0], parts[1].copy(), parts[2]]
    still[1][:, 0] = 5.0
    apart = moment_skew([Moments.of(torch.from_numpy(part)) for part in still], [40] * 3)
    assert apart is not None
    assert apart.constant == ((1, 0),)
    merged = reduce(Moments.merged, [Moments.of(torch.from_numpy(part)) for part in parts])
    assert merged.scale().mean[:3].numpy() == pytest.approx(together.mean(axis=0))


def test_clients_are_told_apart_by_their_inputs_and_not_by_their_labels() -> None:
    random = np.random.default_rng(2)
    clients, labels = np.repeat(np.arange(4), 80), np.repeat(np.arange(4) % 2, 80)
    x = random.normal(size=(320, 5))
    by_label = x + 5.0 * labels[:, None]  # two clients of each label
    shifted = by_label + 3.0 * np.eye(5)[clients]
    none, some = (tell_clients_apart(values, clients, labels, 0) for values in (by_label, shifted))
    assert none is not None
    assert some is not None
    assert none.by_chance == 0.25
    assert none.accuracy == pytest.approx(0.25, abs=0.08)
    assert some.accuracy > 0.85
    assert tell_clients_apart(shifted, clients, labels, 0) == some
    assert tell_clients_apart(x[:3], clients[:3], None, 0) is None
