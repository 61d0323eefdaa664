"""Mime and MimeLite, restated from Karimireddy et al. 2021, Algorithm 1, with SGD and momentum.

U(y; g, m) = y - eta ((1 - beta) g + beta m),    V(m; c) = (1 - beta) c + beta m
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.parts.mime import PIECE, whole_gradient
from fedkeel.task.batch import Batch
from fedkeel.task.network import Network
from harness import Federation, toy_network
from method.players import LOCAL, equal, federation, gap, play, skewed
from method.test_theory import Quadratics
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend, flat

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 1, 3], [1, 2], [0, 3]]
MOMENTUM = Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9, weight_decay=0.01)


def mime(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    beta: float,
    lite: bool,
    weights: str = "uniform",
    mu: float = 0.0,
    server_lr: float = 1.0,
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    m = np.zeros_like(x)
    for t, clients in enumerate(cohorts):
        p = setup.shares(weights, clients, t)
        full = [setup.net.grad(x, *setup.data[i]) for i in clients]
        c = sum(s * g for s, g in zip(p, full, strict=True))
        sent = {}
        for i in clients:

            def at(bx, by, x=x, m=m, c=c):
                def gradient(y: Vector) -> Vector:
                    g = setup.net.grad(y, bx, by) + mu * (y - x)
                    if not lite:
                        g = g - setup.net.grad(x, bx, by) + c
                    return (1 - beta) * g + beta * m

                return gradient

            steps = (at(*batch) for batch in setup.examples(i, t))
            sent[i] = descend(x, steps, LR, **local) - x
        m = (1 - beta) * c + beta * m
        x = x + server_lr * sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(x, sent, {"m": m})


def look(ours: Federation) -> Mapping[str, Vector]:
    [part] = [p.name for p in ours.plan.parts if p.name.startswith("mime")]
    return {"m": flat(ours.played.server.memory[part]["m"])}


@each("name", ["mime", "mimelite"])
@each("beta", [0.0, 0.9])
@each("local", [{}, {"momentum": 0.5}, {"weight_decay": 0.1}])
def test_mime(name: str, beta: float, local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7), epochs=2)
    theirs = dict(local)
    theirs["decay"] = theirs.pop("weight_decay", 0.0)
    story = mime(setup, COHORTS, beta, name == "mimelite", **theirs)
    agree(setup.ours(f"{name}(beta={beta})", LR, **local), story, COHORTS, look)


@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_mime_weighted_by_examples(name: str) -> None:
    """As FedJAX does it."""
    setup = TrainingSetup()
    story = mime(setup, COHORTS, 0.6, name == "mimelite", weights="examples")
    agree(setup.ours(f"{name}(beta=0.6)", LR, weights="examples"), story, COHORTS, look)


@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_a_proximal_term_is_part_of_the_objective(name: str) -> None:
    """At the received model it is zero."""
    setup = TrainingSetup(epochs=2)
    story = mime(setup, COHORTS, 0.6, name == "mimelite", mu=0.7)
    agree(setup.ours(f"{name}(beta=0.6)+fedprox(mu=0.7)", LR), story, COHORTS, look)


@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_the_servers_step_size(name: str) -> None:
    setup = TrainingSetup()
    story = mime(setup, COHORTS, 0.6, name == "mimelite", server_lr=0.5)
    agree(setup.ours(f"{name}(beta=0.6)+addition(lr=0.5)", LR), story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_mimelite_without_momentum_is_fedavg(local: Local) -> None:
    options = {"local": local, "weights": "uniform", "rounds": 3}
    assert equal(play("mimelite(beta=0.0)", **options), play("fedavg", **options))
    for other in ("mimelite(beta=0.5)", "mime(beta=0.0)"):
        assert gap(play(other, **options), play("fedavg", **options)) > 1e-3


def test_mime_of_one_client_and_full_batches_is_fedavg() -> None:
    options = {
        "data": skewed((12,)),
        "batches": lambda k, _: [np.arange(12)] * 4,
        "rounds": 3,
    }
    assert gap(play("mime(beta=0.0)", **options), play("fedavg", **options)) < 1e-13


def test_mime_of_one_client_is_svrg() -> None:
    """Stages of inner steps, each with the anchor where the stage before ended."""
    setup = TrainingSetup(sizes=(12,), epochs=2)
    ours = setup.ours("mime(beta=0.0)", LR)
    x = setup.start
    for t in range(3):
        anchor, full = x, setup.net.grad(x, *setup.data[0])
        for bx, by in setup.examples(0, t):
            x = x - LR * (setup.net.grad(x, bx, by) - setup.net.grad(anchor, bx, by) + full)
        ours.round()
        assert np.abs(flat(ours.params) - x).max() < 1e-12


def test_one_full_batch_step_is_the_same_in_both() -> None:
    options = {"batches": lambda k, _: [np.arange(len(skewed()[k][1]))], "rounds": 4}
    assert gap(play("mime", **options), play("mimelite", **options)) < 1e-13


@pytest.mark.parametrize(
    ("beta", "rounds"), [(0.0, 60), pytest.param(0.5, 120, marks=pytest.mark.slow)]
)
def test_mime_ends_on_the_optimum_and_mimelite_off_it(beta: float, rounds: int) -> None:
    quadratics = Quadratics()
    best = quadratics.optimum
    ended = quadratics.play(f"mime(beta={beta})", 0.1, 0.0, rounds)
    assert np.linalg.norm(ended - best) < 1e-8
    assert np.linalg.norm(quadratics.play(f"mimelite(beta={beta})", 0.1, 0.0, rounds) - best) > 0.05


# --- what is sent, and how the gradient over everything is taken -----------------------------


def test_mimelite_sends_twice_what_fedavg_does() -> None:
    played = federation("mimelite")
    message = played.message([0, 1])
    model = tree.nbytes(dict(message.params))
    assert tree.nbytes(dict(message.broadcast)) == model
    assert tree.nbytes(dict(played.reply(0)[0].uploads)) == model


def test_mime_sends_three_times_as_much_down_and_twice_up() -> None:
    played = federation("mime")
    message = played.message([0, 1])
    model = tree.nbytes(dict(message.params))
    assert tree.nbytes(dict(message.broadcast)) == 2 * model
    assert tree.nbytes(dict(played.survey(0, message))) == model
    assert tree.nbytes(dict(played.reply(0, message=message)[0].uploads)) == 0


def whole(weight: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor) -> Step:
    network = toy_network()
    return Step(Batch(x, y, weight), network.params, ClientInfo(0, len(x)), network, {})


def test_pieces_make_the_gradient_of_the_whole() -> None:
    """Also where some examples are padding, and a whole piece of them."""
    rng = np.random.default_rng(0)
    real, n = PIECE + 57, 3 * PIECE + 11
    x, y = torch.from_numpy(rng.normal(size=(n, 8))), torch.from_numpy(rng.integers(0, 3, n))
    step = whole(None, x[:real], y[:real])
    wanted = step.grad(step.start)
    assert gap(whole_gradient(step, step.start), wanted) < 1e-13
    weight = (torch.arange(n) < real).double()
    padded = whole(weight, x, y)
    assert gap(whole_gradient(padded, padded.start), wanted) < 1e-13
    every = whole(None, x, y)
    assert gap(whole_gradient(every, every.start), wanted) > 1e-3


def test_batch_normalisation_never_sees_one_example_alone() -> None:
    """Where the last piece would be one: its statistics do not exist."""
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    network = Network(module, dtype=torch.float64)
    x = torch.randn(2 * PIECE + 1, 8, dtype=torch.float64)
    y = torch.arange(len(x)) % 3
    step = Step(Batch(x, y), network.params, ClientInfo(0, len(x)), network, network.buffers)
    sizes = [len(piece.batch.x) for piece, _ in step.pieces(PIECE)]
    assert sizes == [PIECE, PIECE + 1]
    assert all(t.isfinite().all() for t in whole_gradient(step, step.start).values())
    assert [len(p.batch.x) for p, _ in whole(None, x, y).pieces(PIECE)] == [PIECE, PIECE, 1]
