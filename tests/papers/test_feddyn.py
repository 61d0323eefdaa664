"""FedDyn, restated from Acar et al. 2021, Algorithm 1.

The paper's local problem is min L_k(y) - <g_k, y> + (alpha/2) |y - x|^2; the clients here approach
it by SGD. The second divisor is that of GC-Fed's public code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel.config import Local
from fedkeel.method.context import Round
from fedkeel.method.grammar import parse
from fedkeel.method.local_optimiser import LocalSGD
from fedkeel.method.local_path import path_length
from fedkeel.method.parts.feddyn import FedDyn
from fedkeel.task.network import Network
from fedkeel.tree import State
from harness import Federation
from method.players import LOCAL, equal, federation, gap
from method.test_theory import STEPS, Line, Quadratics, squares
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
# client 1 returns after three rounds with a stale state, client 4 never takes part
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def feddyn(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    alpha: float,
    divisor: str = "clients",
    weights: str = "uniform",
    **local: object,
) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    h = np.zeros_like(x)
    own = {k: np.zeros_like(x) for k in range(count)}
    for t, clients in enumerate(cohorts):
        ends = {}
        for k in clients:

            def at(bx, by, x=x, h_k=own[k]):  # gradient of L_k(y) - <h_k, y> + alpha/2 |y - x|^2
                return lambda y: setup.net.grad(y, bx, by) - h_k + alpha * (y - x)

            steps = [at(*batch) for batch in setup.examples(k, t)]
            ends[k] = descend(x, iter(steps), LR, **local)
            own[k] = own[k] - alpha * (ends[k] - x)
        total = sum(ends[k] - x for k in clients)
        if divisor == "clients":
            h = h - alpha * total / count
        else:  # public code: the mean over the cohort, divided by the cohort again
            h = h - (alpha / len(clients)) * (total / len(clients))
        p = setup.shares(weights, clients, t)
        sent = {k: ends[k] - x for k in clients}
        x = sum(s * ends[k] for s, k in zip(p, clients, strict=True)) - h / alpha
        yield Told(x, sent, {"h": h, **{f"h{k}": own[k] for k in clients}})


def look(ours: Federation) -> Mapping[str, Vector]:
    played = ours.played
    return {
        "h": flat(played.server.memory["feddyn"]["h"]),
        **{
            f"h{k}": flat(client_state["feddyn"]["h"])
            for k, client_state in played.client_state.items()
        },
    }


@each("alpha", [0.1, 1.0])
@each("divisor", ["clients", "cohort"])
@each("local", [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, {"weight_decay": 0.1}])
def test_feddyn(alpha: float, divisor: str, local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    theirs = dict(local)
    theirs["decay"] = theirs.pop("weight_decay", 0.0)
    story = feddyn(setup, COHORTS, alpha, divisor, **theirs)
    expression = f"feddyn(alpha={alpha}, divisor='{divisor}')"
    agree(setup.ours(expression, LR, **local), story, COHORTS, look)


def test_feddyn_weighted_by_examples_keeps_h_an_equal_mean() -> None:
    """The paper's objective is an equal mean; with other weights only x is weighted."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    story = feddyn(setup, COHORTS, 0.5, weights="examples")
    agree(setup.ours("feddyn(alpha=0.5)", LR, weights="examples"), story, COHORTS, look)


# --- laws and reductions ---------------------------------------------------------------------


def test_h_is_the_mean_of_the_clients_states() -> None:
    """Over all clients, those that never took part too: theirs is 0."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    ours = setup.ours("feddyn(alpha=0.3)", LR)
    for cohort in COHORTS:
        ours.round(cohort)
        seen = look(ours)
        mean = sum(v for name, v in seen.items() if name != "h") / len(setup.sizes)
        assert np.abs(seen["h"] - mean).max() < 1e-15
        assert np.abs(mean).max() > 1e-3


def test_the_clients_first_round_is_fedproxs_and_the_server_goes_further() -> None:
    """All states are 0; x moves by the mean, and by K / C of it once more."""
    for selected in ([0, 1, 2, 3], [0, 2]):
        ours = federation("feddyn(alpha=0.7)")
        theirs = federation("fedprox(mu=0.7)", weights="uniform")
        start = ours.params
        one, other = ours.round(selected), theirs.round(selected)
        for k in selected:
            assert equal(one.deltas[k], other.deltas[k])
        factor = 1 + len(selected) / 4
        moved = {k: v - start[k] for k, v in ours.params.items()}
        assert gap(moved, {k: factor * (v - start[k]) for k, v in theirs.params.items()}) < 1e-13


def test_the_divisors_agree_where_the_cohort_squared_is_the_population() -> None:
    def ended(divisor: str, selected: list[int]) -> dict:
        played = federation(f"feddyn(divisor='{divisor}')")
        for _ in range(3):
            played.round(selected)
        return played.params

    assert equal(ended("cohort", [1, 2]), ended("clients", [1, 2]))  # 2 of 4
    assert gap(ended("cohort", [0, 1, 2]), ended("clients", [0, 1, 2])) > 1e-3


def test_the_quadratic_term_pulls_and_the_linear_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The length of a path is FedProx's."""
    units: list[float] = []
    kept = FedDyn.next_client

    def told(part: FedDyn, round: Round) -> State:
        units.append(float(round.path_length))
        return kept(part, round)

    monkeypatch.setattr(FedDyn, "next_client", told)
    for local in (LOCAL, Local(lr=0.1, epochs=2, batch_size=4, momentum=0.9)):
        units.clear()
        played = federation("feddyn(alpha=0.5)", local=local)
        played.round()
        played.round()
        lengths = {path_length(LocalSGD.of(local), s, 0.1, 0.5) for s in (4, 6, 10)}
        assert units
        assert set(units) <= lengths


def test_a_linear_loss_shows_that_the_state_acts_like_a_gradient() -> None:
    """Gradient g everywhere: a path of unit length L makes -lr L (g - h_k), whatever h_k is."""
    network = Network(Line(), loss=lambda s, y: s[:, 0] + 0.0 * y, dtype=torch.float64)
    data = [(np.eye(3), np.zeros(3))]
    local = Local(lr=0.1, steps=1, momentum=0.9)
    played = Federation("feddyn(alpha=2.0)", network, data, local, lambda k, _: [np.arange(3)] * 6)
    length = path_length(LocalSGD(0.9), 6, 0.1, 2.0)
    h = np.zeros(3)
    for _ in range(3):
        update = played.round().deltas[0]["w"].numpy()
        np.testing.assert_allclose(update, -0.1 * length * (np.ones(3) / 3 - h), rtol=1e-12)
        h = h - 2.0 * update


# --- where it ends ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "rho", "rounds"), [(0.2, 0.0, 150), pytest.param(0.08, 0.9, 150, marks=pytest.mark.slow)]
)
def test_feddyn_ends_on_the_optimum_and_fedavg_and_fedprox_off_it(
    lr: float, rho: float, rounds: int
) -> None:
    """With 1, 3 and 8 local steps: no client comes near its own problem's minimum."""
    quadratics = Quadratics()
    best = quadratics.optimum
    ended = quadratics.play("feddyn(alpha=1.0)", lr, rho, rounds)
    assert np.linalg.norm(ended - best) < 1e-8
    for other in ("fedavg", "fedprox(mu=1.0)"):
        assert np.linalg.norm(quadratics.play(other, lr, rho, rounds) - best) > 0.02


@pytest.mark.slow
def test_feddyn_ends_on_the_optimum_with_part_of_the_clients_too() -> None:
    quadratics = Quadratics()
    turns: Callable[[int], list[int]] = lambda t: [t % 3, (t + 1) % 3]  # noqa: E731
    ended = quadratics.play("feddyn(alpha=1.0)", 0.2, 0.0, 300, turns)
    assert np.linalg.norm(ended - quadratics.optimum) < 1e-8


@pytest.mark.slow
def test_the_states_end_as_the_clients_gradients_at_the_optimum() -> None:
    quadratics = Quadratics()
    played = Federation(
        "feddyn(alpha=1.0)",
        Network(Line(), loss=squares, dtype=torch.float64),
        quadratics.data,
        Local(lr=0.2, steps=1),
        lambda k, _: [np.arange(8)] * STEPS[k],
    )
    for _ in range(150):
        played.round()
    seen, best = look(played), quadratics.optimum
    for k in range(3):
        gradient = quadratics.H[k] @ (best - quadratics.own[k])
        assert np.abs(seen[f"h{k}"] - gradient).max() < 1e-8
        assert np.abs(gradient).max() > 0.1
    assert np.abs(seen["h"]).max() < 1e-8


def test_an_exact_client_remembers_its_gradient_at_its_own_end() -> None:
    """The first-order condition of the local problem, in every round."""
    quadratics = Quadratics()
    played = Federation(
        "feddyn(alpha=0.5)",
        Network(Line(), loss=squares, dtype=torch.float64),
        quadratics.data,
        Local(lr=0.3, steps=1),
        lambda k, _: [np.arange(8)] * 300,
    )
    for _ in range(4):
        start = played.params["w"].numpy()
        done = played.round()
        for k in range(3):
            end = start + done.deltas[k]["w"].numpy()
            gradient = quadratics.H[k] @ (end - quadratics.own[k])
            assert np.abs(look(played)[f"h{k}"] - gradient).max() < 1e-12


def test_the_defaults_are_the_papers() -> None:
    plan = parse("feddyn")
    assert (plan.weights, plan.pull) == ("uniform", 0.1)
    assert plan.server_optimiser.divisor == "clients"  # type: ignore[attr-defined]
