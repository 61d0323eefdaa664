"""Ditto, restated from Li et al. 2021, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

import fedkeel as fk
from fedkeel.data.batches import plan
from fedkeel.runner.start import start
from fedkeel.tree import Tree
from harness import distance, oracle
from method.players import equal, play
from papers.numpy_net import Told, TrainingSetup, agree, descend, flat
from papers.personal import COHORTS, NAMES, collected, follow, kept, tensors
from toys import Net, prepared

LR = 0.2


def ditto(setup: TrainingSetup, lam: float, **local: float) -> Iterator[Told]:
    w, v = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            v.setdefault(i, w)
            batches = list(setup.examples(i, t))

            def own(bx, by, w=w):
                return lambda y: setup.net.grad(y, bx, by) + lam * (y - w)

            v[i] = descend(v[i], iter([own(*b) for b in batches]), LR, **local)
            plain = [(lambda y, bx=bx, by=by: setup.net.grad(y, bx, by)) for bx, by in batches]
            sent[i] = descend(w, iter(plain), LR, **local) - w
        p = setup.shares("examples", clients)
        w = w + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(w, sent, {f"local_model{i}": v[i] for i in v})


@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_ditto(lam: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    played = setup.ours(f"ditto(lam={lam})", LR, **ours)
    agree(played, ditto(setup, lam, **local), COHORTS, lambda f: kept(f, "local_model"))


@pytest.mark.parametrize(
    ("name", "lam"), [("pfllib_ditto_a", "hp.mu"), ("flbench_ditto_a", "hp.lamda")]
)
def test_ditto_follows_both_collections(name: str, lam: str) -> None:
    o = oracle(name)
    played = collected(o, f"ditto(lam={float(o[lam])!r})", int(o["hp.epochs"]))

    def look(t: int, k: int) -> dict[str, float]:
        ours = played.played.client_state[k]["local_model"]
        return {"v": distance(ours, tensors(o, f"r{t}.client{k}.personal.", NAMES))}

    follow(o, played, look)


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "+scaffold", "+fedgh", "+fedprox(mu=0.5)"])
def test_the_global_model_is_that_of_the_method_without_it(method: str) -> None:
    assert equal(play("ditto" + method), play(method.lstrip("+") or "fedavg"))


def test_without_a_pull_a_client_trains_alone() -> None:
    setup = TrainingSetup(epochs=2)
    played = setup.ours("ditto(lam=0.0)", LR)
    alone = setup.start
    for t in range(3):
        played.round()
        steps = (lambda y, b=b: setup.net.grad(y, *b) for b in list(setup.examples(1, t)))
        alone = descend(alone, steps, LR)
    assert np.abs(kept(played, "local_model")["local_model1"] - alone).max() < 1e-14
    assert np.abs(flat(played.params) - alone).max() > 1e-2


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_a_run_is_a_plain_loop_on_the_same_batches(kind: str) -> None:
    """With torch's own optimiser, from partition to scores; half of the clients in each round."""
    ready = prepared("ditto(lam=0.3)", rounds=4, per_round=3, local=PLAIN, kind=kind)
    clients, names = ready.setup.federation, list(ready.server.params)
    model, own = {k: v.clone() for k, v in ready.server.params.items()}, {}
    found = start(ready)
    for t, row in enumerate(found.rows[1:]):
        ends, received = [], model
        for k in row.clients:
            n, rows = len(clients.client(k)), torch.from_numpy(clients.client(k))
            batches = [rows[b] for b in plan(PLAIN, n, ready.settings.seed, t, k)]
            own[k] = trained(clients.data, own.get(k, received), batches, received)
            ends.append((n, trained(clients.data, received, batches)))
        total = sum(n for n, _ in ends)
        model = {name: sum(n / total * end[name] for n, end in ends) for name in names}
    assert max(float((found.params[k] - v).abs().max()) for k, v in model.items()) < 1e-5
    for k, loss in enumerate(found.rows[-1].personal["loss"]):
        rows = torch.from_numpy(clients.client(k))
        x, y = clients.data.x[rows], clients.data.y[rows]
        scores = functional_call(Net(), own.get(k, model), x)
        assert loss == pytest.approx(float(functional.cross_entropy(scores, y)), abs=1e-5)


PLAIN = fk.Local(lr=0.05, epochs=2, batch_size=4)


def trained(
    data: fk.Dataset, begin: Tree, batches: list[torch.Tensor], anchor: Tree | None = None
) -> Tree:
    net = Net()
    net.load_state_dict(begin)
    optimiser = torch.optim.SGD(net.parameters(), lr=PLAIN.lr)
    for rows in batches:
        loss = functional.cross_entropy(net(data.x[rows]), data.y[rows])
        for name, value in net.named_parameters() if anchor else ():
            loss = loss + 0.15 * (value - anchor[name]).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return {k: v.detach().clone() for k, v in net.named_parameters()}
