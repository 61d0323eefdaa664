"""GradMA, restated from its Algorithms 1-4 and Eq. (2)-(8), with the dictionaries as printed.

Numbers in comments are the algorithms' own line numbers ("2.5" is line 5 of Algorithm 2). Signs are
the paper's: d = x_t - x_{t+1}^{(i)} points uphill. Every quadratic programme is solved on the
vectors themselves. Where the paper leaves a choice: a worker's first x_{-1} is the model it
receives, the workers of a round come in the order of their indices, and among equal counters the
one that was stored first makes room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from each import each
from harness import Federation
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat, nearest

LR = 0.3


def world_of_six(**changes: object) -> TrainingSetup:
    labels = [[0], [1], [2], [0, 1], [1, 2], [2, 0]]
    kind = {"sizes": (9, 6, 7, 12, 5, 8), "labels": labels, "seed": 4, "batch": 3}
    return TrainingSetup(**{**kind, **changes})


def cohorts_of(rounds: int, size: int = 2, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [sorted(rng.choice(6, size, replace=False).tolist()) for _ in range(rounds)]


def qp(p: Vector, rows: Sequence[Vector], spans: Sequence[slice], rho: float, seen: Counter):
    """Eq. (2), group by group; with rho, <u, M_i> >= rho |p| |M_i|, and p where that cannot be."""
    out = p.copy()
    for s in spans if len(rows) else []:
        M = np.stack([row[s] / (np.abs(row[s]).max() or 1.0) for row in rows])  # no underflow
        u = nearest(p[s], M, rho * np.linalg.norm(p[s]) * np.linalg.norm(M, axis=1))
        seen["infeasible"] += u is None
        seen["changed"] += u is not None and u is not p[s] and not np.array_equal(u, p[s])
        out[s] = p[s] if u is None else u
    return out


def worker_update(
    setup: TrainingSetup,
    x: Vector,
    last: Vector,
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    seen: Counter,
    groups: str = "model",
    rho: float = 0.0,
    **local: object,
) -> Vector:
    """Algorithm 2; all gradients of a step are on its mini-batch."""
    spans, before = setup.net.groups(groups), [last]  # 2.1: x_{-1} = x'

    def at(bx, by):
        def corrected(now: Vector) -> Vector:
            g = setup.net.grad(now, bx, by)  # 2.3
            G = [
                setup.net.grad(before[-1], bx, by),
                setup.net.grad(x, bx, by),
                now - x,
            ]  # 2.4
            before.append(now)
            return qp(g, G, spans, rho, seen)  # 2.5

        return corrected

    return descend(x, (at(*b) for b in batches), LR, **local)  # 2.6


def mem_red(m: int, S: Sequence[int], c: dict, D: dict, buf: list, new_buf: list, seen: Counter):
    """Algorithm 4. `buf` lists the stored workers, the earliest first."""
    for i in S:  # 4.1
        if i in buf:  # 4.2
            c[i] += 1  # 4.3
        else:  # 4.4
            if len(buf) == m:  # 4.5
                old_buf = [k for k in buf if k not in S]  # 4.6-4.11
                out = min(old_buf, key=lambda k: c[k])  # 4.12; `min` takes the first of equals
                seen["ties"] += [c[k] for k in old_buf].count(c[out]) > 1
                seen["evicted"] += 1
                c[out] = 0
                buf.remove(out)
                del D[out]  # 4.13
            seen["returned"] += i in seen["ever"]
            seen["ever"] = {*seen["ever"], i}
            c[i] += 1  # 4.15
            buf.append(i)  # 4.16
            new_buf.append(i)  # 4.17


def server_update(
    setup: TrainingSetup,
    d: Mapping[int, Vector],
    p: Mapping[int, float],
    m_tilde: Vector,
    D: dict[int, Vector],
    beta: tuple[float, float],
    buf: list,
    new_buf: list,
    groups: str,
    rho: float,
    seen: Counter,
) -> Vector:
    """Algorithm 3; returns the projected momentum."""
    m = beta[0] * m_tilde + sum(p[i] * d[i] for i in d)  # 3.1, p_i = 1/S
    for i in buf:  # 3.2
        if i in d:  # 3.3-3.4
            D[i] = d[i].copy() if i in new_buf else beta[1] * D[i] + d[i]
        else:
            D[i] = beta[1] * D[i]  # 3.6
    return qp(m, [D[i] for i in buf], setup.net.groups(groups), rho, seen)  # 3.9


def gradma(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    seen: Counter,
    worker: dict | None = None,
    memory: int | None = 0,
    beta: tuple[float, float] = (0.0, 0.0),
    server_lr: float = 1.0,
    groups: str = "model",
    rho: float = 0.0,
    weights: str = "uniform",
    **local: object,
) -> Iterator[Told]:
    """Algorithm 1. Without `worker` the local steps are SGD; with memory 0 the server is FedAvgM.

    `worker` holds the options of Algorithm 2, and "previous".
    """
    N = len(setup.sizes)
    x, m_tilde = setup.start, np.zeros_like(setup.start)  # 1.2
    c, D, buf = dict.fromkeys(range(N), 0), {}, []  # 1.3-1.5
    own: dict[int, Vector] = {}
    seen["ever"] = set()
    own_rules = dict(worker or {})
    previous = own_rules.pop("previous", "last")
    for t, S in enumerate(cohorts):  # 1.6-1.8
        new_buf: list[int] = []  # 1.18
        m = N if memory is None else memory
        if m:
            mem_red(m, S, c, D, buf, new_buf, seen)  # 1.9
        d = {}
        for i in S:  # 1.11-1.14
            if worker is None:
                steps = (
                    lambda w, bx=bx, by=by: setup.net.grad(w, bx, by)
                    for bx, by in setup.examples(i, t)
                )
                end = descend(x, steps, LR, **local)
            else:
                last = own.get(i, x) if previous == "last" else x
                batches = setup.examples(i, t)
                end = worker_update(setup, x, last, batches, seen, **own_rules, **local)
                own[i] = end
            d[i] = x - end
        p = dict(zip(S, setup.shares(weights, S, t), strict=True))
        m_tilde = server_update(
            setup, d, p, m_tilde, D, beta, buf, new_buf, groups, rho, seen
        )  # 1.16
        x = x - server_lr * m_tilde  # 3.9
        kept = {f"x{i}": own[i] for i in S} if worker is not None and previous == "last" else {}
        if memory != 0:
            kept |= {"m": m_tilde, "stored": np.array(sorted(buf))}
            kept |= {f"D{i}": D[i] for i in buf}
            kept |= {f"c{i}": np.array(c[i]) for i in buf}
        yield Told(x, {i: -v for i, v in d.items()}, kept)


def look(ours: Federation) -> Mapping[str, Vector]:
    seen = {
        f"x{i}": flat(client_state["gradma.w"]["last"])
        for i, client_state in ours.played.client_state.items()
        if client_state.get("gradma.w")
    }
    state = ours.played.server.memory.get("gradma.s", {})
    if "rows" not in state:
        return seen
    workers = state["worker"].numpy()
    seen["stored"] = np.sort(workers[workers >= 0])
    seen["m"] = -flat(state["m"])
    for slot, i in enumerate(workers):
        if i >= 0:
            rows = flat({k: v[slot] for k, v in state["rows"].items()})
            seen[f"D{i}"] = -float(state["scale"][slot]) * rows
            seen[f"c{i}"] = state["count"][slot].numpy()
    return seen


@pytest.mark.parametrize("groups", ["model", "layer", "tensor"])
@pytest.mark.parametrize("previous", ["last", "start"])
def test_gradma_w(groups: str, previous: str) -> None:
    setup, seen, cohorts = world_of_six(), Counter(), cohorts_of(8)
    story = gradma(setup, cohorts, seen, {"groups": groups, "previous": previous})
    ours = setup.ours(f"gradma.w(groups='{groups}', previous='{previous}')", LR)
    agree(ours, story, cohorts, look, tol=1e-10)
    assert seen["changed"] > 20


@pytest.mark.parametrize(
    ("groups", "rho", "seed"), [("tensor", 0.05, 4), ("model", 0.3, 5), ("model", 0.9, 5)]
)
def test_gradma_w_with_a_margin(groups: str, rho: float, seed: int) -> None:
    """The public code's rho; one that cannot be met leaves the gradient as it is.

    Tensor by tensor it often asks for vectors 1e6 times the gradient: there no two codes agree.
    """
    setup, seen, cohorts = world_of_six(seed=seed), Counter(), cohorts_of(8)
    story = gradma(setup, cohorts, seen, {"groups": groups, "rho": rho})
    ours = setup.ours(f"gradma.w(groups='{groups}', margin={rho})", LR)
    agree(ours, story, cohorts, look, tol=1e-10)
    assert seen["changed"] > 0
    assert seen["infeasible"] > 0 or rho < 0.9


def test_gradma_w_with_momentum_and_weight_decay_after_the_projection() -> None:
    setup, seen, cohorts = world_of_six(), Counter(), cohorts_of(8)
    story = gradma(setup, cohorts, seen, {}, momentum=0.5, decay=0.1)
    ours = setup.ours("gradma.w", LR, momentum=0.5, weight_decay=0.1)
    agree(ours, story, cohorts, look, tol=1e-10)


@pytest.mark.parametrize("groups", ["model", "tensor"])
def test_gradma_w_on_full_batches_nearly_stalls_one_step_from_the_start(groups: str) -> None:
    """Lines 2.4-2.5 ask the second step for <u, g_0> >= 0 and <u, -g_0> >= 0."""
    setup = world_of_six(batch=1000, epochs=6)
    story = list(gradma(setup, cohorts_of(4), Counter(), {"groups": groups, "previous": "start"}))
    ours = setup.ours(f"gradma.w(groups='{groups}', previous='start')", LR)
    agree(ours, iter(story), cohorts_of(4), tol=1e-10)
    for i, sent in story[0].sent.items():
        first = LR * np.linalg.norm(setup.net.grad(setup.start, *setup.data[i]))
        assert first - 1e-12 < np.linalg.norm(sent) < 1.2 * first


@each("memory", [2, 3, None])
@each("beta", [(0.5, 0.5), (0.9, 0.3), (0.5, 0.0), (0.0, 0.7)])
def test_gradma_s(memory: int | None, beta: tuple[float, float]) -> None:
    setup, seen, cohorts = world_of_six(), Counter(), cohorts_of(12)
    story = gradma(setup, cohorts, seen, None, memory, beta)
    ours = setup.ours(
        f"gradma.s(memory={memory}, beta1={beta[0]}, beta2={beta[1]})", LR, per_round=2
    )
    agree(ours, story, cohorts, look, tol=1e-10)
    if memory is not None:
        assert seen["evicted"] >= 3
        assert seen["returned"] >= 2
        assert seen["ties"] >= 1 or memory == 2


def test_among_equals_the_one_stored_first_makes_room() -> None:
    """Not the one in the first slot: 3 has taken that of 0, yet 1 goes before it."""
    setup, cohorts = world_of_six(), [[0, 1], [2, 3], [4, 5], [0, 3], [1, 2], [4, 5], [0, 2]]
    story = list(gradma(setup, cohorts, Counter(), None, 3, (0.5, 0.5)))
    assert [told.kept["stored"].tolist() for told in story[1:3]] == [[1, 2, 3], [3, 4, 5]]
    ours = setup.ours("gradma.s(memory=3)", LR, per_round=2)
    agree(ours, iter(story), cohorts, look, tol=1e-10)


def test_a_worker_that_stays_away_long_still_binds_the_momentum() -> None:
    """Eq. (7) shortens its memory to 1e-120; the programme has no use for the length."""
    setup, seen = world_of_six(), Counter()
    cohorts = [[0, 5], *[[1, 2], [3, 4]] * 30, [0, 1]]
    ours = setup.ours("gradma.s(memory=6, beta1=0.5, beta2=1e-4)", LR, per_round=2)
    story = gradma(setup, cohorts, seen, None, 6, (0.5, 1e-4))
    agree(ours, story, cohorts, look, tol=1e-10)
    assert seen["changed"] > 5


@each("memory", [3, None])
@each("groups", ["layer", "tensor"])
@each(("rho", "beta2"), [(0.0, 0.5), (0.02, 0.5), (0.2, 0.0)])
def test_gradma_s_by_groups_and_with_a_margin(
    memory: int | None, groups: str, rho: float, beta2: float
) -> None:
    setup, seen, cohorts = world_of_six(), Counter(), cohorts_of(10)
    story = gradma(setup, cohorts, seen, None, memory, (0.5, beta2), 0.8, groups, rho)
    inside = f"memory={memory}, groups='{groups}', margin={rho}, lr=0.8, beta2={beta2}"
    ours = setup.ours(f"gradma.s({inside})", LR, per_round=2)
    agree(ours, story, cohorts, look, tol=1e-10)
    assert seen["changed"] > 0


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_no_memory_is_server_momentum(weights: str) -> None:
    setup, cohorts = world_of_six(), cohorts_of(8)
    story = gradma(setup, cohorts, Counter(), None, 0, (0.7, 0.5), weights=weights)
    ours = setup.ours("gradma.s(memory=0, beta1=0.7)", LR, per_round=2, weights=weights)
    agree(ours, story, cohorts, look)


@pytest.mark.parametrize(
    ("previous", "groups", "weights"),
    [
        ("last", "model", "uniform"),
        ("start", "tensor", "uniform"),
        ("start", "model", "examples"),
        ("last", "tensor", "examples"),
    ],
)
def test_gradma(previous: str, groups: str, weights: str) -> None:
    setup, seen, cohorts = world_of_six(), Counter(), cohorts_of(10)
    worker = {"groups": groups, "previous": previous}
    story = gradma(setup, cohorts, seen, worker, 3, (0.5, 0.5), 0.9, groups, weights=weights)
    inside = f"memory=3, groups='{groups}', previous='{previous}', lr=0.9"
    ours = setup.ours(f"gradma({inside})", LR, per_round=2, weights=weights)
    agree(ours, story, cohorts, look, tol=1e-10)
    assert seen["evicted"] >= 2


def test_gradma_is_its_two_parts() -> None:
    setup, cohorts = world_of_six(), cohorts_of(8, size=3)
    story = gradma(setup, cohorts, Counter(), {}, 4, (0.5, 0.5))
    agree(
        setup.ours("gradma.w+gradma.s(memory=4)", LR, per_round=3), story, cohorts, look, tol=1e-10
    )
