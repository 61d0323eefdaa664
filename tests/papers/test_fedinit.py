"""FedInit, restated from Sun et al. 2023, Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedkeel import tree
from harness import distance, oracle, tensors
from method.players import equal, federation, gap, play
from papers.fl_simulator import CLIENTS, ROUNDS, model_before, simulated
from papers.numpy_net import Told, TrainingSetup, agree, descend, flat
from papers.personal import COHORTS

LR = 0.2


def fedinit(setup: TrainingSetup, beta: float, **local: float) -> Iterator[Told]:
    w, last = setup.start, {}
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            begin = w + beta * (w - last.get(i, w))
            steps = [
                (lambda y, bx=bx, by=by: setup.net.grad(y, bx, by))
                for bx, by in setup.examples(i, t)
            ]
            last[i] = descend(begin, iter(steps), LR, **local)
            sent[i] = last[i] - w
        p = setup.shares("examples", clients)
        w = w + sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        yield Told(w, sent, {f"end{i}": end for i, end in last.items()})


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "decay": 0.05}])
def test_fedinit(beta: float, local: dict) -> None:
    setup = TrainingSetup(epochs=2)
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    agree(
        setup.ours(f"fedinit(beta={beta})", LR, **ours),
        fedinit(setup, beta, **local),
        COHORTS,
        lambda f: {
            f"end{i}": flat(state["fedinit"]["end"]) for i, state in f.played.client_state.items()
        },
    )


def test_fedinit_follows_its_authors() -> None:
    """Their server takes the mean of what clients have moved; the paper, of where they end."""
    o = oracle("fedinit_a")
    played = simulated(o, f"fedinit(beta={float(o['hp.beta'])!r})")
    for t in ROUNDS:
        played.played.server.params.update(model_before(o, t))
        done = played.round()
        for k in CLIENTS:
            begin = tensors(o, f"r{t}.client{k}.start.")
            end = tree.add(begin, tensors(o, f"r{t}.client{k}.delta."))
            assert distance(done.client_state[k]["fedinit"]["end"], end) < 1e-12
            assert distance(done.deltas[k], tree.sub(end, model_before(o, t))) < 1e-12


# --- laws and reductions ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["", "+fedprox(mu=0.5)", "+momentum", "+feddyn"])
def test_without_a_step_it_is_the_method_without_it(method: str) -> None:
    assert equal(play("fedinit(beta=0.0)" + method), play(method.lstrip("+") or "fedavg"))
    assert gap(play("fedinit(beta=0.3)" + method), play(method.lstrip("+") or "fedavg")) > 1e-3


def test_the_first_round_of_a_client_begins_at_the_received_model() -> None:
    ours, plain = federation("fedinit(beta=0.5)"), federation("fedavg")
    for played in (ours, plain):
        played.round([0, 1])
    assert equal(ours.params, plain.params)
    for played in (ours, plain):
        played.round([1, 2])
    assert equal(ours.played.deltas[2], plain.played.deltas[2])
    assert gap(ours.played.deltas[1], plain.played.deltas[1]) > 1e-3
