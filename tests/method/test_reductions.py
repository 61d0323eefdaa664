"""What papers say a method is equal to: bit for bit where the same operations are left."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.data.batches import plan as planned
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch
from fedkeel.tree import Tree
from harness import consecutive
from method.players import (
    ENTRIES,
    LOCAL,
    SIZE,
    alike,
    contrary,
    equal,
    federation,
    gap,
    play,
    skewed,
)

MOMENTUM = Local(lr=0.05, epochs=2, batch_size=SIZE, momentum=0.9, weight_decay=0.01)


def one_step(k: int, _: int) -> list[np.ndarray]:
    return consecutive(len(skewed()[k][1]), SIZE)[:1]


@each("local", [LOCAL, MOMENTUM])
@each(
    ("method", "other", "weights"),
    [
        ("fedprox(mu=0.0)", "fedavg", None),
        ("fedprox(mu=0.0)+fednova", "fednova", None),
        ("momentum(beta=0.0)", "fedavg", None),
        ("momentum(beta=0.0, damping=True)", "fedavg", None),
        ("momentum(beta=0.0, nesterov=True)", "fedavg", None),
        ("momentum(beta=0.0, lr=0.5)", "addition(lr=0.5)", None),
        ("addition(lr=1.0)", "fedavg", None),
        ("gradma.s(memory=0, beta1=0.7)", "momentum(beta=0.7)", "uniform"),
        ("gradma.s(memory=0, beta1=0.7, lr=0.5)", "momentum(beta=0.7, lr=0.5)", "uniform"),
        ("gradma.s(memory=0, beta1=0.0)", "fedavg", "uniform"),
        ("gcfed(lam=0.0)", "globalgc", None),
        ("gcfed.local(lam=1.0)", "localgc", None),
        ("gcfed.local(lam=0.0)", "fedavg", None),
        ("gcfed.local(head='fc2')", "gcfed.local", None),
        ("fedavgm", "momentum", None),
        ("sgd", "fedsgd", None),
    ],
)
def test_equal_bit_for_bit(method: str, other: str, weights: str | None, local: Local) -> None:
    options = {"local": local, "weights": weights}
    assert equal(play(method, **options), play(other, **options))


@pytest.mark.parametrize(
    ("method", "other", "weights"),
    [
        # the second projection of a projected update takes away the rounding of the first
        ("gcfed(lam=1.0)", "localgc", None),
        # a path found by adding ones up is divided by as a number of steps
        ("fednova(length='steps')", "fednova", None),
        # where no margin binds, projecting with one or without is the same
        ("gradma.w(margin=0.0)", "gradma.w", None),
    ],
)
def test_equal_to_rounding(method: str, other: str, weights: str | None) -> None:
    assert gap(play(method, weights=weights), play(other, weights=weights)) < 1e-12


def test_the_same_hyper_parameters_do_something_elsewhere() -> None:
    """Otherwise the tests above would pass for a part that does nothing."""
    plain = play("fedavg")
    for method in ("fedprox", "momentum", "addition(lr=0.5)", "gcfed", "localgc", "globalgc"):
        assert gap(play(method), plain) > 1e-3
    for method in ("globalgc", "localgc"):
        assert gap(play("gcfed(lam=0.5)"), play(method)) > 1e-3
    uphill = {"data": contrary(), "weights": "uniform"}
    assert gap(play("gradma.s", **uphill), play("momentum(beta=0.5)", **uphill)) > 1e-3
    steps = play("fednova(length='steps')", local=MOMENTUM)
    assert gap(steps, play("fednova", local=MOMENTUM)) > 1e-3


def test_weight_decay_parts_gcfed_from_localgc() -> None:
    """The decay is not centralised at the client; the server's projection takes it away."""
    assert gap(play("gcfed(lam=1.0)", local=MOMENTUM), play("localgc", local=MOMENTUM)) > 1e-6


def test_fednova_with_equal_paths_is_fedavg_to_rounding() -> None:
    """Updates are divided by the path and multiplied with it again."""
    data = skewed((8, 8, 8))
    for local in (LOCAL, MOMENTUM):
        for mu in ("", "fedprox(mu=0.5)+"):
            for length in ("path", "steps"):
                ours = play(f"{mu}fednova(length='{length}')", data, local=local)
                assert gap(ours, play(f"{mu}fedavg", data, local=local)) < 1e-12
    ours = play("fedreg+fednova(length='steps')", data, local=MOMENTUM)
    assert gap(ours, play("fedreg", data, local=MOMENTUM)) < 1e-12
    assert gap(play("fednova"), play("fedavg")) > 1e-3


@each("rule", ["originals", "inplace", "printed", "mutual"])
@each("groups", ["tensor", "layer", "model"])
def test_fedgh_without_conflict_is_fedavg(rule: str, groups: str) -> None:
    ours = federation(f"fedgh(rule='{rule}', groups='{groups}')", alike())
    theirs = federation("fedavg", alike(), weights="uniform")
    for _ in range(3):
        assert ours.round().diagnostics["fedgh.conflicts"] == 0.0
        theirs.round()
        assert equal(ours.params, theirs.params)
    skew = federation(f"fedgh(rule='{rule}', groups='{groups}')")
    assert skew.round().diagnostics["fedgh.conflicts"] > 0.0
    assert gap(skew.params, play("fedavg", rounds=1, weights="uniform")) > 1e-3


@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_sgc_without_conflict_is_fedavg(groups: str) -> None:
    ours = federation(f"fedgc.sgc(margin=0.0, groups='{groups}')", alike())
    theirs = federation("fedavg", alike(), weights="processed")
    for _ in range(3):
        assert ours.round().diagnostics == {"fedgc.sgc.infeasible": 0.0, "fedgc.sgc.active": 0.0}
        theirs.round()
        assert equal(ours.params, theirs.params)
    torn = federation(f"fedgc.sgc(groups='{groups}')", contrary())
    assert torn.round().diagnostics["fedgc.sgc.active"] > 0.0
    assert gap(torn.params, play("fedavg", contrary(), rounds=1, weights="processed")) > 1e-3


def test_cgc_has_nothing_to_go_by_in_the_first_round() -> None:
    assert equal(play("fedgc.cgc", rounds=1), play("fedavg", rounds=1, weights="processed"))
    assert gap(play("fedgc.cgc", rounds=2), play("fedavg", rounds=2, weights="processed")) > 1e-4


def test_scaffolds_first_round_is_fedavgs() -> None:
    """All control variates are 0."""
    assert equal(play("scaffold", rounds=1), play("fedavg", rounds=1, weights="uniform"))
    assert gap(play("scaffold", rounds=2), play("fedavg", rounds=2, weights="uniform")) > 1e-3


def test_gradmas_server_without_conflict_or_past_is_fedavg() -> None:
    ours = play("gradma.s(beta1=0.0, beta2=0.0)", alike())
    assert equal(ours, play("fedavg", alike(), weights="uniform"))


def test_gradmas_worker_has_nothing_to_turn_from_in_its_first_step() -> None:
    """Both remembered gradients are the gradient itself, and the third direction is 0."""
    ours = play("gradma.w(previous='start')", batches=one_step)
    assert equal(ours, play("fedavg", batches=one_step, weights="uniform"))
    assert gap(play("gradma.w(previous='start')"), play("fedavg", weights="uniform")) > 1e-3


def test_fedsgd_is_fedavg_with_one_batch_of_everything() -> None:
    """Also in the batches that are planned for it, whatever the run asks for."""
    asked = Local(lr=0.1, epochs=5, batch_size=4, momentum=0.9)
    work = parse("fedsgd").work(asked)
    assert work == Local(lr=0.1, steps=1, batch_size="all", momentum=0.9)
    assert parse("fedavg").work(asked) == asked

    def batches(local: Local) -> Tree:
        def of(k: int, t: int) -> list[np.ndarray]:
            found = planned(local, len(skewed()[k][1]), 0, t, k, 0)
            assert [len(rows) for rows in found] == [len(skewed()[k][1])]
            return found

        return of

    everything = Local(lr=0.1, steps=1, batch_size="all", momentum=0.9)
    ours = play("fedsgd", local=asked, batches=batches(work))
    assert equal(ours, play("fedavg", local=everything, batches=batches(everything)))


def test_minibatch_sgd_of_one_step_is_fedavg_of_one_step() -> None:
    ours = play("minibatch_sgd", batches=one_step)
    assert equal(ours, play("fedavg", batches=one_step))


def test_minibatch_sgd_is_the_mean_gradient_at_the_received_model() -> None:
    played = federation("minibatch_sgd")
    start = played.params
    played.round()
    network = played.network
    for k, update in played.played.deltas.items():
        x, y = played.data[k]
        batches = [torch.as_tensor(rows) for rows in played.batches(k, 0)]
        found = [
            network.value_and_grad(start, {}, Batch(x[rows], y[rows]), "eager")[1]
            for rows in batches
        ]
        mean = {n: sum(g[n] for g in found) / len(found) for n in start}
        assert gap(update, tree.scale(mean, -LOCAL.lr)) < 1e-14


def test_minibatch_sgd_does_not_mind_the_order_of_its_batches() -> None:
    def backwards(k: int, _: int) -> list[np.ndarray]:
        return consecutive(len(skewed()[k][1]), SIZE, 2)[::-1]

    assert gap(play("minibatch_sgd", batches=backwards), play("minibatch_sgd")) < 1e-14
    assert gap(play("fedavg", batches=backwards), play("fedavg")) > 1e-5


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_minibatch_sgd_knows_no_proximal_term(local: Local) -> None:
    """Its gradients are taken where the term is 0, and its paths are as long without it."""
    ours = play("fedprox(mu=2.0)+minibatch_sgd", local=local)
    assert equal(ours, play("minibatch_sgd", local=local))


@each("entry", ENTRIES)
def test_fedavg_may_stand_anywhere(entry: str) -> None:
    plan = parse(entry)
    for expression in (f"{entry}+fedavg", f"fedavg+{entry}", f"fedavg()+{entry}+fedavg"):
        again = parse(expression)
        assert again.parts == plan.parts
        assert again.expression == plan.expression


def test_one_client_alone_conflicts_with_nobody() -> None:
    alone = skewed((12,))
    for method in ("fedgh", "fedgh(rule='mutual')", "gradma.s(beta1=0.0)"):
        assert equal(play(method, alone), play("fedavg", alone))


def test_momentum_with_damping_is_momentum_of_a_smaller_step() -> None:
    """v' = (1 - beta) v at every round, so a step of lr / (1 - beta) along v' is the same."""
    damped = play("momentum(beta=0.75, lr=2.0, damping=True)")
    assert gap(damped, play("momentum(beta=0.75, lr=0.5)")) < 1e-13


def test_a_federation_of_copies_is_one_client() -> None:
    """The mean of equal updates is that update, up to the rounding of the weights."""
    data = skewed((12,))
    assert gap(play("fedavg", data * 3), play("fedavg", data)) < 1e-14
