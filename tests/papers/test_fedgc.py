"""FedGC, restated from its Algorithm 1 and Eq. (4)-(10); line numbers are those of Algorithm 1.

"Gradient" is the negative gradient throughout, as in the paper. Round 1 has no g^0, and CGC is
skipped there (the paper does not say). Both programmes are solved on the vectors themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from scipy.optimize import minimize

from each import each
from harness import Federation
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, nearest

LR = 0.6
EVERYONE = [range(4)] * 4


def conflict(**changes: object) -> TrainingSetup:
    """Clients whose gradients conflict often, for every kind of group."""
    kind = {"sizes": (4, 12, 12, 5), "labels": [[0, 1], [1, 2], [1], [2]], "seed": 14, "epochs": 2}
    return TrainingSetup(**{**kind, **changes})


def cgc(h: Vector, z: Vector, C: float, seen: Counter) -> Vector:
    """Eq. (6): the u nearest to h with <u, z> >= C; h where z = 0 leaves no such u."""
    u = nearest(h, z[None], C)
    seen["cgc infeasible"] += u is None
    seen["cgc"] += u is not None and u is not h
    return h if u is None else u


def sgc(mean: Vector, G: np.ndarray, C: float, seen: Counter, singular: str = "solve") -> Vector:
    """Eq. (9): the z nearest to the mean with Gz >= C; the mean where that is unsolvable."""
    z = nearest(mean, G, C)
    if singular == "keep" and z is not mean and np.linalg.matrix_rank(G, rtol=1e-9) < len(G):
        seen["sgc singular"] += 1
        seen["sgc infeasible"] += 1
        return mean
    seen["sgc infeasible"] += z is None
    seen["sgc"] += z is not None and z is not mean
    if z is not None and np.linalg.norm(z) < 1e-12 * np.linalg.norm(mean):
        seen["sgc zero"] += 1
        return np.zeros_like(z)  # what is left is rounding, and would bind the next round's CGC
    return mean if z is None else z


def fedgc(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    seen: Counter,
    client: bool = True,
    server: bool = True,
    C: float = 1e-3,
    groups: str = "tensor",
    server_groups: str | None = None,
    weights: str = "processed",
    singular: str = "solve",
) -> Iterator[Told]:
    theta, last = setup.start, None  # 1: initialise
    spans = setup.net.groups(groups)
    server_spans = setup.net.groups(server_groups or groups)
    for t, clients in enumerate(cohorts):  # 2: for t = 1 to T
        g = {}
        for k in clients:  # 9-10; 3-8: theta_{k,0} is the server's model

            def at(x, y):
                return lambda w: setup.net.grad(w, x, y)

            end = descend(theta, (at(*b) for b in setup.examples(k, t)), LR)  # 11-15
            pseudo = (end - theta) / LR  # 16, Eq. (4)
            g[k] = pseudo
            if client and last is not None:  # 18, with the server's g^{t-1} (Eq. 5)
                g[k] = np.concatenate([cgc(pseudo[s], last[s], C, seen) for s in spans])
        p = setup.shares(weights, clients, t)  # n_k: examples of the mini-batches used
        mean = sum(share * g[k] for share, k in zip(p, clients, strict=True))  # 21
        G = np.stack([g[k] for k in clients])
        before = Counter(seen)
        if server:  # 22
            mean = np.concatenate([sgc(mean[s], G[:, s], C, seen, singular) for s in server_spans])
        kept = {
            name: np.array((seen[key] - before[key]) / len(server_spans))
            for name, key in {"infeasible": "sgc infeasible", "active": "sgc"}.items()
            if server
        }
        theta = theta + LR * mean  # 23, with the clients' eta
        last = mean
        kept |= {"g": mean} if client else {}
        yield Told(theta, {k: LR * g[k] for k in clients}, kept)


def look(ours: Federation) -> Mapping[str, Vector]:
    memory, diagnostics = ours.played.server.memory, ours.played.diagnostics
    counts = {k.removeprefix("fedgc.sgc."): np.array(v) for k, v in diagnostics.items()}
    return counts | ({"g": flat(memory["fedgc.cgc"]["g"])} if "fedgc.cgc" in memory else {})


def test_the_programme_is_solved() -> None:
    """The enumeration of active sets against scipy's SLSQP, on random vectors."""
    rng = np.random.default_rng(0)
    for count in (1, 3, 5):
        p, rows = rng.normal(size=12), rng.normal(size=(count, 12))
        u = nearest(p, rows, 0.3)
        found = minimize(
            lambda u, p=p: 0.5 * np.sum((u - p) ** 2),
            p,
            jac=lambda u, p=p: u - p,
            constraints={
                "type": "ineq",
                "fun": lambda u, r=rows: r @ u - 0.3,
                "jac": lambda u, r=rows: r,
            },
            options={"ftol": 1e-14},
        )
        assert np.abs(found.x - u).max() < 1e-6
        assert (rows @ u).min() > 0.3 - 1e-12
    assert nearest(p, np.stack([rows[0], -rows[0]]), 0.3) is None


@each("groups", ["tensor", "layer", "model"])
@each("margin", [0.0, 1e-3, 0.5])
def test_fedgc(groups: str, margin: float) -> None:
    setup, seen = conflict(), Counter()
    story = fedgc(setup, EVERYONE, seen, C=margin, groups=groups)
    agree(setup.ours(f"fedgc(margin={margin}, groups='{groups}')", LR), story, look=look)
    assert seen["sgc"] > 0
    assert seen["cgc"] > 0


@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_fedgc_without_sgc(groups: str) -> None:
    """The tables' "FedGC(w/o)": PGD and CGC, and the weighted mean."""
    setup, seen = conflict(), Counter()
    story = fedgc(setup, EVERYONE, seen, server=False, C=0.1, groups=groups)
    agree(setup.ours(f"fedgc.cgc(margin=0.1, groups='{groups}')", LR), story, look=look)
    assert seen["cgc"] > 0
    assert seen["sgc"] == 0


@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_fedgc_without_cgc(groups: str) -> None:
    setup, seen = conflict(), Counter()
    story = fedgc(setup, EVERYONE, seen, client=False, groups=groups)
    agree(setup.ours(f"fedavg+fedgc.sgc(groups='{groups}')", LR), story, look=look)
    assert seen["sgc"] > 0
    assert seen["cgc"] == 0


def test_dependent_updates_may_count_as_unsolvable() -> None:
    """Four clients' gradients of the three entries of the output bias are always dependent."""
    setup, seen = conflict(), Counter()
    story = fedgc(setup, EVERYONE, seen, client=False, singular="keep")
    agree(setup.ours("fedavg+fedgc.sgc(singular='keep')", LR), story, look=look)
    assert seen["sgc singular"] > 0
    assert seen["sgc"] > 0


def test_fedgc_with_groups_of_its_own_at_the_server_and_partial_participation() -> None:
    """The server's gradient of a round binds whoever takes part in the next one."""
    setup, seen = conflict(), Counter()
    cohorts = [[0, 1], [2, 3], [0, 3], [1, 2, 3], [0, 1]]
    story = fedgc(setup, cohorts, seen, groups="tensor", server_groups="model")
    agree(setup.ours("fedgc.cgc+fedgc.sgc(groups='model')", LR), story, cohorts, look)
    assert seen["cgc"] > 0


def test_n_k_counts_the_examples_of_the_mini_batches() -> None:
    setup, seen = conflict(), Counter()
    setup.batches = lambda k, t: [np.arange(2 + (s + t) % 3) for s in range(k + 1)]  # type: ignore
    by_data, by_use = setup.shares("examples", range(4)), setup.shares("processed", range(4), 0)
    assert np.abs(by_data - by_use).max() > 0.1
    agree(setup.ours("fedgc", LR), fedgc(setup, EVERYONE, seen), look=look)
    again = fedgc(setup, EVERYONE, seen, weights="uniform")
    agree(setup.ours("fedgc", LR, weights="uniform"), again, look=look)


def test_an_answer_of_zero_binds_nobody() -> None:
    """Without a margin, clients that pull all ways leave z = 0, and g^{t-1} = 0 constrains none."""
    setup, seen = TrainingSetup(seed=3), Counter()
    agree(setup.ours("fedgc(margin=0.0)", LR), fedgc(setup, EVERYONE, seen, C=0.0), look=look)
    assert seen["sgc zero"] > 0


@pytest.mark.parametrize("method", ["fedgc", "fedavg+fedgc.sgc"])
@pytest.mark.parametrize("groups", ["tensor", "layer", "model"])
def test_one_client_for_each_class_falls_back_on_the_output_bias(groups: str, method: str) -> None:
    """e_k - p has one positive entry, the k-th: no z meets all clients, whatever p is.

    That is so in every round for SGC alone, and in the first for FedGC: then CGC changes g_k.
    """
    setup, seen = TrainingSetup(sizes=(8, 8, 8), labels=[[0], [1], [2]], seed=1), Counter()
    story = fedgc(setup, [range(3)] * 5, seen, client=method == "fedgc", groups=groups)
    rounds = agree(setup.ours(f"{method}(groups='{groups}')", LR), story, look=look)
    if groups == "tensor":
        assert seen["sgc infeasible"] == (1 if method == "fedgc" else rounds)
    else:
        assert seen["sgc infeasible"] == 0


@pytest.mark.parametrize("groups", ["tensor", "model"])
@pytest.mark.parametrize("method", ["fedgc", "fedavg+fedgc.sgc"])
def test_opposite_clients_fall_back_to_the_weighted_mean(groups: str, method: str) -> None:
    """Two classes, one each, from a model of zeros: the gradients of round 1 are (b, -b)."""
    setup = TrainingSetup(sizes=(4, 12), labels=[[0], [1]], classes=2, batch=100)
    setup.start = np.zeros_like(setup.start)
    network = setup.network()
    network.params = {k: 0.0 * v for k, v in network.params.items()}
    setup.network = lambda: network  # type: ignore[method-assign]
    seen = Counter()
    ours = setup.ours(f"{method}(groups='{groups}')", LR)
    stories = list(fedgc(setup, [[0, 1]] * 3, seen, client=method == "fedgc", groups=groups))
    assert np.array_equal(stories[0].sent[0], -stories[0].sent[1])
    assert np.abs(stories[0].model[-2:] - 0.5 * LR * np.array([-0.5, 0.5])).max() < 1e-15
    assert stories[0].kept["infeasible"] == 1.0
    agree(ours, iter(stories), look=look)
