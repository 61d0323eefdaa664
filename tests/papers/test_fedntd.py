"""FedNTD, restated from Lee et al. 2022, section 3: softmaxes without the true class."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel.method.context import ClientInfo, Step
from fedkeel.method.grammar import parse
from fedkeel.task.batch import Batch, Output
from harness import toy_network
from method.players import LOCAL, equal, gap, play
from method.test_oracles import follow
from method.test_reductions import one_step
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, softmax
from papers.test_fedsam import MOMENTUM

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2]]


def divergence(scores: np.ndarray, taught: np.ndarray, y: np.ndarray, tau: float) -> np.ndarray:
    """Derivative of each example's KL(teacher || local) by the local scores."""
    slopes = np.zeros_like(scores)
    for row, true in enumerate(y):
        rest = [c for c in range(scores.shape[1]) if c != true]
        q = softmax(scores[row : row + 1, rest] / tau)[0]
        p = softmax(taught[row : row + 1, rest] / tau)[0]
        slopes[row, rest] = (q - p) / tau
    return slopes


def fedntd(
    setup: TrainingSetup, own: float, beta: float, tau: float, lr: float = LR, **local: object
) -> Iterator[Told]:
    """own CE + beta KL."""

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        scores, taught = setup.net.outputs(w, bx)[1], setup.net.outputs(x, bx)[1]
        slopes = own * (softmax(scores) - np.eye(setup.classes)[by])
        slopes += beta * divergence(scores, taught, by, tau)
        return setup.net.pull_back(w, bx, slopes / len(bx))

    return averaged(setup, COHORTS, gradient, lr, **local)


@each(("beta", "tau"), [(1.0, 1.0), (0.5, 3.0)])
@each("squared", [True, False])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedntd(beta: float, tau: float, squared: bool, local: dict) -> None:
    setup = TrainingSetup(epochs=2, classes=5)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = fedntd(setup, 1.0, beta * tau**2 if squared else beta, tau, **local)
    expression = f"fedntd(beta={beta}, tau={tau}, squared={squared})"
    agree(setup.ours(expression, LR, **ours), story, COHORTS)


def test_the_mixture_of_another_public_code_is_a_smaller_step() -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedntd(beta={3 / 7!r}, tau=2.0, squared=False)", 0.7 * LR, momentum=0.9)
    agree(ours, fedntd(setup, 0.7, 0.3, 2.0, momentum=0.9), COHORTS)


@pytest.mark.parametrize(
    ("case", "expression"), [("a", "fedntd"), ("b", "fedntd(beta=0.5, tau=3.0)")]
)
def test_fedntd_follows_the_gcfed_repository(case: str, expression: str) -> None:
    follow(f"gcfed_fedntd_{case}", expression)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_is_fedavg_bit_for_bit(local: object) -> None:
    assert equal(play("fedntd(beta=0.0)", local=local), play("fedavg", local=local))
    assert gap(play("fedntd", local=local), play("fedavg", local=local)) > 1e-3


def test_a_first_step_is_fedavgs() -> None:
    """Both models are one, where the divergence is least."""
    assert gap(play("fedntd(beta=100.0)", batches=one_step), play("fedavg", batches=one_step)) < (
        1e-12
    )


def term(logits: torch.Tensor, y: list[int], expression: str = "fedntd") -> torch.Tensor:
    """The term of each example; the teacher is the toy network on inputs of 1."""
    network = toy_network()
    batch = Batch(torch.ones(len(y), 8, dtype=torch.float64), torch.tensor(y))
    step = Step(batch, network.params, ClientInfo(0, len(y)), network, {})
    return parse(expression).objective.terms[0].loss_term(Output(logits), network.params, step)


def test_scores_of_the_true_class_do_not_enter() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0]] * 3, dtype=torch.float64)
    moved = logits + 5.0 * torch.eye(3, dtype=torch.float64)
    assert equal({"t": term(logits, [0, 1, 2])}, {"t": term(moved, [0, 1, 2])})
    assert float((term(logits, [0, 1, 2]) - term(moved, [1, 2, 0])).abs().min()) > 1e-3


def test_the_term_is_never_negative_and_zero_where_both_agree() -> None:
    network = toy_network()
    x = torch.ones(3, 8, dtype=torch.float64)
    same = network.logits(network.params, {}, x)
    assert float(term(same + 7.0, [0, 1, 2]).abs().max()) < 1e-15
    assert float(term(same.flip(1), [0, 1, 2]).min()) > 1e-4


def test_two_classes_leave_nothing_to_distil() -> None:
    setup = TrainingSetup(classes=2)
    cohorts = [[0, 1, 2, 3]] * 3
    other = setup.ours("fedavg", LR)
    ours = setup.ours("fedntd(beta=50.0)", LR)
    for clients in cohorts:
        assert equal(ours.round(clients).server.params, other.round(clients).server.params)
