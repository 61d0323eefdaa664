"""FedLC, restated from Zhang et al. 2022, section 4: scores less tau n_c^{-1/4}, then a softmax."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch
from fedkeel.tree import Tree
from harness import toy_network
from method.players import LOCAL, alike, equal, federation, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, softmax
from papers.test_fedsam import MOMENTUM

COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2, 4]]
LABELS = [[0, 1], [1], [0, 1, 2], [2, 0], [2]]


def fedlc(
    setup: TrainingSetup, tau: float, exclude: bool, lr: float, **local: object
) -> Iterator[Told]:
    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        n = np.array([np.sum(setup.data[i][1] == c) for c in range(3)])
        _, scores = setup.net.outputs(w, bx)
        slopes = np.zeros_like(scores)
        for row, y in enumerate(by):
            rivals = [c for c in range(3) if n[c] > 0 and (c != y or not exclude)]
            if not rivals:
                continue
            calibrated = [[scores[row, c] - tau * n[c] ** -0.25 for c in rivals]]
            slopes[row, rivals] = softmax(np.array(calibrated))[0]
            slopes[row, y] -= 1.0
        return setup.net.pull_back(w, bx, slopes / len(bx))

    return averaged(setup, COHORTS, gradient, lr, **local)


@each("exclude", [False, True])
@each("tau", [0.1, 1.0])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedlc(tau: float, exclude: bool, local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6), labels=LABELS, epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    lr = 0.01 if exclude else 0.3  # without a lower bound there is no end to it
    story = fedlc(setup, tau, exclude, lr, **local)
    agree(setup.ours(f"fedlc(tau={tau}, exclude={exclude})", lr, **ours), story, COHORTS)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_margin_is_fedavg_bit_for_bit(local: object) -> None:
    """Clients see two classes of three at most: at tau = 0 none is left out."""
    assert equal(play("fedlc(tau=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("fedlc(tau=1.0)", local=local), play("fedavg", local=local)) > 1e-3


def test_no_margin_and_y_left_out_is_not_fedavg() -> None:
    assert gap(play("fedlc(tau=0.0, exclude=True)"), play("fedavg")) > 1e-3


def test_equally_many_of_every_class_is_fedavg_to_rounding() -> None:
    data = alike(n=9)
    assert gap(play("fedlc(tau=1.0)", data), play("fedavg", data)) < 1e-12


@pytest.mark.parametrize("exclude", [False, True])
def test_a_client_of_one_class_has_nothing_to_learn(exclude: bool) -> None:
    x = np.random.default_rng(0).normal(size=(6, 8))
    data = [(x, np.full(6, 1)), (x, np.arange(6) % 3)]
    done = federation(f"fedlc(exclude={exclude})", data).round()
    assert all(not v.any() for v in done.deltas[0].values())
    assert all(v.any() for v in done.deltas[1].values())


def losses(logits: list[list[float]], y: list[int], counts: list[int], **options: object) -> list:
    part = parse(f"fedlc({', '.join(f'{k}={v}' for k, v in options.items())})").objective.criterion
    batch = Batch(torch.zeros(len(y), 8), torch.tensor(y))
    step = Step(batch, {}, ClientInfo(0, sum(counts), torch.tensor(counts)), toy_network(), {})
    assert part is not None
    return part.criterion(torch.tensor(logits, dtype=torch.float64), step).tolist()


def test_rare_classes_have_large_margins() -> None:
    """Of 16 and 1 examples, margins are tau / 2 and tau."""
    common, rare = losses([[0.0, 0.0]] * 2, [0, 1], [16, 1], tau=1.0)
    assert common == pytest.approx(np.log1p(np.exp(-0.5)), rel=1e-14)
    assert rare == pytest.approx(np.log1p(np.exp(0.5)), rel=1e-14)
    assert losses([[0.0, 0.0]], [1], [16, 1], tau=1.0, exclude=True) == [0.5]


def test_only_the_printed_loss_has_no_lower_bound() -> None:
    far = [[1000.0, 0.0, 0.0]]
    assert losses(far, [0], [4, 4, 4]) == [0.0]
    assert losses(far, [0], [4, 4, 4], exclude=True)[0] < -999.0


@pytest.mark.parametrize("exclude", [False, True])
def test_padding_may_have_a_label_of_which_there_is_no_example(exclude: bool) -> None:
    network = toy_network()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 8)))
    y, weight = torch.tensor([0, 1, 0, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
    plan = parse(f"fedlc(exclude={exclude})")
    counts = torch.tensor([2, 1, 0])

    def grad(batch: Batch) -> Tree:
        return Step(
            batch, network.params, ClientInfo(0, 3, counts), network, {}, objective=plan.objective
        ).grad(network.params)

    padded = grad(Batch(x, y, weight))
    assert gap(padded, grad(Batch(x[:3], y[:3]))) < 1e-14
