"""FedAdamW, restated from Liu et al. 2026, Algorithm 2, and compared with its authors' code.

The numbers in comments are the lines of what the paper's Algorithm 2 says: m starts at 0, v at the
mean of all clients' means over blocks, and each step leans to the global update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from fedkeel import tree
from fedkeel.config import Local
from harness import Federation, consecutive, distance, oracle, tensors, toy_network
from method.players import LOCAL, federation, gap, play, skewed
from method.test_oracles import clients_of, hp, rounds_of
from papers.numpy_net import Told, TrainingSetup, Vector, agree, flat

LR = 0.02
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1]]


def spread(setup: TrainingSetup, v: Vector, blocks: str) -> Vector:
    """Every entry of a block becomes its mean."""
    if blocks == "entry":
        return v
    out = v.copy()
    for name, part in setup.net.split(v).items():
        rows = part if part.ndim == 2 and blocks == "row" else part.reshape(1, -1)
        means = np.repeat(rows.mean(axis=1), rows.shape[1])
        out[setup.net.spans[name]] = means
    return out


def fedadamw(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    alpha: float = 0.5,
    blocks: str = "row",
    decay: float = 0.0,
    whole: bool = False,
) -> Iterator[Told]:
    x, (b1, b2), eps = setup.start, (0.9, 0.999), 1e-8
    v_mean, towards, done = np.zeros_like(x), np.zeros_like(x), 0.0
    for t, clients in enumerate(cohorts):
        ends, vs, counts = {}, {}, {}
        for i in clients:
            y, m, v = x, np.zeros_like(x), v_mean
            for k, batch in enumerate(setup.examples(i, t), start=1):
                g = setup.net.grad(y, *batch)
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                m_hat = m / (1 - b1 ** (done + k if whole else k))
                v_hat = v / (1 - b2 ** (done + k))
                y = y - LR * (m_hat / (np.sqrt(v_hat) + eps) + alpha * towards + decay * y)
            ends[i], vs[i], counts[i] = y, spread(setup, v, blocks), k
        steps = np.mean(list(counts.values()))
        sent = {i: y - x for i, y in ends.items()}
        towards = -np.mean(list(sent.values()), axis=0) / (steps * LR)
        x = x + np.mean(list(sent.values()), axis=0)
        v_mean, done = np.mean(list(vs.values()), axis=0), done + steps
        yield Told(x, sent, {"direction": towards, "total": np.array([done])})


def look(ours: Federation) -> Mapping[str, Vector]:
    memory = ours.played.server.memory["fedadamw"]
    return {"direction": flat(memory["direction"]), "total": np.array([float(memory["total"])])}


@pytest.mark.parametrize(
    ("options", "alpha", "blocks", "decay", "whole"),
    [
        ("", 0.5, "row", 0.0, False),
        ("alpha=0.2, blocks='tensor'", 0.2, "tensor", 0.1, False),
        ("blocks='entry', corrected='run'", 0.5, "entry", 0.01, True),
    ],
)
def test_fedadamw(options: str, alpha: float, blocks: str, decay: float, whole: bool) -> None:
    setup = TrainingSetup(epochs=2)
    ours = setup.ours(f"fedadamw({options})", LR, weight_decay=decay)
    story = fedadamw(setup, COHORTS, alpha, blocks, decay, whole)
    assert agree(ours, story, COHORTS, look, tol=1e-10) == len(COHORTS)


def test_it_follows_its_authors() -> None:
    """At most K steps in a round, while their count of the run goes on by another number."""
    o = oracle("fedadamw_a")
    clients, size = clients_of(o), int(hp(o, "batch_size"))
    steps, epochs = int(hp(o, "max_local_steps")), int(hp(o, "epochs"))
    local = Local(
        **{"lr": hp(o, "lr"), "epochs": epochs, "batch_size": size, "clip_norm": hp(o, "max_norm")},
        weight_decay=hp(o, "weight_decay"),
    )
    ours = Federation(
        f"fedadamw(alpha={hp(o, 'gamma')}, blocks='entry', corrected='run')",
        toy_network(tensors(o, "init.")),
        clients,
        local,
        lambda k, _: consecutive(len(clients[k][1]), size, epochs)[:steps],
    )
    for t in range(1, rounds_of(o) + 1):
        memory = ours.played.server.memory["fedadamw"]
        memory["total"] = torch.tensor(float(o[f"r{t}.step_in"]), dtype=torch.float64)
        played = ours.round()
        for k, update in played.deltas.items():
            assert distance(update, tensors(o, f"r{t}.client{k}.delta.")) < 1e-12
        assert distance(ours.params, tensors(o, f"r{t}.")) < 1e-12
        v = tree.leaves(ours.played.server.memory["fedadamw"], "v")
        assert distance(v, tensors(o, f"r{t}.v.")) < 1e-12


# --- laws ------------------------------------------------------------------------------------

ADAMW = Local(lr=LR, epochs=2, batch_size=4, optimiser="adamw", weight_decay=0.05)


def test_the_first_round_is_local_adamws() -> None:
    ours = play("fedadamw", rounds=1, local=ADAMW)
    assert gap(ours, play("fedavg", rounds=1, local=ADAMW, weights="uniform")) < 1e-14
    ours = play("fedadamw", rounds=2, local=ADAMW)
    assert gap(ours, play("fedavg", rounds=2, local=ADAMW, weights="uniform")) > 1e-3


def test_one_client_alone_makes_one_run_of_adamw_without_momentum() -> None:
    """v and its count go on from round to round as where the client keeps its state."""
    alone, kept = skewed((12,)), ADAMW.model_copy(update={"keep_state": True, "betas": (0.0, 0.99)})
    ours = "fedadamw(alpha=0.0, beta1=0.0, beta2=0.99, blocks='entry')"
    assert gap(play(ours, alone, 4, local=kept), play("fedavg", alone, 4, local=kept)) < 1e-13


def test_a_large_eps_leaves_plain_gradient_descent() -> None:
    ours = play(
        "fedadamw(alpha=0.0, beta1=0.0, eps=1e6)", local=LOCAL.model_copy(update={"lr": 1e5})
    )
    assert gap(ours, play("fedavg", local=LOCAL, weights="uniform")) < 1e-5


def test_what_is_sent_is_one_model_down_and_few_numbers_up() -> None:
    played = federation("fedadamw").round()
    assert tree.numel(tree.leaves(played.replies[0].uploads["fedadamw"], "v")) == 6 + 1 + 3 + 1
    entries = tree.leaves(played.server.memory["fedadamw"], "direction")
    assert tree.numel(entries) == tree.numel(played.server.params)
