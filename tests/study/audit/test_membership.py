"""Membership is told of an overfitted model, and not of noise."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel import config
from fedkeel.records.audit import auc_interval, largest_auc
from fedkeel.runner.prepare import prepare
from fedkeel.study.arguments import checked_ingredients
from fedkeel.study.audit.attacks import ATTACKS
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.membership import lira_scores, matched, separation, update_scores
from fedkeel.study.audit.observation import overhear
from fedkeel.study.audit.shadow import half_of_each_client, lira
from study.audit.conftest import Arrays, prepared

QUIET = lambda _: None  # noqa: E731
LOCAL = {"lr": 0.1, "epochs": 2, "batch_size": 16}


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@pytest.fixture(scope="module")
def overfitted(digits: Arrays) -> Case:
    """A model that knows 40 digits with random labels by heart."""
    x, y = digits
    y = np.random.default_rng(0).permutation(y)
    local = {"lr": 0.5, "steps": 300, "batch_size": 20}
    run = prepared("fedavg", [(x[:40], y[:40])], (x[40:], y[40:]), wide, local=local)
    return Case(overhear(run, 1), fk.Audit(), 0)


def test_an_overfitted_model_tells_by_the_loss(overfitted: Case) -> None:
    numbers = ATTACKS["loss"](overfitted, QUIET).numbers
    assert numbers["auc"] > 0.95
    assert numbers["members"] == 40
    assert numbers["tpr_at_1%"] > 0.5


def test_an_update_tells_and_noise_in_its_place_does_not(digits: Arrays) -> None:
    x, y = digits
    run = prepared("fedsgd", [(x[:20], y[:20]), (x[20:99], y[20:99])], (x[99:], y[99:]), wide)
    seen = overhear(run, 1).client(0)
    test = torch.from_numpy(x[99:299]), torch.from_numpy(y[99:299])
    own = torch.from_numpy(x[:20]), torch.from_numpy(y[:20])
    random = torch.Generator().manual_seed(0)
    noise = {k: torch.randn(g.shape, generator=random) for k, g in seen.gradient.items()}
    aucs = []
    for gradient in (seen.gradient, noise):
        inside, outside = (
            update_scores(seen.network, seen.params, seen.buffers, gradient, *examples)
            for examples in (own, test)
        )
        aucs.append(separation(inside, outside).auc)
    assert aucs[0] > 0.7
    assert 0.35 < aucs[1] < 0.65


def test_others_have_the_labels_of_the_members() -> None:
    member, other = np.array([3, 3, 3, 5]), np.array([0, 1, 3, 5, 3, 5, 3, 3, 3, 3, 9])
    ours, theirs = matched(member, other, 100, np.random.default_rng(0))
    assert sorted(member[ours]) == [3, 3, 3, 5]
    assert sorted(other[theirs]) == [3] * 6 + [5] * 2
    theirs, ours = matched(other, member, 100, np.random.default_rng(0))
    assert (len(theirs), len(ours)) == (8, 4), "members may be the more, too"
    ours, theirs = matched(np.arange(50), np.arange(50), 20, np.random.default_rng(0))
    assert len(ours) == 20
    assert sorted(ours) == sorted(theirs)


def hospitals(**settings: Any) -> Case:
    """Two clients whose inputs differ, the smaller one attacked; the test set has both."""
    random = np.random.default_rng(0)

    def examples(client: int, count: int) -> Arrays:
        x = random.normal(3.0 * client, size=(count, 4)).astype(np.float32)
        return x, (random.random(count) < 0.9).astype(np.int64)

    pairs = {"A": examples(0, 160), "B": examples(1, 99)}
    test = tuple(
        np.concatenate(both) for both in zip(examples(0, 200), examples(1, 200), strict=True)
    )
    run = config.build(config.Run, {"method": "fedavg", "rounds": 1, "local": LOCAL}, "run")
    clients = fk.from_clients(pairs, classes=2, **settings)
    task = fk.Task(lambda: nn.Linear(4, 2))
    return Case(overhear(prepare(run, checked_ingredients(task, clients, test)), 1), fk.Audit(), 1)


def test_a_client_that_differs_is_no_member_that_is_told() -> None:
    """Beside examples of other clients an attack tells the client, which is not membership."""
    apart = ATTACKS["updates"](hospitals(), QUIET)
    own = ATTACKS["updates"](hospitals(holdout=0.4), QUIET)
    assert (apart.numbers["others_alike"], own.numbers["others_alike"]) == (0.0, 1.0)
    assert apart.numbers["auc_low"] > 0.6
    assert own.numbers["auc_low"] < 0.5 < own.numbers["auc_high"]
    assert "test examples of any client" in apart.budget
    assert "held-out examples of the same client" in own.budget
    assert own.target.startswith("client B: ")


def test_of_several_clients_each_is_compared_with_its_own() -> None:
    case = hospitals(holdout=0.4)
    case = replace(case, settings=fk.Audit(view="release"), client=-1)
    ours, theirs = matched(*case.kinds, 500, np.random.default_rng(0))
    members, others = (
        np.bincount(kinds[at] // 2) for kinds, at in zip(case.kinds, (ours, theirs), strict=True)
    )
    assert len(members) == 2
    assert members[0] * others[1] == members[1] * others[0], "the same share of each client"
    assert not np.isin(case.others.rows, case.seen.all_rows).any()


def test_an_interval_leaves_chance_out_where_mann_and_whitney_do() -> None:
    for m, n in ((73, 73), (50, 25), (3, 400)):
        error = math.sqrt((m + n + 1) / (12 * m * n))
        assert auc_interval(0.5 + 1.96 * error, [(m, n)])[0] == pytest.approx(0.5, abs=1e-5)
        low, high = auc_interval(0.5 - 1.96 * error, [(m, n)])
        assert high == pytest.approx(0.5, abs=1e-5)
        wide = auc_interval(0.5 - 1.96 * error, [(m, n)], 0.99)
        assert wide[0] < low < high < wide[1]
    assert auc_interval(1.0, [(1, 8)])[0] < 0.5, "one member that is ahead may be so by chance"
    one, four = (auc_interval(0.7, [(40, 40)] * count) for count in (1, 4))
    assert four[1] - four[0] == pytest.approx((one[1] - one[0]) / 2, rel=0.05)


def test_intervals_have_the_true_area_as_often_as_they_say() -> None:
    random, hits = np.random.default_rng(0), 0
    area = NormalDist().cdf(1.0 / math.sqrt(2.0))
    for _ in range(300):
        found = separation(random.normal(1.0, size=30), random.normal(size=20))
        hits += found.interval[0] <= area <= found.interval[1]
    assert 0.92 <= hits / 300 <= 0.99


def test_the_bound_of_a_budget_is_the_area_below_both_of_its_lines() -> None:
    for epsilon, delta in ((0.513, 1e-5), (0.0, 0.1), (3.0, 0.01)):
        false = np.linspace(0.0, 1.0, 200_001)
        growth = np.exp(epsilon)
        true = np.minimum(growth * false + delta, 1.0 - (1.0 - delta - false) / growth)
        area = float(np.trapezoid(np.minimum(true, 1.0), false))
        assert largest_auc(epsilon, delta) == pytest.approx(area, abs=1e-6)
    assert largest_auc(1e6, 0.0) == 1.0


def test_rates_of_scores_by_hand() -> None:
    members, others = np.array([3.0, 2.0, 0.5, 4.0]), np.arange(100) / 50.0  # below 2
    split = separation(members, others)
    assert split.true_positives[0.01] == 0.75
    assert split.true_positives[0.001] is None  # a hundred others cannot show it
    assert split.auc == pytest.approx((3 + 0.255) / 4)
    tenth = separation(np.array([1.79]), others)  # ten others are above it
    assert (tenth.true_positives[0.1], tenth.true_positives[0.01]) == (1.0, 0.0)


def test_likelihood_ratios_of_noise_are_chance() -> None:
    random = np.random.default_rng(0)
    confidence = random.normal(size=(8, 500))
    member = random.permuted(np.tile([True, False], (500, 4)), axis=1).T
    scores, truth = lira_scores(confidence, member)
    assert 0.45 < separation(scores[truth], scores[~truth]).auc < 0.55
    scores, truth = lira_scores(confidence + 2.0 * member, member)
    assert separation(scores[truth], scores[~truth]).auc > 0.85


def test_halves_are_of_each_client(digits: Arrays) -> None:
    x, y = digits
    whole = fk.from_clients([(x[:9], y[:9]), (x[9:13], y[9:13])], classes=10)
    half = half_of_each_client(whole, np.random.default_rng(0))
    assert half.sizes.tolist() == [5, 2]
    assert set(half.client(1)) < set(whole.client(1))


def test_shadow_runs_tell_an_overfitted_model(digits: Arrays) -> None:
    x, y = digits
    y = np.random.default_rng(0).permutation(y)
    clients = [(x[:30], y[:30]), (x[30:60], y[30:60])]
    local = {"lr": 0.5, "steps": 30, "batch_size": 15}
    run = prepared("fedavg", clients, (x[60:99], y[60:99]), wide, local=local)
    split = lira(run, 2, 5, seed=0)
    assert split.auc > 0.75
    assert 200 < split.members + split.others <= 5 * 60  # without those that all others have
