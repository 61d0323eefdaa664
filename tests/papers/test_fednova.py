"""FedNova, restated from Wang et al. 2020, Eq. (4)-(7), as FedGH's slides repeat it.

fedgh.txt line 77: a local path is Delta_i = -eta G_i a_i with G_i the gradients stacked and a_i
their shares in the path; d_i = G_i a_i / |a_i|_1; x <- x - tau_eff sum_i p_i eta d_i with tau_eff =
sum_i p_i |a_i|_1. The restatement stacks G_i and multiplies; ours divides the path it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from each import each
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.2
COHORTS = [[0, 1, 2, 3], [1, 3], [0, 2, 3], [0, 1, 2, 3]]


def shares(steps: int, momentum: float = 0.0, mu: float = 0.0, nesterov: bool = False) -> Vector:
    """The vector a: what each gradient adds to the path, by following each one by itself.

    With the paper's closed forms where it has them: 1 for SGD, (1 - rho^(tau-j)) / (1 - rho) with
    momentum, (1 - eta mu)^(tau-1-j) with a proximal term.
    """
    a = np.zeros(steps)
    for j in range(steps):
        moved, buffer = 0.0, 0.0
        for s in range(steps):
            g = float(s == j) - LR * mu * moved  # the proximal term pulls back
            buffer = momentum * buffer + g
            moved += g + momentum * buffer if nesterov else buffer
        a[j] = moved
    j = np.arange(steps)
    if not mu and not nesterov:
        assert np.allclose(a, (1 - momentum ** (steps - j)) / (1 - momentum), atol=1e-13)
    if not momentum:
        assert np.allclose(a, (1 - LR * mu) ** (steps - 1 - j), atol=1e-13)
    return a


def fednova(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    mu: float = 0.0,
    length: str = "path",
    effective: str = "path",
    weights: str = "examples",
    harmonise: Callable[[dict[int, Vector], int], dict[int, Vector]] = lambda sent, t: sent,
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    decay = float(local.get("decay", 0.0))
    for t, clients in enumerate(cohorts):
        d, norms, taus = {}, {}, {}
        for i in clients:
            G: list[Vector] = []

            def at(bx, by, G=G, x=x):
                def gradient(w: Vector) -> Vector:
                    g = setup.net.grad(w, bx, by)
                    G.append(g + decay * w)
                    return g + mu * (w - x)

                return gradient

            y = descend(x, (at(*batch) for batch in setup.examples(i, t)), LR, **local)
            a = shares(len(G), local.get("momentum", 0.0), mu, local.get("nesterov", False))
            whole = np.stack(G, axis=1) @ a
            assert np.abs((x - y) - LR * whole).max() < 1e-12  # Eq. (4)
            norms[i], taus[i] = np.abs(a).sum(), len(G)
            d[i] = whole / (norms[i] if length == "path" else taus[i])
        p = dict(zip(clients, setup.shares(weights, clients, t), strict=True))
        tau_eff = sum(p[i] * (norms if effective == "path" else taus)[i] for i in clients)
        sent = {i: -LR * d[i] for i in clients}
        mended = harmonise(sent, t)
        x = x + tau_eff * sum(p[i] * mended[i] for i in clients)  # Eq. (6)
        yield Told(x, sent)


@each(
    "local",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.6, "nesterov": True},
        {"momentum": 0.6, "decay": 0.05},
    ],
)
@each("mu", [0.0, 0.5])
@each("length", ["path", "steps"])
@each("effective", ["path", "steps"])
def test_fednova(local: dict, mu: float, length: str, effective: str) -> None:
    setup = TrainingSetup(sizes=(9, 3, 12, 7), epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fednova(length='{length}', effective='{effective}')"
    if mu:
        expression = f"fedprox(mu={mu})+{expression}"
    story = fednova(setup, COHORTS, mu, length, effective, **local)
    agree(setup.ours(expression, LR, **ours), story, COHORTS)


def test_the_paths_of_the_clients_differ() -> None:
    setup = TrainingSetup(sizes=(9, 3, 12, 7), epochs=2)
    assert [len(setup.batches(k, 0)) for k in range(4)] == [6, 2, 6, 4]
    assert shares(6, momentum=0.9).sum() == pytest.approx((6 - 9 * (1 - 0.9**6)) / 0.1)
    assert shares(6, mu=0.5).sum() == pytest.approx((1 - 0.9**6) / 0.1)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}, {"momentum": 0.6, "nesterov": True}])
def test_minibatch_sgd_with_momentum_weighs_gradients_by_their_share_of_the_path(
    local: dict,
) -> None:
    """Without momentum that is the plain mean (test_fedavg.py)."""
    setup = TrainingSetup(epochs=2)

    def story() -> Iterator[Told]:
        x = setup.start
        for t, clients in enumerate(COHORTS):
            sent = {}
            for i in clients:
                G = [setup.net.grad(x, bx, by) for bx, by in setup.examples(i, t)]
                a = shares(len(G), **local)
                sent[i] = -LR * np.stack(G, axis=1) @ a / a.sum()
            p = setup.shares("examples", clients)
            x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
            yield Told(x, sent)

    agree(setup.ours("minibatch_sgd", LR, **local), story(), COHORTS)
