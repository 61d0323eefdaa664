"""FedAMP, restated from Huang et al. 2021, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

import fedkeel as fk
from fedkeel.errors import CompositionError, ConfigError, RunError
from fedkeel.features.secure.legality import refuse_single_updates
from fedkeel.method.grammar import parse
from fedkeel.method.parts.fedamp import FedAMP, squared_distances
from fedkeel.runner.features import check_nodes
from fedkeel.runner.start import start
from fedkeel.study.conformance import check_method
from harness import Federation, distance, oracle
from method.players import federation, gap
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat
from papers.personal import COHORTS, NAMES, collected, tensors
from papers.test_ifca import planted
from toys import Net, prepared

LR = 0.2


def attention(W: np.ndarray, seen: np.ndarray, alpha: float, sigma: float) -> np.ndarray:
    """[C, C] alpha A'(|w_k - w_j|^2) of others that have taken part, A(x) = 1 - exp(-x / sigma)."""
    A = np.zeros((len(W), len(W)))
    for k in range(len(W)):
        for j in range(len(W)):
            if j != k and seen[j]:
                A[k, j] = alpha * np.exp(-np.sum((W[k] - W[j]) ** 2) / sigma) / sigma
        A[k] /= max(A[k].sum(), 1.0)
    return A


def fedamp(
    setup: TrainingSetup, alpha: float, sigma: float, lam: float, **local: float
) -> Iterator[Told]:
    W = np.stack([setup.start] * len(setup.sizes))
    own: dict[int, Vector] = {}
    seen = np.zeros(len(W), dtype=bool)
    for t, clients in enumerate(COHORTS):
        A = attention(W, seen, alpha, sigma)
        U = W - A.sum(axis=1)[:, None] * W + A @ W
        sent = {}
        for i in clients:

            def at(bx, by, u=U[i]):
                return lambda y: setup.net.grad(y, bx, by) + lam / alpha * (y - u)

            own[i] = descend(own.get(i, U[i]), (at(*b) for b in setup.examples(i, t)), LR, **local)
            sent[i] = own[i] - U[i]
        for i in clients:
            W[i], seen[i] = own[i], True
        yield Told(W[seen].mean(axis=0), sent, {f"w{i}": w for i, w in own.items()})


def look(ours: Federation) -> dict[str, Vector]:
    states = ours.played.client_state.items()
    return {f"w{i}": flat(state["fedamp"]["w"]) for i, state in states}


@pytest.mark.parametrize(
    ("alpha", "sigma", "lam"), [(0.5, 2.0, 0.25), (0.2, 1.0, 0.0), (3.0, 4.0, 1.5)]
)
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}])
def test_fedamp(alpha: float, sigma: float, lam: float, local: dict) -> None:
    """In the third case the attention adds up to more than 1."""
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedamp(alpha={alpha}, sigma={sigma}, lam={lam})", LR, **local)
    agree(ours, fedamp(setup, alpha, sigma, lam, **local), COHORTS, look)
    assert (ours.played.diagnostics["fedamp.limited"] > 0) == (alpha == 3.0)


def test_it_follows_fluke() -> None:
    """There alpha is the learning rate at the clients."""
    o = oracle("fluke_fedamp_a")
    settings = {name: float(o[f"hp.{key}"]) for name, key in NAMED.items()}
    method = f"fedamp({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    played = collected(o, method, int(o["hp.epochs"]))
    for t in (1, 2, 3):
        played.round()
        sent = played.message([0])
        for k in (0, 1, 2):
            own = played.played.client_state[k]["fedamp"]["w"]
            assert distance(own, tensors(o, f"r{t}.client{k}.w.", NAMES)) < 1e-12
            u = {name: rows[k] for name, rows in sent.broadcast["fedamp"]["u"].items()}
            assert distance(u, tensors(o, f"r{t}.client{k}.u.", NAMES)) < 1e-12
            assert distance(u, own) > 1e-3


NAMED = {"alpha": "alpha", "sigma": "sigma", "lam": "lamda"}


# --- laws and reductions ---------------------------------------------------------------------


def test_without_a_proximal_term_each_client_trains_alone() -> None:
    setup = TrainingSetup(epochs=2)
    played = setup.ours("fedamp(lam=0.0)", LR)
    alone = setup.start
    for t in range(3):
        played.round()
        alone = descend(
            alone, (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(1, t)), LR
        )
    assert np.abs(look(played)["w1"] - alone).max() < 1e-14


def test_without_attention_the_term_pulls_to_the_clients_own_last_model() -> None:
    """sigma so small that nobody is near: FedProx of a client by itself."""
    setup = TrainingSetup(epochs=2)
    played = setup.ours("fedamp(alpha=0.5, sigma=1e-9, lam=0.25)", LR)
    alone = setup.start
    for t in range(3):
        played.round()

        def at(bx, by, u=alone):
            return lambda w: setup.net.grad(w, bx, by) + 0.5 * (w - u)

        alone = descend(alone, (at(*b) for b in setup.examples(1, t)), LR)
    assert np.abs(look(played)["w1"] - alone).max() < 1e-12


def test_a_mixture_lies_between_the_models_and_its_shares_are_the_papers() -> None:
    rng = np.random.default_rng(0)
    W = rng.normal(size=(4, 5))
    state = {"w": {"p": torch.from_numpy(W)}, "seen": torch.ones(4, dtype=torch.float64)}
    for alpha, sigma in ((0.5, 8.0), (2.0, 3.0), (1e9, 1.0)):
        mix, _ = FedAMP(alpha=alpha, sigma=sigma)._mixture(state)
        assert mix.min() >= -1e-15
        np.testing.assert_allclose(mix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
        A = attention(W, np.ones(4, dtype=bool), alpha, sigma)
        np.testing.assert_allclose(mix, A + np.diag(1 - A.sum(axis=1)), rtol=0, atol=1e-12)
    apart = ((W[:, None] - W[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(state["w"]), apart, rtol=0, atol=1e-12)


def test_the_mixture_is_a_step_along_the_gradient_of_the_attention() -> None:
    """U = W - alpha grad of the sum over pairs of A, up to the 2 of the square (the paper's U)."""
    W = torch.from_numpy(np.random.default_rng(1).normal(size=(4, 5))).requires_grad_()
    alpha, sigma = 0.3, 6.0
    apart = ((W[:, None] - W[None]) ** 2).sum(dim=2)
    pairs = torch.triu(1 - torch.exp(-apart / sigma), 1).sum()
    (gradient,) = torch.autograd.grad(pairs, W)
    state = {"w": {"p": W.detach()}, "seen": torch.ones(4, dtype=torch.float64)}
    U = FedAMP(alpha=alpha, sigma=sigma).message(state)["u"]["p"]
    torch.testing.assert_close(U, W.detach() - alpha / 2 * gradient, rtol=0, atol=1e-12)


def test_attention_finds_planted_clusters() -> None:
    """The paper's finding: clients of one cluster draw each other, and others hardly."""
    played = federation("fedamp(alpha=0.1, sigma=0.5, lam=0.02)", planted())
    for _ in range(8):
        played.round()
    shares, _ = FedAMP(alpha=0.1, sigma=0.5)._mixture(played.played.server.memory["fedamp"])
    same = np.equal.outer(np.arange(6) % 2, np.arange(6) % 2) & ~np.eye(6, dtype=bool)
    assert shares[same].min() > 10 * shares[~same & ~np.eye(6, dtype=bool)].max()


# --- runs ------------------------------------------------------------------------------------


def test_each_client_is_sent_one_model_and_scored_by_its_own() -> None:
    ready = prepared("fedamp", rounds=3, per_round=4)
    found = start(ready)
    clients, row = ready.setup.federation, found.rows[-1]
    one = sum(t.numel() for t in ready.server.params.values()) * 4
    assert row.bytes_down == {"model": 4 * one}
    assert row.bytes_up == {"model": 4 * one}
    taken = {k for r in found.rows[1:] for k in r.clients}
    for k in taken:
        rows = torch.from_numpy(clients.client(k))
        x, y = clients.data.x[rows], clients.data.y[rows]
        scores = functional_call(Net(), found.client_model(str(k)), x)
        loss = float(functional.cross_entropy(scores, y))
        assert row.personal["loss"][k] == pytest.approx(loss, abs=1e-5)
    with pytest.raises(RunError, match="no single model"):
        found.state_dict()


def test_lam_0_has_the_scores_of_the_baseline_local() -> None:
    """Without momentum, which the baseline keeps from round to round."""
    kind = {"evaluation": fk.Evaluation(model="personal"), "local": fk.Local(lr=0.05, epochs=2)}
    amp = start(prepared("fedamp(lam=0.0)", per_round=6, **kind))
    local = start(prepared("local", per_round=6, **kind))
    assert amp.rows[-1].test.values == pytest.approx(local.rows[-1].test.values, abs=1e-6)


def test_it_passes_every_check() -> None:
    assert all(not check.failure for check in check_method("fedamp"))


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other", ["ifca", "momentum", "median", "fedbuff", "scaffold", "fedvarp", "fedala", "fednova"]
)
def test_what_takes_one_model_for_all_is_refused(other: str) -> None:
    for expression in (f"fedamp+{other}", f"{other}+fedamp"):
        with pytest.raises(CompositionError):
            parse(expression)


@pytest.mark.parametrize("other", ["fedlc", "fedprox", "moon", "topk", "finetune", "fedper"])
def test_what_acts_at_a_client_goes_beside_it(other: str) -> None:
    played = federation(f"fedamp+{other}")
    before = played.params
    played.round()
    assert gap(played.params, before) > 1e-4


def test_a_client_that_has_not_taken_part_pays_attention_and_receives_none() -> None:
    """Its u lies nearer to the models that are near the initial one; nobody's u has its model."""
    played = federation("fedamp(alpha=0.5, sigma=20.0)")
    for _ in range(2):
        played.round([0, 1])
    mix, _ = FedAMP(alpha=0.5, sigma=20.0)._mixture(played.played.server.memory["fedamp"])
    assert mix[2, 0] > 0.0
    assert mix[:2, 2:].max() == mix[2, 3] == 0.0
    u = played.message([2]).broadcast["fedamp"]["u"]
    assert gap({k: t[2] for k, t in u.items()}, played.network.params) > 1e-4


def test_nodes_secure_sums_and_budgets_are_refused() -> None:
    for unit in ("client", "example"):
        with pytest.raises(CompositionError, match="fedamp"):
            prepared("fedamp", privacy=fk.Privacy(epsilon=5.0, delta=1e-3, unit=unit))
    with pytest.raises(CompositionError, match="secure aggregation"):
        refuse_single_updates(parse("fedamp"))
    with pytest.raises(CompositionError, match="all nodes are sent one message"):
        check_nodes(prepared("fedamp").settings)
    check_nodes(prepared("ifca").settings)
    with pytest.raises(ConfigError, match="several models"):
        prepared("fedamp", cohort=fk.Cohort(clients=2, sampling="power_of_choice", candidates=4))
