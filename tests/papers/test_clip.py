"""Gradient clipping, restated from Pascanu, Mikolov and Bengio 2013, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.config import Local
from fedkeel.method.grammar import parse
from fedkeel.tree import Tree
from method.players import LOCAL, equal, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def clipped(setup: TrainingSetup, bound: float, mu: float = 0.0, **local: object) -> Iterator[Told]:
    x, cut, all_ = setup.start, 0, 0
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:

            def at(bx, by, x=x):
                def gradient(w: Vector) -> Vector:
                    nonlocal cut, all_
                    g = setup.net.grad(w, bx, by) + mu * (w - x)
                    norm = np.sqrt(sum(float(v) ** 2 for v in g))
                    all_ += 1
                    if norm >= bound:
                        cut += 1
                        g = bound / norm * g
                    return g

                return gradient

            steps = [at(*batch) for batch in setup.examples(i, t)]
            sent[i] = descend(x, iter(steps), LR, **local) - x
        p = setup.shares("examples", clients)
        x = x + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent)
    assert 0 < cut < all_  # it acts on some gradients and not on others


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_clip(local: dict, mu: float) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    expression = f"fedprox(mu={mu})+clip(norm=0.8)" if mu else "clip(norm=0.8)"
    agree(setup.ours(expression, LR, **ours), clipped(setup, 0.8, mu, **local), COHORTS)


# --- laws ------------------------------------------------------------------------------------


def cut(gradient: list[float], bound: float) -> Tree:
    part = parse(f"clip(norm={bound!r})").gradient_transforms[0]
    grads = {
        "a": torch.tensor(gradient[:1], dtype=torch.float64),
        "b": torch.tensor(gradient[1:], dtype=torch.float64).reshape(1, -1),
    }
    return part.transform_gradient(grads, grads, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_a_bound_above_every_norm_is_fedavg_bit_for_bit(local: Local) -> None:
    assert equal(play("clip(norm=1e6)", local=local), play("fedavg", local=local))
    assert gap(play("clip(norm=0.1)", local=local), play("fedavg", local=local)) > 1e-3


def test_the_norm_is_that_of_the_whole_model() -> None:
    """3, 4 and 12 have norm 13, in two tensors."""
    found = cut([3.0, 4.0, 12.0], 6.5)
    assert found["a"].tolist() == pytest.approx([1.5], rel=1e-15)
    assert found["b"].tolist() == [pytest.approx([2.0, 6.0], rel=1e-15)]
    kept = cut([3.0, 4.0, 12.0], 13.0)
    assert kept["b"].tolist() == [[4.0, 12.0]]


def test_clipping_twice_is_clipping_once() -> None:
    once = cut([0.3, -1.7, 2.1], 0.9)
    again = cut([*once["a"].tolist(), *once["b"][0].tolist()], 0.9)
    assert gap(again, once) < 1e-15


def test_no_gradient_stays_none() -> None:
    found = cut([0.0, 0.0, 0.0], 1e-3)
    assert found["a"].tolist() == [0.0]
    assert found["b"].tolist() == [[0.0, 0.0]]


def test_it_acts_after_corrections_and_projections_whatever_the_order() -> None:
    for expression in ("clip(norm=0.3)+localgc+scaffold", "scaffold+localgc+clip(norm=0.3)"):
        names = [part.name for part in parse(expression).gradient_transforms]
        assert names == ["scaffold", "gcfed.local", "clip"]


def test_a_proximal_term_does_not_pull_what_is_clipped() -> None:
    """What of it is left depends on the data, so no path length can count it."""
    assert parse("fedprox(mu=0.5)+clip").pull == 0.0


def test_one_step_is_no_longer_than_the_bound() -> None:
    """Under plain descent a client with one mini-batch moves by lr times it."""
    setup = TrainingSetup(sizes=(4, 4), batch=4)
    ours = setup.ours("clip(norm=0.05)", LR)
    for update in ours.round().deltas.values():
        length = float(sum(v.square().sum() for v in update.values())) ** 0.5
        assert length == pytest.approx(LR * 0.05, rel=1e-12)
