"""FedAdam, FedYogi and FedAdagrad, restated from Reddi et al. 2021, Algorithm 2.

The bias corrections are those of two public codes: FedCAMS corrects both moments, Flower scales the
learning rate with exponents that are one round ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span
from fedkeel.tree import Tree
from harness import Federation, distance, oracle
from method.players import equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]


def clients(
    setup: TrainingSetup, x: Vector, t: int, cohort: Sequence[int], **local: object
) -> dict:
    """x^t_{i,K} - x^t of each client: plain SGD of the clients."""
    return {
        i: descend(
            x,
            iter([lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]),
            LR,
            **local,
        )
        - x
        for i in cohort
    }


def fedopt(
    setup: TrainingSetup,
    kind: str,
    *,
    eta: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: str = "tau2",
    correction: str = "none",
    weights: str = "examples",
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    m, v = np.zeros_like(x), np.zeros_like(x)
    if v0 == "tau2":  # input: v_{-1} >= tau^2
        v = v + tau**2
    for t, cohort in enumerate(COHORTS):
        sent = clients(setup, x, t, cohort, **local)
        p = setup.shares(weights, cohort, t)
        update = sum(s * sent[i] for s, i in zip(p, cohort, strict=True))
        m = beta1 * m + (1 - beta1) * update
        for j in range(len(x)):  # coordinate by coordinate
            if kind == "fedadagrad":
                v[j] = v[j] + update[j] ** 2
            elif kind == "fedyogi":
                sign = np.sign(v[j] - update[j] ** 2)
                v[j] = v[j] - (1 - beta2) * update[j] ** 2 * sign
            else:
                v[j] = beta2 * v[j] + (1 - beta2) * update[j] ** 2
        step, moment, root, n = eta, m, np.sqrt(v), t + 1
        if correction == "moments":
            moment, root = m / (1 - beta1**n), np.sqrt(v / (1 - beta2**n))
        elif correction == "rate":
            step = eta * np.sqrt(1 - beta2 ** (n + 1)) / (1 - beta1 ** (n + 1))
        x = x + step * moment / (root + tau)
        yield Told(x, sent, {"m": m, "v": v.copy()})


def look(ours: Federation) -> Mapping[str, Vector]:
    state = ours.played.server.memory[ours.plan.server_optimiser.name]
    return {"m": flat(state["m"]), "v": flat(state["v"])}


@each("kind", ["fedadam", "fedyogi", "fedadagrad"])
@each("given", [{}, {"v0": "zero", "tau": 0.01}, {"eta": 0.03, "beta1": 0.5, "tau": 0.1}])
@each("local", [{}, {"momentum": 0.9}])
def test_fedopt(kind: str, given: dict, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    defaults = {"beta1": 0.0} if kind == "fedadagrad" else {}
    names = {"eta": "lr"}
    text = ", ".join(f"{names.get(k, k)}={v!r}" for k, v in given.items())
    story = fedopt(setup, kind, **{**defaults, **given}, **local)
    agree(setup.ours(f"{kind}({text})", LR, **local), story, COHORTS, look)


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi"])
@pytest.mark.parametrize("correction", ["moments", "rate"])
def test_fedopt_with_bias_correction(kind: str, correction: str) -> None:
    setup = TrainingSetup()
    story = fedopt(setup, kind, v0="zero", beta2=0.9, correction=correction, weights="uniform")
    ours = setup.ours(
        f"{kind}(v0='zero', beta2=0.9, correction='{correction}')", LR, weights="uniform"
    )
    agree(ours, story, COHORTS, look)


# --- Flower's numbers ------------------------------------------------------------------------


def test_fedadam_is_flowers() -> None:
    """Its learning rate is corrected with exponents of t + 1; its v starts at 0."""
    o = oracle("flwr_fedadam")
    names = ("w1", "b1", "w2", "s")
    hp = {k: float(o[f"hp.{k}"]) for k in ("eta", "beta_1", "beta_2", "tau")}
    plan = parse(
        f"fedadam(lr={hp['eta']!r}, beta1={hp['beta_1']!r}, beta2={hp['beta_2']!r}, "
        f"tau={hp['tau']!r}, v0='zero', correction='rate')"
    )
    params: Tree = {n: torch.from_numpy(o[f"init.{n}"]) for n in names}
    counts = o["num_examples"].astype(float)
    population = Population(len(counts), len(counts))
    state = plan.server_optimiser.init_optimiser(params, population)
    for t in range(1, 4):
        ends = [{n: torch.from_numpy(o[f"r{t}.client{k}.{n}"]) for n in names} for k in range(3)]
        rows = {n: torch.stack([end[n] - params[n] for end in ends]) for n in names}
        shares = counts / counts.sum()
        cohort = RoundCohort(np.arange(3), shares, 0.1, t - 1, population, names, 0, state=state)
        update = plan.reduction.reduce(Span(rows), cohort)
        params, state = plan.server_optimiser.apply(params, update, Span(rows), cohort)
        theirs = {n: torch.from_numpy(o[f"r{t}.{n}"]) for n in names}
        assert distance(params, theirs) < 1e-12
        assert abs(float(params["b1"][1]) - o["init.b1"][1]) < 1e-13  # no client ever moves it


# --- laws ------------------------------------------------------------------------------------


def steps(expression: str, deltas: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """[T, D] how far given aggregates move the model, and [T, D] v after each."""
    optimiser = parse(expression).server_optimiser
    population = Population(1, 1)
    params: Tree = {"w": torch.zeros(len(deltas[0]), dtype=torch.float64)}
    state = optimiser.init_optimiser(params, population)
    moved, sizes = [], []
    for t, given in enumerate(deltas):
        update = {"w": torch.tensor(given, dtype=torch.float64)}
        cohort = RoundCohort(np.arange(1), np.ones(1), 0.1, t, population, ("w",), 0, state=state)
        after, state = optimiser.apply(params, update, Span({"w": update["w"][None]}), cohort)
        moved.append((after["w"] - params["w"]).numpy())
        sizes.append(state["v"]["w"].numpy())  # type: ignore[index, union-attr]
        params = after
    return np.array(moved), np.array(sizes)


def test_adagrad_takes_steps_that_shrink_as_one_over_root_t() -> None:
    moved, v = steps("fedadagrad(lr=0.5, tau=1e-12, v0='zero')", [[0.3, -2.0]] * 9)
    times = np.arange(1, 10)
    np.testing.assert_allclose(moved[:, 0], 0.5 / np.sqrt(times), rtol=1e-10)
    np.testing.assert_allclose(moved[:, 1], -0.5 / np.sqrt(times), rtol=1e-10)
    np.testing.assert_allclose(v[:, 1], 4.0 * times, rtol=1e-14)


def test_adagrad_by_hand() -> None:
    """v0 = 1/4, then 1/4 + 2 = 9/4 and 9/4 + 4 = 25/4; tau = 1/2."""
    moved, v = steps("fedadagrad(lr=1.0, tau=0.5)", [[2**0.5], [-2.0]])
    np.testing.assert_allclose(v[:, 0], [2.25, 6.25], rtol=1e-15)
    np.testing.assert_allclose(moved[:, 0], [2**0.5 / 2.0, -2.0 / 3.0], rtol=1e-15)


def test_adam_that_forgets_everything_normalises_each_entry() -> None:
    deltas = [[0.5, -3.0], [-0.1, 0.0]]
    moved, _ = steps("fedadam(lr=0.2, beta1=0.0, beta2=0.0, tau=0.25)", deltas)
    expected = [[0.2 * d / (abs(d) + 0.25) for d in update] for update in deltas]
    np.testing.assert_allclose(moved, expected, rtol=1e-15)


def test_adam_corrected_moves_by_its_rate_along_equal_aggregates() -> None:
    """Both corrected moments are then the aggregate and its square, in every round."""
    moved, _ = steps(
        "fedadam(lr=0.2, tau=1e-14, v0='zero', correction='moments')", [[0.7, -1e-3]] * 6
    )
    np.testing.assert_allclose(moved, [[0.2, -0.2]] * 6, rtol=1e-9)
    plain, _ = steps("fedadam(lr=0.2, tau=1e-14, v0='zero')", [[0.7, -1e-3]])
    np.testing.assert_allclose(plain, [[0.2, -0.2]], rtol=1e-9)  # 0.1 / sqrt(0.01)


def test_yogis_v_moves_by_a_share_of_the_square_and_stays_positive() -> None:
    _, v = steps("fedyogi(tau=2.0, beta2=0.75)", [[1.0]] * 3 + [[4.0]] + [[1e3]] + [[0.0]])
    np.testing.assert_allclose(v[:, 0], [3.75, 3.5, 3.25, 7.25, 250007.25, 250007.25], rtol=1e-15)
    _, falling = steps("fedyogi(tau=1.0, beta2=0.0)", [[0.99]] * 2 + [[1e-3]] * 50)
    assert falling.min() >= 0.0


def test_yogi_and_adam_begin_alike_from_nothing() -> None:
    assert equal(
        play("fedyogi(v0='zero')", rounds=1),
        play("fedadam(v0='zero')", rounds=1),
    )
    assert gap(play("fedyogi(v0='zero')", rounds=3), play("fedadam(v0='zero')", rounds=3)) > 1e-4


@pytest.mark.parametrize("kind", ["fedadam", "fedyogi"])
def test_a_large_tau_is_server_momentum(kind: str) -> None:
    """The root of v, from 0, is nothing beside it."""
    tau = 1e8
    ours = play(f"{kind}(tau={tau}, lr={tau * 0.5}, v0='zero')", rounds=4)
    assert gap(ours, play("momentum(beta=0.9, lr=0.5, damping=True)", rounds=4)) < 1e-8
    assert gap(ours, play("momentum(beta=0.9, lr=0.5)", rounds=4)) > 1e-3


def test_the_three_differ() -> None:
    found = [play(kind, rounds=3) for kind in ("fedadam", "fedyogi", "fedadagrad(beta1=0.9)")]
    for i in range(3):
        assert gap(found[i], found[i - 1]) > 1e-3
