"""Membership is told of an overfitted model, and not of noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedkeel as fk
from fedkeel.study.audit.attacks import ATTACKS
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.membership import lira_scores, matched, separation, update_scores
from fedkeel.study.audit.observation import overhear
from fedkeel.study.audit.shadow import half_of_each_client, lira
from study.audit.conftest import Arrays, prepared

QUIET = lambda _: None  # noqa: E731


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
