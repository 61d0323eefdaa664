"""Every method passes the suite that every method has to pass."""

from __future__ import annotations

import pytest

from fedkeel.conformance import CHECKS, check_method
from fedkeel.method.registry import ALIASES, REGISTRY

GC = ("gcfed", "gcfed.global")
COMPOSITIONS = [
    "fedprox+gcfed",
    "fednova+fedgh",
    "fedprox+fedgh",
    "fedavg+gcfed.global",
    "fedprox+gcfed.global",
    "fedgc.cgc",
    "gradma.w",
    "gradma.s",
    "fedprox+momentum",
    "fedavg+fedgc.sgc",
    "gradma.w+gradma.s",
    "scaffold+momentum",
    "fedreg+fedgh",
    *(f"{one}+{gc}" for one in ("fedlc", "fedntd", "feddecorr", "fedsol") for gc in GC),
    "moon+momentum",
    "fedmlb+momentum",
    "fedlc+fedmlb",
    "mifa+momentum",
    "fedvarp+gcfed",
    "fedacg+fedprox",
    "mimelite+fedprox",
    "feddyn+mime",
    "moon+mime",
    "fedcurv+mime",
]
OPTIONS = [
    "fedreg(mg=True)",
    "fedreg(pairing='position')",
    "gradma.w(previous='start')",
    "gradma.s(memory=3)",
    "gradma.s(memory=0)",
    "fedgh(rule='inplace')",
    "fedgh(rule='printed')",
    "fedgh(rule='mutual')",
    "fedgh(groups='layer')",
    "gcfed(lam=0.5)",
    "fednova(length='steps')+fedreg",
    "fedprox+fednova(effective='steps')",
    "feddecorr(scale='paper')",
    "fedmlb(lambda1=0.5, begin='fc2')",
    "fedsol(adaptive=False)",
    "fedcurv(memory='round')",
    "mifa(start='wait')",
    "fedvarp(memory='update')",
    "dpsgd(clipped='batch')",
]


@pytest.mark.parametrize("expression", [*REGISTRY, *COMPOSITIONS, *OPTIONS])
def test_method(expression: str) -> None:
    checks = check_method(expression)
    assert [check.name for check in checks] == list(CHECKS)
    assert not any(check.failure for check in checks)


def test_a_choice_of_weights_is_checked_too() -> None:
    assert len(check_method("fedgh", weights="processed")) == len(CHECKS)


def test_every_alias_stands_for_an_entry() -> None:
    assert set(ALIASES.values()) <= set(REGISTRY)
