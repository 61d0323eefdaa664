"""SCAFFOLD, restated from Karimireddy et al. 2020, Algorithm 1 with option II.

The numbers in comments are those of Algorithm 1's lines. The paper has plain SGD; under momentum
the divisor is the K~ of GC-Fed's baseline, whose formula is written out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from each import each
from harness import Federation
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
# client 1 returns after three rounds with a stale control variate, client 4 never takes part
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def length(steps: int, momentum: float, nesterov: bool) -> float:
    """K~: what `steps` gradients of 1 add up to, over -lr."""
    if nesterov:
        buffers = [(1 - momentum ** (s + 1)) / (1 - momentum) for s in range(steps)]
        return sum(1 + momentum * b for b in buffers)
    if momentum:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return float(steps)


def scaffold(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    weights: str = "uniform",
    server_lr: float = 1.0,
    **local: object,
) -> Iterator[Told]:
    x, count = setup.start, len(setup.sizes)
    c = np.zeros_like(x)
    own = {k: np.zeros_like(x) for k in range(count)}
    for t, clients in enumerate(cohorts):
        update, change = {}, {}
        for i in clients:  # 5: on client i in S in parallel

            def at(bx, by, drift=c - own[i]):  # 9-10: y <- y - eta_l (g(y) - c_i + c)
                return lambda w: setup.net.grad(w, bx, by) + drift

            steps = [at(*batch) for batch in setup.examples(i, t)]
            y = descend(x, iter(steps), LR, **local)
            K = length(len(steps), local.get("momentum", 0.0), local.get("nesterov", False))
            new = own[i] - c + (x - y) / (K * LR)  # 12 (ii)
            update[i], change[i] = y - x, new - own[i]  # 13: communicate
            own[i] = new  # 14
        p = setup.shares(weights, clients, t)
        # 16: means over S; 17: x + eta_g dx, c + |S|/N dc
        x = x + server_lr * sum(s * update[i] for s, i in zip(p, clients, strict=True))
        c = c + len(clients) / count * np.mean([change[i] for i in clients], axis=0)
        yield Told(x, update, {"c": c, **{f"c{i}": own[i] for i in clients}})


def look(ours: Federation) -> Mapping[str, Vector]:
    played = ours.played
    return {
        "c": flat(played.server.memory["scaffold"]["c"]),
        **{
            f"c{i}": flat(client_state["scaffold"]["c"])
            for i, client_state in played.client_state.items()
        },
    }


@each("server_lr", [1.0, 0.6])
@each(
    "local",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
        {"weight_decay": 0.1},
    ],
)
def test_scaffold(server_lr: float, local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), epochs=2)
    theirs = dict(local)
    theirs["decay"] = theirs.pop("weight_decay", 0.0)
    expression = "scaffold" if server_lr == 1 else f"scaffold+addition(lr={server_lr})"
    story = scaffold(setup, COHORTS, server_lr=server_lr, **theirs)
    assert agree(setup.ours(expression, LR, **local), story, COHORTS, look) == len(COHORTS)


def test_scaffold_weighted_by_examples_keeps_c_an_equal_mean() -> None:
    """The paper's objective is an equal mean; with other weights only x is weighted."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6))
    rounds = agree(
        setup.ours("scaffold", LR, weights="examples"),
        scaffold(setup, COHORTS, "examples"),
        COHORTS,
        look,
    )
    assert rounds == len(COHORTS)
