"""What is inverted is what was sent: exact where it can be, and near where it is searched for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.functional.image import peak_signal_noise_ratio

import fedkeel as fk
from fedkeel import tree
from fedkeel.runner.start import start
from fedkeel.study.audit import linear
from fedkeel.study.audit.attacks import ATTACKS
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.constrained import find_cgc, hidden_by_cgc
from fedkeel.study.audit.linear import whole_counts
from fedkeel.study.audit.matching import GradientModel
from fedkeel.study.audit.observation import overhear
from fedkeel.study.audit.quality import Units, compare, psnr
from study.audit.conftest import Arrays, prepared

QUIET = lambda _: None  # noqa: E731


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def case(run: object, client: int = 0, round: int = 1, **settings: object) -> Case:
    return Case(overhear(run, round), fk.Audit(round=round, **settings), client)


def test_what_is_overheard_is_what_the_run_sends(digits: Arrays) -> None:
    x, y = digits
    clients = [(x[:7], y[:7]), (x[7:30], y[7:30])]
    run = prepared("fedavg", clients, (x[:9], y[:9]), model=mlp)
    heard = overhear(run, 2)
    rows = start(run).rows
    assert heard.message.round == 1
    total, whole = heard.sum().update, heard.release().update
    for name, value in total.items():
        torch.testing.assert_close(value, whole[name])
        expected = (7 * heard.client(0).update[name] + 23 * heard.client(1).update[name]) / 30
        torch.testing.assert_close(value, expected)
    assert heard.record.train_loss == rows[2].train_loss
    assert [len(r) for r in heard.rows] == [7, 23]


def test_one_input_divided_out_of_a_linear_layer_is_exact(digits: Arrays) -> None:
    x, y = digits
    run = prepared("fedsgd", [(x[:1], y[:1]), (x[1:9], y[1:9])], (x[9:99], y[9:99]), model=mlp)
    result = ATTACKS["linear"](case(run), QUIET)
    assert result.numbers["psnr"] > 90.0
    assert result.numbers["recovered"] == 1.0
    assert len(result.pictures) == 1


def test_the_label_of_one_example_is_read(digits: Arrays) -> None:
    x, y = digits
    clients = [(x[k : k + 1], y[k : k + 1]) for k in range(12)]
    run = prepared("fedsgd", clients, (x[20:99], y[20:99]), model=mlp)
    heard = overhear(run, 1)
    for k in range(12):
        weight, bias = linear.last_layer(heard.client(k).gradient, 10)
        assert linear.single_label(weight, bias) == y[k]
        assert linear.single_label(weight, None) == y[k]


def test_counts_of_labels_are_near(digits: Arrays) -> None:
    """Before training scores hardly depend on the input, so that counts are nearly exact."""
    x, y = digits
    chosen = np.flatnonzero(np.isin(y, [2, 7]))[:40]
    run = prepared("fedsgd", [(x[chosen], y[chosen])], (x[900:], y[900:]), model=mlp)
    result = ATTACKS["labels"](case(run), QUIET)
    assert result.numbers["labels_right"] >= 0.8
    assert result.numbers["total_variation"] < 0.25 * result.numbers["total_variation_of_even"]


def test_whole_counts_add_up() -> None:
    assert whole_counts(np.zeros(3), 4).sum() == 4
    assert whole_counts(np.array([0.0, 1.0, 0.0]), 5).tolist() == [0, 5, 0]


def test_dlg_brings_a_digit_back(digits: Arrays) -> None:
    x, y = digits
    run = prepared("fedsgd", [(x[3:4], y[3:4])], (x[20:99], y[20:99]))
    result = ATTACKS["dlg"](case(run, lbfgs=60, tries=1), QUIET)
    assert result.numbers["psnr"] > 30.0
    assert result.numbers["psnr_of_others"] < 20.0


@pytest.mark.slow
def test_adam_brings_a_digit_nearer_than_others(digits: Arrays) -> None:
    x, y = digits
    run = prepared("fedsgd", [(x[3:4], y[3:4])], (x[20:99], y[20:99]))
    result = ATTACKS["cosine"](case(run, iterations=200), QUIET)
    assert result.numbers["psnr"] > result.numbers["psnr_of_others"] + 5.0
    assert "200 steps (FedReg's attack has 32,000)" in result.budget


@pytest.mark.slow
def test_noise_on_the_update_is_in_the_way(digits: Arrays) -> None:
    x, y = digits
    run = prepared("fedsgd+dpsgd(sigma=0.1)", [(x[3:4], y[3:4])], (x[20:99], y[20:99]))
    result = ATTACKS["dlg"](case(run, lbfgs=5, tries=1), QUIET)
    assert result.numbers["psnr"] < 20.0


@pytest.fixture(scope="module")
def projected(digits: Arrays) -> object:
    """FedGC in a round in which the projection binds: three digits against each other."""
    x, y = digits
    clients = [(x[k : k + 1], y[k : k + 1]) for k in (0, 1, 2)]
    run = prepared("fedsgd+fedgc.cgc(margin=1.0)", clients, (x[20:99], y[20:99]), weights="uniform")
    return run, overhear(run, 2)


def test_fedgc_hides_one_direction_a_group(projected: object) -> None:
    """What is sent differs from the plain gradient only along z, where the constraint binds."""
    run, heard = projected
    seen = heard.client(0)
    part = find_cgc(run.plan)
    hidden = hidden_by_cgc(part, seen)
    assert hidden.groups == 8
    assert 1 <= len(hidden.directions) <= 8
    model = GradientModel(seen)
    truth = Case(heard, fk.Audit(round=2), 0)
    plain = {k: g.detach() for k, g in model(truth.originals.double(), truth.labels).items()}
    difference = tree.sub(plain, model.target)
    bound = {name for direction in hidden.directions for name in direction.names}
    for name, value in difference.items():
        if name not in bound:
            assert float(value.norm()) < 1e-4 * float(plain[name].norm()) + 1e-6
    rest = difference
    for direction in hidden.directions:
        rest = direction.without(rest)
    assert float(tree.dot(rest, rest)) < 1e-6 * float(tree.dot(difference, difference))


def test_an_attacker_who_knows_fedgc_recovers_more(projected: object) -> None:
    _, heard = projected
    found = {}
    for adaptive in (False, True):
        settings = fk.Audit(round=2, lbfgs=10, tries=1, adaptive=adaptive)
        found[adaptive] = ATTACKS["dlg"](Case(heard, settings, 0), QUIET).numbers
    assert found[True]["psnr"] > 30.0
    assert found[True]["psnr"] > found[False]["psnr"] + 10.0
    assert found[True]["hidden_share"] > 0.0


def test_quality_is_that_of_torchmetrics() -> None:
    random = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 1, 8, 8, generator=random) for _ in range(2))
    units = Units(0.0, 1.0, torch.tensor(0.0), torch.tensor(1.0))
    compared = compare(a[[2, 0]] + 1e-3, a, units)
    assert sorted(compared.pairs) == [(0, 2), (1, 0)]
    assert compared.recovered == pytest.approx(2 / 3)
    expected = float(peak_signal_noise_ratio(a[0], b[0], data_range=1.0))
    assert psnr(float(((a[0] - b[0]) ** 2).mean()), 1.0) == pytest.approx(expected, rel=1e-5)
