"""FedNAR, restated from Li et al. 2023: clip(g + lambda w) in every local step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.config import Local
from fedkeel.method.grammar import parse
from harness import Federation, distance, oracle, tensors, toy_network
from method.players import LOCAL, equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, paced

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def fednar(
    setup: TrainingSetup, lam: float, bound: float, shortened: list[bool], **local: float
) -> Iterator[Told]:
    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        both = setup.net.grad(w, bx, by) + lam * w
        size = np.sqrt(np.sum(both**2))
        shortened.append(bool(size > bound))
        return both * (bound / size) if size > bound else both

    return averaged(setup, COHORTS, gradient, LR, **local)


@pytest.mark.parametrize(("lam", "bound"), [(0.3, 0.75), (0.05, 1.0)])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}, {"decay": 0.05}])
def test_fednar(lam: float, bound: float, local: dict) -> None:
    """The third case has a weight decay of the local optimiser too, which comes after."""
    setup, shortened = TrainingSetup(epochs=2), list[bool]()
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = fednar(setup, lam, bound, shortened, **local)
    agree(setup.ours(f"fednar(decay={lam}, norm={bound})", LR, **ours), story, COHORTS)
    assert 0.1 < np.mean(shortened) < 0.95


# --- the authors' code -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "partner"), [("fednar_a", ""), ("fednar_scaffold_a", "scaffold+")]
)
def test_fednar_follows_its_authors(name: str, partner: str) -> None:
    """Their 1e-6 beside a norm of about 1 is seen in the seventh digit."""
    o = oracle(name)
    clients = [(o[f"client{k}.x"], o[f"client{k}.y"]) for k in range(3)]
    steps, size = int(o["hp.local_steps"]), int(o["hp.batch_size"])

    def batches(k: int, _: int) -> list[np.ndarray]:
        n = len(clients[k][1])
        every = [np.arange(n)[i : i + size] for i in range(0, n, size)]
        return [every[s % len(every)] for s in range(steps)]

    rates = [float(o["hp.lr"]) * float(o["hp.decay"]) ** t for t in (1, 2, 3)]
    decay, bound = float(o["hp.weight_decay"]), float(o["hp.max_norm"])
    played = Federation(
        f"{partner}fednar(decay={decay}, norm={bound})",
        toy_network(tensors(o, "init.")),
        clients,
        Local(lr=rates[0], steps=steps, batch_size=size),
        batches,
        weights="examples",
    )
    rounds = paced(played, (Told(np.zeros(0)) for _ in rates), rates)
    for t, _ in enumerate(rounds, start=1):
        if partner and t > 1:  # theirs weighs control variates by examples, ours equally
            before = tensors(o, f"r{t}.c_before.")
            played.played.server.memory["scaffold"] = {"c": dict(before)}
        done = played.round()
        for k, update in done.deltas.items():
            assert distance(update, tensors(o, f"r{t}.client{k}.delta.")) < 5e-7
        assert distance(played.params, tensors(o, f"r{t}.")) < 5e-7


# --- laws ------------------------------------------------------------------------------------


def test_without_decay_it_is_clip_bit_for_bit() -> None:
    assert equal(play("fednar(decay=0.0, norm=0.5)"), play("clip(norm=0.5)"))
    assert gap(play("fednar(decay=0.2, norm=0.5)"), play("clip(norm=0.5)")) > 1e-3


def test_a_bound_above_every_norm_leaves_fedavgs_weight_decay() -> None:
    decayed = LOCAL.model_copy(update={"weight_decay": 0.2})
    assert gap(play("fednar(decay=0.2, norm=1e6)"), play("fedavg", local=decayed)) < 1e-14


def test_a_step_is_no_longer_than_the_bound() -> None:
    """3, 4 and 12 have norm 13; gradient and decay point the same way."""
    part = parse("fednar(decay=0.5, norm=6.5)").gradient_transforms[0]
    g = {"w": torch.tensor([2.0, 3.0, 8.0]).double(), "b": torch.zeros(1).double()}
    w = {"w": torch.tensor([2.0, 2.0, 8.0]).double(), "b": torch.zeros(1).double()}
    found = part.transform_gradient(g, w, None)["w"]  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx([1.5, 2.0, 6.0], rel=1e-15)


def test_nothing_stays_nothing() -> None:
    part = parse("fednar").gradient_transforms[0]
    zero = {"w": torch.zeros(3)}
    assert equal(part.transform_gradient(zero, zero, None), zero)  # type: ignore[arg-type]


def test_a_proximal_term_does_not_count_in_the_path() -> None:
    assert parse("fedprox(mu=0.5)+fednar").pull == 0.0
