"""FedCurv, restated from Shoham et al. 2019, section 3: one term for each other client."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.method import per_example
from fedkeel.method.context import ClientInfo, Round, Step
from fedkeel.method.grammar import parse
from fedkeel.method.parts.fedcurv import fisher
from fedkeel.task.batch import Batch
from harness import toy_network
from method.players import LOCAL, equal, federation, gap, normed, play, skewed
from papers.numpy_net import Told, TrainingSetup, Vector, agree, averaged, flat
from papers.test_fedsam import MOMENTUM

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]


def fedcurv(setup: TrainingSetup, lam: float, memory: str, **local: object) -> Iterator[Told]:
    """Every term stands by itself: (theta_j, I_j) of each client that counts."""
    known: dict[int, tuple[Vector, Vector]] = {}
    fresh: dict[int, tuple[Vector, Vector]] = {}

    def gradient(w: Vector, x: Vector, bx: np.ndarray, by: np.ndarray, i: int) -> Vector:
        g = setup.net.grad(w, bx, by)
        for j, (model, information) in known.items():
            if memory == "round" or j != i:
                g = g + 2 * lam * information * (w - model)
        return g

    def ended(i: int, end: Vector) -> None:
        x, y = setup.data[i]
        squares = [setup.net.grad(end, x[n : n + 1], y[n : n + 1]) ** 2 for n in range(len(x))]
        fresh[i] = end, np.mean(squares, axis=0)

    for told in averaged(setup, COHORTS, gradient, LR, ended, **local):
        if memory == "round":
            known.clear()
        known.update(fresh)
        fresh.clear()
        u = sum(information for _, information in known.values())
        v = sum(information * model for model, information in known.values())
        yield Told(told.model, told.sent, {"u": u, "v": v})


def look(ours: object) -> dict[str, Vector]:
    state = ours.played.server.memory["fedcurv"]  # type: ignore[attr-defined]
    return {"u": flat(state["u"]), "v": flat(state["v"])}


@each("memory", ["clients", "round"])
@each("lam", [1e-3, 0.3])
@each("local", [{}, {"momentum": 0.5, "decay": 0.05}])
def test_fedcurv(memory: str, lam: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    story = fedcurv(setup, lam, memory, **local)
    agree(setup.ours(f"fedcurv(lam={lam}, memory='{memory}')", LR, **ours), story, COHORTS, look)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["clients", "round"])
@pytest.mark.parametrize("local", [LOCAL, MOMENTUM])
def test_no_weight_and_no_past_are_fedavg_bit_for_bit(memory: str, local: object) -> None:
    nothing = f"fedcurv(lam=0.0, memory='{memory}')"
    assert equal(play(nothing, local=local), play("fedavg", local=local))
    stiff = f"fedcurv(lam=10.0, memory='{memory}')"
    assert equal(play(stiff, rounds=1), play("fedavg", rounds=1))
    assert gap(play(stiff), play("fedavg")) > 1e-3


def test_a_client_alone_has_no_penalty_but_with_its_own() -> None:
    alone = skewed((12,))
    ours = play("fedcurv(lam=10.0)", alone, rounds=4)
    assert gap(ours, play("fedavg", alone, rounds=4)) < 1e-12
    assert gap(play("fedcurv(lam=10.0, memory='round')", alone), play("fedavg", alone)) > 1e-3


def test_who_stays_away_counts_for_all_clients_and_not_for_a_round() -> None:
    for memory, count in (("clients", 3), ("round", 1)):
        played = federation(f"fedcurv(memory='{memory}')")
        played.round([0, 1])
        first = played.played.server.memory["fedcurv"]["u"]
        played.round([2])
        state = played.played.server.memory["fedcurv"]["u"]
        uploaded = played.played.replies[2].uploads["fedcurv"]["u"]
        expected = tree.add(first, uploaded) if count == 3 else dict(uploaded)
        assert equal(state, expected)


def test_what_is_sent() -> None:
    """Two models up with the clients' own terms taken out again, one with the last round's."""
    for memory, names in (("clients", ["u", "v"]), ("round", ["u"])):
        played = federation(f"fedcurv(memory='{memory}')").round()
        assert list(played.replies[0].uploads["fedcurv"]) == names
        assert list(played.server.memory["fedcurv"]) == ["u", "v"]
        assert bool(played.client_state[0]["fedcurv"]) == (memory == "clients")


def test_its_gradient_counts_as_any_other() -> None:
    assert parse("fedcurv(lam=5.0)+fednova").pull == 0.0
    assert parse("fedprox(mu=0.5)+fedcurv+fednova").pull == 0.5


def ended(weight: torch.Tensor | None = None, rows: int = 11) -> Round:
    network = toy_network()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 8)))
    batch = Batch(x, torch.arange(rows) % 3, weight)
    step = Step(batch, network.params, ClientInfo(0, rows), network, {})
    return Round(network.params, network.params, ClientInfo(0, rows), 1, 1.0, 0.1, lambda: step)


def test_information_does_not_depend_on_how_many_examples_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = fisher(ended())
    monkeypatch.setattr(per_example, "MAX_ENTRIES", 4 * tree.numel(at_once) + 1)
    assert len(ended().all_examples_step().pieces(4)) == 3
    assert gap(fisher(ended()), at_once) < 1e-14
    monkeypatch.setattr(per_example, "MAX_ENTRIES", 1)
    assert gap(fisher(ended()), at_once) < 1e-14


def test_padding_has_no_information(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(11, dtype=torch.float64)
    weight[6:] = 0.0
    six = ended(rows=11)
    real = Batch(six.all_examples_step().batch.x[:6], six.all_examples_step().batch.y[:6])
    alone = Step(real, six.start, ClientInfo(0, 6), toy_network(), {})
    plain = fisher(Round(six.start, six.end, ClientInfo(0, 6), 1, 1.0, 0.1, lambda: alone))
    for entries in (1 << 22, 4 * tree.numel(plain)):
        monkeypatch.setattr(per_example, "MAX_ENTRIES", entries)
        assert gap(fisher(ended(weight)), plain) < 1e-14


def test_batch_statistics_are_those_of_evaluation() -> None:
    """Examples do not see each other: the information is that of each of them by itself."""
    network = normed()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 8)))
    y = torch.arange(5) % 3
    step = Step(Batch(x, y), network.params, ClientInfo(0, 5), network, network.buffers)
    found = fisher(
        Round(network.params, network.params, ClientInfo(0, 5), 1, 1.0, 0.1, lambda: step)
    )
    total = tree.zeros_like(network.params)
    for n in range(5):
        leaves = {k: v.clone().requires_grad_() for k, v in network.params.items()}
        one = Batch(x[n : n + 1], y[n : n + 1])
        network.loss(leaves, network.copy_buffers(network.buffers), one, train=False).backward()
        total = {k: total[k] + v.grad**2 / 5 for k, v in leaves.items()}  # type: ignore[operator]
    assert gap(found, total) < 1e-13
