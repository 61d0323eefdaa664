"""Every method of the registry passes the checks that every method must pass."""

from __future__ import annotations

import pytest

from fedkeel.method.grammar import parse
from fedkeel.method.parts.index import ALIASES
from fedkeel.method.registry import REGISTRY
from fedkeel.method.roles import ROLES
from fedkeel.study.conformance import CHECKS, Check, check_method, run_checks
from harness import EVERYTHING

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


FAST = ["gradma.w+gradma.s", "fedprox+topk"]
"""Methods that get all checks in the fast selection: server and client state, a table of clients,
a codec."""

SLOW_CHECKS = {
    "a seed repeats bit for bit",
    "clients run side by side as one by one",
    "it bears AdamW, clipping and accumulation, or says why not",
    "loss falls on a convex problem",
    "it trains on every kind of task that it accepts",
}
"""Checks that take most of the time. In the fast selection, `tests/papers` compares every
method with NumPy, and `tests/engine` compares the vectorized engine with the sequential one."""

TASKS = "it trains on every kind of task that it accepts"

WAITS = ("mifa(start='wait')",)
"""Methods whose model stays as it is in the few rounds of that check."""

NAMED = ["fedbuff(buffer=3)" if name == "fedbuff" else name for name in REGISTRY]
"""The methods, with a buffer that the checks' few clients can fill."""

ALL = dict.fromkeys([*NAMED, *COMPOSITIONS, *OPTIONS])
TELLING = [
    *("fedavg", "scaffold", "fedbuff(buffer=3)", "mifa", "fedacg", "scaffnew", "fedrod", "ditto"),
    *("ffalora", "fedproto", "perfedavg", "fedala", "dpquantile", "fedadamw", "fednova", "mime"),
    *("fedreg", "fedgh", "knnper", "fedmlb", "fedcurv+mime", "ifca", "fedamp", "fedmd"),
]
"""Methods that get the quick checks in the fast selection: among them is one at least of each role
and of each kind of memory, message and local work. There are no such parts in `FAST`."""

QUICK_CHECKS = [name for name in CHECKS if name not in SLOW_CHECKS]


@pytest.mark.parametrize("expression", FAST)
def test_a_telling_method_passes_all_checks(expression: str) -> None:
    names = [name for name in CHECKS if name != TASKS or expression in ("scaffold", "fedavg")]
    assert run_checks(expression, names=names) == [Check(name) for name in names]


@pytest.mark.parametrize("expression", TELLING)
def test_a_method_of_each_kind_passes_the_quick_checks(expression: str) -> None:
    assert run_checks(expression, names=QUICK_CHECKS) == [Check(name) for name in QUICK_CHECKS]


@pytest.mark.slow
@pytest.mark.parametrize("expression", [name for name in ALL if name not in FAST])
def test_every_method_passes_all_checks(expression: str) -> None:
    names = [name for name in CHECKS if name != TASKS or expression not in WAITS]
    assert run_checks(expression, names=names) == [Check(name) for name in names]


def test_every_role_is_among_the_methods_that_are_checked() -> None:
    parts = [part for name in [*TELLING, *FAST] for part in parse(name, EVERYTHING).parts]
    lacking = {role.__name__ for role in ROLES if not any(isinstance(p, role) for p in parts)}
    assert lacking == set()


@pytest.mark.slow
def test_other_weights_are_checked_too() -> None:
    assert len(check_method("fedgh", weights="processed")) == len(CHECKS)


def test_every_alias_names_a_method_of_the_registry() -> None:
    assert set(ALIASES.values()) <= set(REGISTRY)
