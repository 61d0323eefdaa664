"""An attacker who knows FedReg: its step, made on examples, is what the client has sent."""

from __future__ import annotations

import pytest
import torch

from each import each
from fedkeel import config, tree
from fedkeel.config import build
from fedkeel.study.audit.attacks import ATTACKS
from fedkeel.study.audit.case import Case
from fedkeel.study.audit.matching import GradientModel
from fedkeel.study.audit.observation import overhear
from fedkeel.study.audit.simulated import FedRegModel
from study.audit.conftest import Arrays, prepared

FEDREG = "fedsgd+fedreg(gamma=0.4, eta_s=0.03, mg=True)"


def case(digits: Arrays, method: str = FEDREG, **settings: object) -> Case:
    """An attack on client 0, which has two examples, or so many."""
    count = int(str(settings.pop("examples", 2)))
    local = {"lr": 0.1, "epochs": 1, "batch_size": "all", **settings.pop("local", {})}  # type: ignore[dict-item]
    x, y = digits
    clients = [(x[:count], y[:count]), (x[20:24], y[20:24])]
    test = (x[100:200], y[100:200])
    run = prepared(method, clients, test, local=local, engine={"dtype": "float64"})
    return Case(overhear(run, 2), build(config.Audit, {"tries": 1, **settings}, "audit"), 0)


def distance(model: GradientModel, made: Case) -> float:
    """How far what the true examples give is from what was seen, relative to that."""
    with torch.enable_grad():
        found = model(made.originals.double(), made.labels)
    apart = tree.sub({k: v.detach() for k, v in found.items()}, model.target)
    return float((tree.dot(apart, apart) / tree.dot(model.target, model.target)).sqrt())


@each(
    "method", [FEDREG, "fedsgd+fedreg(mg=False)", "fedreg(eta_s=0.05, mg=True, pairing='position')"]
)
def test_the_step_of_the_true_examples_is_what_was_sent(digits: Arrays, method: str) -> None:
    made = case(digits, method)
    assert isinstance(made.model, FedRegModel)
    assert distance(made.model, made) < 1e-9
    assert distance(GradientModel(made.seen), made) > 1e-2


def test_the_examples_can_be_moved_by_it(digits: Arrays) -> None:
    """The derivative is that of finite differences, where no sign of the pseudo data changes."""
    made = case(digits, examples=1, method="fedsgd+fedreg(gamma=0.4, eta_s=1e-4, mg=True)")
    x = made.originals.double() + 0.01
    weights = {k: torch.randn_like(v) for k, v in made.model.target.items()}

    def value(at: torch.Tensor) -> torch.Tensor:
        return tree.dot(made.model(at, made.labels), weights)

    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(value(leaf), leaf)
        step = 1e-6 * torch.randn_like(x)
        moved = float(value(x + step).detach() - value(x - step).detach()) / 2
    assert moved == pytest.approx(float((slope * step).sum()), rel=1e-4)


def test_who_does_not_know_it_or_cannot_make_it_matches_the_gradient(digits: Arrays) -> None:
    for more in (
        {"adaptive": False},
        {"view": "sum"},
        {"method": "fedreg(mg=True)", "local": {"epochs": 3}},
        {"method": FEDREG, "local": {"momentum": 0.5}},
        {"method": f"{FEDREG}+fedprox"},
        {"method": "fedsgd"},
    ):
        assert case(digits, **more).simulated is None


def test_the_page_says_what_the_attacker_knows(digits: Arrays) -> None:
    made = case(digits, examples=1, lbfgs=1)
    assert "FedReg and its numbers" in ATTACKS["dlg"](made, lambda _: None).knows
    plain = case(digits, examples=1, lbfgs=1, adaptive=False)
    assert "FedReg" not in ATTACKS["dlg"](plain, lambda _: None).knows
