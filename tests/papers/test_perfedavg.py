"""Per-FedAvg, restated from Fallah et al. 2020, Algorithm 1, first-order and Hessian-free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from each import each
from fedkeel.config import Local
from fedkeel.method.grammar import parse
from harness import Batches, oracle
from method.players import federation, gap, skewed
from papers.numpy_net import TrainingSetup, Vector, agree, averaged
from papers.personal import COHORTS, Arrays, collected, follow

LR = 0.2


def gradient_of(
    setup: TrainingSetup, alpha: float, order: str, delta: float
) -> Callable[..., Vector]:
    parts = 2 if order == "first" else 3

    def gradient(w: Vector, _: Vector, x: np.ndarray, y: np.ndarray, i: int) -> Vector:
        size = -(-len(y) // parts)
        cuts = [slice(k * size, (k + 1) * size) for k in range(parts)]
        filled = [c for c in cuts if len(y[c])]
        cuts = [c if len(y[c]) else filled[-1] for c in cuts]
        g = setup.net.grad
        u = w - alpha * g(w, x[cuts[0]], y[cuts[0]])
        out = g(u, x[cuts[1]], y[cuts[1]])
        if order == "first":
            return out
        third = x[cuts[2]], y[cuts[2]]
        change = g(w + delta * out, *third) - g(w - delta * out, *third)
        return out - alpha * change / (2 * delta)

    return gradient


@each("order", ["first", "hessian_free"])
@each("alpha", [0.1, 0.5])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_perfedavg(order: str, alpha: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    method = f"perfedavg(alpha={alpha}, order='{order}', delta=0.01)"
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    gradient = gradient_of(setup, alpha, order, 0.01)
    story = averaged(setup, COHORTS[:3], gradient, LR, **local)
    agree(setup.ours(method, LR, **ours), story, COHORTS[:3], tol=1e-10)


def test_perfedavg_follows_pfllib() -> None:
    """Batches of twice the size, whole ones only, and two passes where one is meant."""
    o = oracle("pfllib_perfedavg_a")
    size, epochs = 2 * int(o["hp.batch_size"]), 2 * int(o["hp.epochs"])

    def batches(k: int, _: int) -> list[np.ndarray]:
        whole = len(o[f"client{k}.y"]) // size
        return [np.arange(size * b, size * (b + 1)) for _ in range(epochs) for b in range(whole)]

    played = collected(o, f"perfedavg(alpha={float(o['hp.lr'])!r})", epochs, batches)
    follow(o, played, lambda t, k: {})


def in_turn(o: Arrays, parts: int) -> Batches:
    """FL-bench takes the next batches for the parts of each step, from the first one on again."""
    size, epochs = int(o["hp.batch_size"]), int(o["hp.epochs"])

    def batches(k: int, _: int) -> list[np.ndarray]:
        n = len(o[f"client{k}.y"])
        every = [np.arange(n)[i : i + size] for i in range(0, n, size)]
        steps = epochs * (len(every) // parts)
        return [
            np.concatenate([every[(s * parts + j) % len(every)] for j in range(parts)])
            for s in range(steps)
        ]

    return batches


@pytest.mark.parametrize(
    ("name", "order", "parts"),
    [("flbench_perfedavg_fo_a", "first", 2), ("flbench_perfedavg_hf_a", "hessian_free", 3)],
)
def test_perfedavg_follows_fl_bench(name: str, order: str, parts: int) -> None:
    o = oracle(name)
    rate, delta = float(o["hp.lr"]), float(o["hp.delta"])
    played = collected(
        o,
        f"perfedavg(alpha={rate!r}, order='{order}', delta={delta!r})",
        int(o["hp.epochs"]),
        in_turn(o, parts),
        weights="uniform",
        lr=float(o["hp.beta"]),
    )
    follow(o, played, lambda t, k: {})


# --- laws and reductions ---------------------------------------------------------------------


def test_without_an_inner_step_it_is_fedavg_on_the_second_halves() -> None:
    sizes = [len(y) for _, y in skewed()]
    whole = federation("perfedavg(alpha=0.0)", batches=lambda k, _: [np.arange(6)] * 3)
    halves = federation("fedavg", batches=lambda k, _: [np.arange(3, 6)] * 3)
    assert min(sizes) >= 6
    for _ in range(2):
        whole.round()
        halves.round()
    assert gap(whole.params, halves.params) < 1e-14


def test_a_client_adapts_by_one_step_of_the_inner_rate_on_all_examples() -> None:
    tuned = parse("perfedavg(alpha=0.3)").fine_tuning.fine_tuning(
        Local(lr=0.01, epochs=3, batch_size=4, accumulate=2)
    )
    assert (tuned.steps, tuned.epochs, tuned.batch_size, tuned.lr) == (1, None, "all", 0.3)
    assert tuned.accumulate == 1
