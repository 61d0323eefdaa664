"""FedDisco, restated from Ye et al. 2023: weights from sizes and from class counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.grammar import parse
from fedkeel.method.parts.feddisco import FedDisco, discrepancy
from harness import oracle
from method.players import equal, federation, gap, play, skewed
from papers.numpy_net import Told, TrainingSetup, agree, descend

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]


def distance(metric: str, q: np.ndarray) -> float:
    t = np.full_like(q, 1 / len(q))
    if metric == "kl":
        return float(sum(a * np.log(a / b) for a, b in zip(q, t, strict=True) if a > 0))
    if metric == "cosine":
        return float(1 - q @ t / np.sqrt((q @ q) * (t @ t)))
    return float(np.abs(q - t).sum() if metric == "l1" else np.sqrt(((q - t) ** 2).sum()))


def feddisco(setup: TrainingSetup, a: float, b: float, metric: str) -> Iterator[Told]:
    x = setup.start
    counts = [np.bincount(y, minlength=3) for _, y in setup.data]
    d = np.array([distance(metric, c / c.sum()) for c in counts])
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = [
                (lambda y, bx=bx, by=by: setup.net.grad(y, bx, by))
                for bx, by in setup.examples(i, t)
            ]
            sent[i] = descend(x, iter(steps), LR) - x
        far = d[clients] / (d[clients].sum() if metric == "kl" else 1.0)
        w = np.clip(setup.shares("examples", clients) - a * far + b, 0, None)
        x = x + sum(s * sent[i] for s, i in zip(w / w.sum(), clients, strict=True))
        yield Told(x, sent)


@each("metric", ["kl", "l1", "l2", "cosine"])
@each(("a", "b"), [(0.5, 0.4), (0.9, 0.7)])
def test_feddisco(metric: str, a: float, b: float) -> None:
    setup = TrainingSetup()
    story = feddisco(setup, a, b, metric)
    agree(setup.ours(f"feddisco(a={a}, b={b}, metric='{metric}')", LR), story, COHORTS)


# --- the authors' code -----------------------------------------------------------------------


@each("case", range(16))
def test_the_weights_are_those_of_its_authors(case: int) -> None:
    o = {
        k.split(".", 1)[1]: v
        for k, v in oracle("feddisco_a").items()
        if k.startswith(f"case{case}.")
    }
    metric = str(o["metric"])
    target = torch.from_numpy(o["target"])
    counts = torch.from_numpy(o["counts"])[torch.from_numpy(o["selected"])]
    d = np.array([float(discrepancy(row, target, metric)) for row in counts])  # type: ignore[arg-type]
    part = FedDisco(float(o["a"]), float(o["b"]), metric)  # type: ignore[arg-type]
    shown = d / d.sum() if metric == "kl" else d
    assert np.abs(shown - o["difference"]).max() < 1e-12
    found = part.weigh(o["old_weight"], d)
    assert found is not None
    assert np.abs(found - o["new_weight"]).max() < 1e-12


# --- laws ------------------------------------------------------------------------------------


def test_without_a_distance_it_is_fedavg_and_with_a_large_b_the_unweighted_mean() -> None:
    assert gap(play("feddisco(a=0.0, b=0.0)"), play("fedavg")) < 1e-14
    assert gap(play("feddisco(b=1e9)"), play("fedavg", weights="uniform")) < 1e-8
    assert gap(play("feddisco"), play("fedavg")) > 1e-3


def test_clients_with_the_same_mixture_have_their_weights_moved_alike() -> None:
    part = FedDisco(a=0.3, b=0.2, metric="l2")
    found = part.weigh(np.array([0.5, 0.3, 0.2]), np.full(3, 0.4))
    assert found == pytest.approx(np.array([0.58, 0.38, 0.28]) / 1.24, abs=1e-15)


def test_even_mixtures_have_no_distance() -> None:
    for metric in ("kl", "l1", "l2", "cosine"):
        even = torch.full((4,), 5.0, dtype=torch.float64)
        assert abs(float(discrepancy(even, even / 20.0, metric))) < 1e-15  # type: ignore[arg-type]
    assert FedDisco().weigh(np.array([0.5, 0.5]), np.zeros(2)) == pytest.approx([0.5, 0.5])


def test_a_client_of_one_class_is_as_far_as_it_can_be() -> None:
    """log Y, 2 - 2/Y, sqrt(1 - 1/Y) and 1 - sqrt(1/Y)."""
    one, even = torch.tensor([0.0, 7.0, 0.0, 0.0]), torch.full((4,), 0.25)
    wanted = {"kl": np.log(4), "l1": 1.5, "l2": 0.75**0.5, "cosine": 0.5}
    for metric, value in wanted.items():
        assert float(discrepancy(one, even, metric)) == pytest.approx(value, rel=1e-6)  # type: ignore[arg-type]


def test_a_round_without_a_positive_weight_is_fedavgs_and_is_counted() -> None:
    ours, theirs = federation("feddisco(a=9.0, b=-1.0)"), federation("fedavg")
    assert ours.round().diagnostics["feddisco.fallback"] == 1.0
    theirs.round()
    assert equal(ours.params, theirs.params)
    assert federation("feddisco").round().diagnostics["feddisco.fallback"] == 0.0


def test_what_is_sent_is_one_number() -> None:
    done = federation("feddisco(metric='l1')", skewed()).round()
    for k, reply in done.replies.items():
        shares = np.bincount(skewed()[k][1], minlength=3) / len(skewed()[k][1])
        sent = float(reply.uploads["feddisco"]["d"])
        assert sent == pytest.approx(np.abs(shares - 1 / 3).sum(), rel=1e-14)
    assert not parse("feddisco").needs_only_update_sum
