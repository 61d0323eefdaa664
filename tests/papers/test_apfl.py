"""APFL, restated from Deng et al. 2020, Algorithm 1, with alpha trained in every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.method.grammar import parse
from method.players import equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, agree
from papers.personal import COHORTS, kept

LR = 0.2


def apfl(setup: TrainingSetup, alpha: float, adaptive: bool) -> Iterator[Told]:
    w, own = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            v, a = own.get(i, (w, alpha))
            local = w
            for bx, by in setup.examples(i, t):
                g = setup.net.grad(a * v + (1 - a) * local, bx, by)
                slope = np.sum((v - local) * g)
                v = v - LR * a * g
                a = np.clip(a - LR * slope, 0.0, 1.0) if adaptive else a
                local = local - LR * setup.net.grad(local, bx, by)
            own[i], sent[i] = (v, a), local - w
        p = setup.shares("examples", clients)
        w = w + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        told = {f"local_model{i}": np.append(v, a) for i, (v, a) in own.items()}
        yield Told(w, sent, told)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl(alpha: float, adaptive: bool) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"apfl(alpha={alpha}, adaptive={adaptive})", LR)
    agree(ours, apfl(setup, alpha, adaptive), COHORTS, lambda f: kept(f, "local_model"))


def test_alpha_moves_and_stays_within_its_bounds() -> None:
    played = federation("apfl(alpha=0.5)")
    for _ in range(8):
        played.round()
    shares = [float(s["local_model"]["apfl.alpha"]) for s in played.played.client_state.values()]
    assert all(0.0 <= a <= 1.0 for a in shares)
    assert max(abs(a - 0.5) for a in shares) > 1e-3


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "+scaffold", "+fedgh", "+momentum"])
def test_the_global_model_is_that_of_the_method_without_it(method: str) -> None:
    assert equal(play("apfl" + method), play(method.lstrip("+") or "fedavg"))


def test_with_no_share_of_its_own_the_personal_model_is_the_global_one() -> None:
    part = parse("apfl(alpha=0.0, adaptive=False)").local_model
    played = federation("apfl(alpha=0.0, adaptive=False)")
    for _ in range(2):
        played.round()
    for state in played.played.client_state.values():
        assert equal(part.personal_model(state["local_model"], played.params), played.params)


def test_of_itself_alone_a_client_trains_as_ditto_without_a_pull() -> None:
    part = parse("apfl(alpha=1.0, adaptive=False)").local_model
    ours, ditto = federation("apfl(alpha=1.0, adaptive=False)"), federation("ditto(lam=0.0)")
    for _ in range(2):
        ours.round()
        ditto.round()
    for k, state in ours.played.client_state.items():
        own = part.personal_model(state["local_model"], ours.params)
        assert gap(own, ditto.played.client_state[k]["local_model"]) < 1e-14


def test_the_steps_are_gradients_by_v_and_alpha_of_the_mixtures_loss() -> None:
    """By automatic differentiation, of one step on a client's examples."""
    played = federation("apfl(alpha=0.3)", batches=lambda k, _: [np.arange(6)])
    first = played.round([0])  # after it v is not w
    w, before = first.server.params, first.client_state[0]["local_model"]
    after = played.round([0]).client_state[0]["local_model"]
    v = {k: before[k].clone().requires_grad_() for k in w}
    alpha = before["apfl.alpha"].clone().requires_grad_()
    mixture = {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}
    x, y = (t[:6] for t in played.data[0])
    hidden = torch.relu(x @ mixture["fc1.weight"].T + mixture["fc1.bias"])
    scores = hidden @ mixture["fc2.weight"].T + mixture["fc2.bias"]
    torch.nn.functional.cross_entropy(scores, y).backward()
    for name, tensor in {**v, "apfl.alpha": alpha}.items():
        assert float((before[name] - 0.1 * tensor.grad - after[name]).abs().max()) < 1e-14
