"""FedSMOO, restated from Sun et al. 2023, Algorithm 1, with s only of the dual variables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fedkeel import tree
from harness import Federation, distance, oracle, tensors
from method.players import federation, gap, play
from papers.fl_simulator import CLIENTS, ROUNDS, compare, simulated
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat
from papers.personal import COHORTS

LR = 0.2


def fedsmoo(setup: TrainingSetup, rho: float, alpha: float, **local: float) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    h = {i: np.zeros_like(x) for i in range(count)}
    mu = {i: np.zeros_like(x) for i in range(count)}
    s, mean_h = np.zeros_like(x), np.zeros_like(x)
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:

            def at(bx, by, i=i, x=x, s=s):
                def gradient(w: Vector) -> Vector:
                    g = setup.net.grad(w, bx, by) - mu[i] - s
                    e = rho * g / np.sqrt(g @ g) if rho else 0.0 * g
                    mu[i] = mu[i] + e - s
                    return setup.net.grad(w + e, bx, by) - h[i] + alpha * (w - x)

                return gradient

            steps = [at(*batch) for batch in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR, **local) - x
        for i in clients:
            h[i] = h[i] - alpha * sent[i]
        mean_h = sum(h.values()) / count
        x = x + sum(sent.values()) / len(clients) - mean_h / alpha
        total = sum(mu[i] for i in clients)
        s = rho * total / np.sqrt(total @ total) if rho else s
        shown = {f"h{i}": h[i] for i in clients} | {f"mu{i}": mu[i] for i in clients}
        yield Told(x, sent, shown | {"s": s})


def look(ours: Federation) -> dict[str, Vector]:
    states = ours.played.client_state.items()
    shown = {f"{key}{i}": flat(state["fedsmoo"][key]) for i, state in states for key in ("h", "mu")}
    return shown | {"s": flat(ours.played.server.memory["fedsmoo"]["s"])}


@pytest.mark.parametrize(("rho", "alpha"), [(0.1, 0.1), (0.5, 1.0), (0.0, 0.2)])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedsmoo(rho: float, alpha: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = fedsmoo(setup, rho, alpha, **local)
    agree(setup.ours(f"fedsmoo(rho={rho}, alpha={alpha})", LR, **ours), story, COHORTS, look)


def test_fedsmoo_follows_its_authors() -> None:
    """They add 1e-7 to norms of about 1, which is seen in the eighth digit."""
    o = oracle("fedsmoo_a")
    lam = float(o["hp.lamb"])
    played = simulated(o, f"fedsmoo(rho={float(o['hp.rho'])!r}, alpha={lam!r})")
    for t in ROUNDS:
        done = played.round()
        for k in CLIENTS:
            state = done.client_state[k]["fedsmoo"]
            corrections = tree.scale(tree.leaves(state, "h"), -1.0 / lam)
            assert distance(corrections, tensors(o, f"r{t}.client{k}.h.")) < 1e-6
            assert distance(tree.leaves(state, "mu"), tensors(o, f"r{t}.client{k}.mu.")) < 1e-6
        common = tree.leaves(done.server.memory["fedsmoo"], "s")
        assert distance(common, tensors(o, f"r{t}.global_dual.")) < 1e-6
        compare(o, t, done, 1e-6)


# --- laws and reductions ---------------------------------------------------------------------


def test_without_a_step_uphill_it_is_feddyn() -> None:
    ours, theirs = (play(m, rounds=3) for m in ("fedsmoo(rho=0.0, alpha=0.2)", "feddyn(alpha=0.2)"))
    assert gap(ours, theirs) < 1e-14
    assert gap(play("fedsmoo(rho=0.2, alpha=0.2)", rounds=3), theirs) > 1e-3


def test_the_common_direction_is_as_long_as_a_step_uphill() -> None:
    played = federation("fedsmoo(rho=0.3)")
    played.round([0, 2])
    common = tree.leaves(played.played.server.memory["fedsmoo"], "s")
    assert float(tree.dot(common, common)) == pytest.approx(0.09, rel=1e-12)
    assert set(played.played.client_state) == {0, 2}
