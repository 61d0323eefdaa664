"""FedGH, restated from Algorithm 1 of its slides (lines of fedgh.txt) on the vectors themselves.

    17 server recalculates g_k; 19 for i; 21 for j in random order; 23 if g_i . g_j < 0;
    25 g_i := g_i - (g_i . g_j) / |g_i|^2 g_j; 27 update w_k with g_k; 29 mean of the w_k.

The letter divides by |g_j|^2 and reads stored originals. The random orders are those that our run
draws: for each group of a round in turn, and only where two vectors conflict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from each import each
from fedkeel.base.rng import generator
from fedkeel.solve.projections import harmonise as ours_harmonise
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend
from papers.test_fednova import fednova

LR = 0.6
SEED = 11
COHORTS = [[0, 1, 2, 3, 4], [0, 2, 3], [1, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4]]


def conflict(**changes: object) -> TrainingSetup:
    labels = [[0], [1, 2], [1], [2], [0, 2]]
    kind = {"sizes": (9, 12, 5, 7, 4), "labels": labels, "seed": 2, "epochs": 2}
    return TrainingSetup(**{**kind, **changes})


def settled(v: Vector, before: Vector) -> Vector:
    """Zero where nothing but rounding is left, whose direction means nothing."""
    return v if v @ v > 1e-20 * (before @ before) else np.zeros_like(v)


def harmonise(received: list[Vector], rule: str, rng: np.random.Generator, seen: Counter) -> None:
    """Change the vectors in place."""
    K, g = len(received), received
    stored = [v.copy() for v in received]
    if not any(a @ b < 0 for a in g for b in g):
        return
    seen["conflict"] += 1
    if rule == "mutual":  # both of a pair, from the values before either changed
        pairs = np.array([(i, j) for i in range(K) for j in range(i + 1, K)])
        for i, j in rng.permutation(pairs):
            gi, gj = g[i].copy(), g[j].copy()
            if gi @ gj < 0:
                g[i] = settled(gi - (gi @ gj) / (gj @ gj) * gj, stored[i])
                g[j] = settled(gj - (gi @ gj) / (gi @ gi) * gi, stored[j])
        return
    for i in range(K):  # 19
        for j in rng.permutation([j for j in range(K) if j != i]):  # 21
            other = stored[j] if rule == "originals" else g[j]
            if g[i] @ other < 0:  # 23
                below = g[i] @ g[i] if rule == "printed" else other @ other
                g[i] = settled(g[i] - (g[i] @ other) / below * other, stored[i])  # 25
                seen["projected"] += 1


def harmonised(setup: TrainingSetup, rule: str, groups: str, seen: Counter):
    """The server's lines 17-27 for a round's updates, by client."""

    def of(sent: dict[int, Vector], t: int) -> dict[int, Vector]:
        rng, out = generator(SEED, "fedgh", t), {k: v.copy() for k, v in sent.items()}
        for span in setup.net.groups(groups):
            parts = [sent[k][span].copy() for k in sent]
            harmonise(parts, rule, rng, seen)
            for k, part in zip(sent, parts, strict=True):
                out[k][span] = part
        return out

    return of


def fedgh(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    seen: Counter,
    rule: str = "originals",
    groups: str = "model",
    weights: str = "uniform",
    mu: float = 0.0,
) -> Iterator[Told]:
    mend, theta = harmonised(setup, rule, groups, seen), setup.start
    for t, clients in enumerate(cohorts):
        sent = {}
        for k in clients:

            def at(x, y, theta=theta):
                return lambda w: setup.net.grad(w, x, y) + mu * (w - theta)

            steps = (at(x, y) for x, y in setup.examples(k, t))
            sent[k] = descend(theta, steps, LR) - theta
        g = mend(sent, t)
        p = setup.shares(weights, clients, t)
        theta = sum(s * (theta + g[k]) for s, k in zip(p, clients, strict=True))  # 27, 29
        yield Told(theta, sent)


@each("groups", ["model", "layer", "tensor"])
@each("rule", ["originals", "inplace", "printed", "mutual"])
def test_fedgh(rule: str, groups: str) -> None:
    setup, seen = conflict(), Counter()
    story = fedgh(setup, COHORTS, seen, rule, groups)
    ours = setup.ours(f"fedgh(rule='{rule}', groups='{groups}')", LR, seed=SEED)
    agree(ours, story, COHORTS, tol=1e-11)
    assert seen["conflict"] >= 3


@each("weights", ["uniform", "examples"])
@each("rule", ["originals", "inplace", "printed", "mutual"])
def test_fedgh_of_fedprox_changes_the_client_only(rule: str, weights: str) -> None:
    """The slides' mean is 1/K, which is the default, the letter's by n_k."""
    setup, seen = conflict(), Counter()
    story = fedgh(setup, COHORTS, seen, rule, weights=weights, mu=0.3)
    chosen = {} if weights == "uniform" else {"weights": weights}
    ours = setup.ours(f"fedprox(mu=0.3)+fedgh(rule='{rule}')", LR, seed=SEED, **chosen)
    agree(ours, story, COHORTS)
    assert seen["conflict"] > 0


@each("rule", ["originals", "inplace", "printed", "mutual"])
@each(("groups", "weights"), [("model", "uniform"), ("tensor", "examples")])
def test_fedgh_of_fednova_harmonises_normalised_updates(
    rule: str, groups: str, weights: str
) -> None:
    setup, seen = conflict(), Counter()
    mend = harmonised(setup, rule, groups, seen)
    story = fednova(setup, COHORTS, weights=weights, harmonise=mend, momentum=0.5)
    ours = setup.ours(
        f"fednova+fedgh(rule='{rule}', groups='{groups}')",
        0.2,
        seed=SEED,
        weights=weights,
        momentum=0.5,
    )
    agree(ours, story, COHORTS)
    assert seen["conflict"] > 0


@each("size", [1, 2, 3])
@each("rule", ["originals", "inplace", "printed", "mutual"])
def test_vectors_shorter_than_their_number_come_to_nothing_and_stay_there(
    rule: str, size: int
) -> None:
    """Five numbers of both signs: a projection leaves 0, which conflicts with nobody."""
    for seed in range(20):
        vectors = np.random.default_rng(seed).normal(size=(5, size))
        A = ours_harmonise(vectors @ vectors.T, np.random.default_rng(seed), rule)
        theirs = [v.copy() for v in vectors]
        harmonise(theirs, rule, np.random.default_rng(seed), Counter())
        bound = 1e-6 * max(1.0, np.abs(np.stack(theirs)).max())
        assert np.abs(A @ vectors - np.stack(theirs)).max() < bound


def test_the_rules_differ_and_the_order_matters() -> None:
    """Otherwise the tests above could not tell them apart."""
    setup = conflict()
    ends = {
        rule: list(fedgh(setup, COHORTS, Counter(), rule))[-1].model
        for rule in ("originals", "inplace", "printed", "mutual")
    }
    names = list(ends)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert np.abs(ends[a] - ends[b]).max() > 1e-4
    vectors = list(np.random.default_rng(0).normal(size=(5, 3)))
    for rule in ("originals", "inplace", "printed", "mutual"):
        found = []
        for seed in range(4):
            one = [v.copy() for v in vectors]
            harmonise(one, rule, np.random.default_rng(seed), Counter())
            found.append(np.stack(one))
        assert any(np.abs(found[0] - other).max() > 1e-3 for other in found[1:])
