"""pFedMe, restated from Dinh et al. 2020, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel import tree
from fedkeel.config import Local
from harness import distance, oracle
from method.players import federation, gap, skewed
from papers.numpy_net import Told, TrainingSetup, agree, flat
from papers.personal import COHORTS, NAMES, collected, follow, kept, tensors

LR, INNER = 0.1, 0.05


def pfedme(
    setup: TrainingSetup, lam: float, steps: int, decay: float, beta: float
) -> Iterator[Told]:
    w, last = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            local, theta = w, w
            for bx, by in setup.examples(i, t):
                for _ in range(steps):
                    g = setup.net.grad(theta, bx, by)
                    theta = theta - INNER * (g + lam * (theta - local) + decay * theta)
                local = local - LR * lam * (local - theta)
            last[i], sent[i] = theta, local - w
        p = setup.shares("examples", clients)
        mean = sum(s * (sent[i] + w) for s, i in zip(p, clients, strict=True))
        w = (1 - beta) * w + beta * mean
        yield Told(w, sent, {f"local_model{i}": last[i] for i in last})


@pytest.mark.parametrize(("lam", "steps", "decay"), [(5.0, 3, 0.0), (2.0, 1, 0.01)])
@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_pfedme(lam: float, steps: int, decay: float, beta: float) -> None:
    setup = TrainingSetup(epochs=2)
    method = f"pfedme(lam={lam}, inner_lr={INNER}, inner_steps={steps}, decay={decay})"
    ours = setup.ours(f"{method}+addition(lr={beta})", LR)
    story = pfedme(setup, lam, steps, decay, beta)
    agree(ours, story, COHORTS, lambda f: kept(f, "local_model"))


@pytest.mark.parametrize(
    ("name", "steps", "rate", "own"),
    [
        ("pfllib_pfedme_a", "hp.K", "hp.p_learning_rate", "personal"),
        ("flbench_pfedme_a", "hp.k", "hp.pers_lr", "theta"),
    ],
)
def test_pfedme_follows_both_collections(name: str, steps: str, rate: str, own: str) -> None:
    o = oracle(name)
    method = (
        f"pfedme(lam={float(o['hp.lamda'])!r}, inner_lr={float(o[rate])!r}, "
        f"inner_steps={int(o[steps])}, decay={float(o.get('hp.mu', 0.001))!r})"
    )
    played = collected(o, f"{method}+addition(lr={float(o['hp.beta'])!r})", int(o["hp.epochs"]))

    def look(t: int, k: int) -> dict[str, float]:
        ours = played.played.client_state[k]["local_model"]
        return {"theta": distance(ours, tensors(o, f"r{t}.client{k}.{own}.", NAMES))}

    follow(o, played, look)


# --- laws and reductions ---------------------------------------------------------------------


def test_where_rate_and_weight_are_reciprocal_w_takes_the_place_of_theta() -> None:
    local = Local(lr=0.25, epochs=2, batch_size=4)
    played = federation("pfedme(lam=4.0)", local=local)
    received = played.params
    done = played.round()
    for k, delta in done.deltas.items():
        assert gap(tree.add(received, delta), done.client_state[k]["local_model"]) < 1e-14


def test_a_minimum_of_the_loss_is_a_fixed_point() -> None:
    """All clients have the same two opposite labels for each input, and the scores are equal."""
    x = np.repeat(skewed()[0][0][:4], 3, axis=0)
    data = [(x, np.tile(np.arange(3), 4))] * 2
    local = Local(lr=0.05, epochs=2, batch_size="all")
    played = federation("pfedme", data, local=local, batches=lambda k, _: [np.arange(12)] * 2)
    zero = {k: torch.zeros_like(v) for k, v in played.params.items()}
    played.played.server.params.update(zero)
    done = played.round()
    assert gap(done.server.params, zero) == 0.0
    for state in done.client_state.values():
        assert float(max(v.abs().max() for v in state["local_model"].values())) < 1e-15


def test_theta_is_the_moreau_envelopes_minimum() -> None:
    """Of many inner steps: grad F(theta) = -lambda (theta - w)."""
    method = "pfedme(lam=10.0, inner_lr=0.05, inner_steps=400)"
    local = Local(lr=0.01, steps=1, batch_size="all")
    sizes = [len(y) for _, y in skewed()]
    played = federation(method, local=local, batches=lambda k, _: [np.arange(sizes[k])])
    setup = TrainingSetup()
    w = flat(played.params)
    done = played.round()
    for k, (x, y) in enumerate(skewed()):
        theta = flat(done.client_state[k]["local_model"])
        g = setup.net.grad(theta, x, y)
        assert np.abs(g + 10.0 * (theta - w)).max() < 1e-12
        assert np.abs(flat(done.deltas[k]) + 0.01 * 10.0 * (w - theta)).max() < 1e-14
