"""FedLESAM, restated from Fan et al. 2024, Algorithm 1, and its partners SCAFFOLD and FedDyn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from harness import Federation, distance, oracle, tensors
from method.players import LOCAL, equal, federation, gap, play
from papers.fl_simulator import CLIENTS, ROUNDS, change_method, compare, model_before, simulated
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def fedlesam(setup: TrainingSetup, rho: float, mu: float = 0.0, **local: float) -> Iterator[Told]:
    """With FedProx where mu > 0: the term is that of the local model, not of the perturbed one."""
    w, old = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            delta = np.zeros_like(w)
            if i in old:
                delta = rho * (old[i] - w) / np.sqrt(np.sum((old[i] - w) ** 2))

            def at(bx, by, w=w, delta=delta):
                return lambda v: setup.net.grad(v + delta, bx, by) + mu * (v - w)

            steps = [at(*batch) for batch in setup.examples(i, t)]
            sent[i] = descend(w, iter(steps), LR, **local) - w
            old[i] = w
        p = setup.shares("examples", clients)
        w = w + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(w, sent, {f"received {i}": old[i] for i in clients})


def look(ours: Federation) -> dict[str, Vector]:
    return {
        f"received {i}": flat(state["fedlesam"]["received"])
        for i, state in ours.played.client_state.items()
    }


@each("rho", [0.05, 0.5])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
@each("mu", [0.0, 0.7])
def test_fedlesam(rho: float, local: dict, mu: float) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fedprox(mu={mu})+fedlesam(rho={rho})" if mu else f"fedlesam(rho={rho})"
    story = fedlesam(setup, rho, mu, **local)
    agree(setup.ours(expression, LR, **ours), story, COHORTS, look)


# --- the authors' code -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "partner"),
    [("fedlesam", ""), ("fedlesam_s", "+scaffold"), ("fedlesam_d", "+feddyn(alpha=0.5)")],
)
def test_fedlesam_follows_its_authors(name: str, partner: str) -> None:
    """Theirs divides by another norm, so the length is chosen to make up for it in each round."""
    o = oracle(f"{name}_tensors_a")
    played = simulated(o, f"fedlesam{partner}")
    for t in ROUNDS:
        if t > 1:
            step = tree.sub(model_before(o, t), model_before(o, t - 1))
            norms = [float(v.norm()) for v in step.values()]
            joint = float(tree.dot(step, step).sqrt())
            assert sum(norms) > 1.3 * joint
            rho = float(o["hp.rho"]) * joint / (sum(norms) + 1e-7)
            change_method(played, f"fedlesam(rho={rho!r}){partner}")
        if partner == "+scaffold" and t > 1:  # theirs divides by the first client's steps
            played.played.server.memory["scaffold"] = {"c": dict(tensors(o, f"r{t - 1}.c."))}
            for k in CLIENTS:
                own = tensors(o, f"r{t - 1}.client{k}.c.")
                played.played.client_state[k]["scaffold"] = {"c": dict(own)}
        done = played.round()
        compare(o, t, done, 1e-12)
        for k in CLIENTS:
            if partner.startswith("+feddyn"):
                ours = tree.leaves(done.client_state[k]["feddyn"], "h")  # theirs times -alpha
                theirs = tensors(o, f"r{t}.client{k}.h.")
                assert distance(tree.scale(ours, -2.0), theirs) < 1e-12
        if partner == "+scaffold":
            ours = tree.leaves(done.client_state[0]["scaffold"], "c")
            assert distance(ours, tensors(o, f"r{t}.client0.c.")) < 1e-12


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_perturbation_is_fedavg_bit_for_bit(local: Local) -> None:
    plain = play("fedavg", local=local, rounds=3)
    assert equal(play("fedlesam(rho=0.0)", local=local, rounds=3), plain)
    assert gap(play("fedlesam(rho=0.1)", local=local, rounds=3), plain) > 1e-3


@pytest.mark.parametrize("partner", ["scaffold", "feddyn", "fedcm"])
def test_without_a_perturbation_only_the_partner_is_left(partner: str) -> None:
    ours = play(f"fedlesam(rho=0.0)+{partner}", rounds=3)
    assert equal(ours, play(partner, rounds=3))


def test_a_clients_first_round_is_fedavgs() -> None:
    """Client 1 has not taken part before, client 0 has."""
    ours, theirs = federation("fedlesam(rho=1.0)"), federation("fedavg")
    for played in (ours, theirs):
        played.round([0, 2])
    one, other = ours.round([0, 1]), theirs.round([0, 1])
    assert equal(one.deltas[1], other.deltas[1])
    assert gap(one.deltas[0], other.deltas[0]) > 1e-3


class Given:
    """A step whose gradient is H w, of a client that has received two models."""

    def __init__(self, H: torch.Tensor, old: list[float], now: list[float]) -> None:
        self.H = H
        self.start = {"w": torch.tensor(now, dtype=torch.float64)}
        self.client_state = {"received": {"w": torch.tensor(old, dtype=torch.float64)}}

    def grad(self, params: dict, penalties_at: dict) -> dict:
        return {"w": self.H @ params["w"]}


def test_on_a_quadratic_every_gradient_is_moved_by_the_same_vector() -> None:
    """rho H u with u the unit vector back: 3, 4 and 12 have norm 13."""
    H = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    step = Given(H, old=[4.0, 5.0, 13.0], now=[1.0, 1.0, 1.0])
    part = parse("fedlesam(rho=1.3)").gradient_rule
    for values in ([1.0, 1.0, 1.0], [0.3, -0.2, 0.1]):
        w = torch.tensor(values, dtype=torch.float64)
        found = part.gradient({"w": w}, step)["w"]  # type: ignore[union-attr, arg-type]
        moved = torch.tensor([0.3, 0.8, 6.0], dtype=torch.float64)
        assert float((found - H @ w - moved).abs().max()) < 1e-14


def test_a_proximal_term_pulls_as_ever() -> None:
    """It is taken at the local model, so the length of the path knows it."""
    assert parse("fedprox(mu=0.5)+fedlesam").pull == 0.5
    assert parse("fedlesam+feddyn(alpha=0.2)").pull == 0.2
