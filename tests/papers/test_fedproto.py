"""FedProto, restated from Tan et al. 2022, Eq. (3), (6) and (7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedkeel.errors import CompositionError, ModelError
from fedkeel.method.context import Population
from fedkeel.method.grammar import parse
from harness import Federation, distance, oracle
from method.players import equal, federation, gap
from papers.numpy_net import TrainingSetup, Vector, softmax
from papers.personal import CLIENTS, COHORTS, NAMES, ROUNDS, Arrays, collected, kept, tensors

LR = 0.2


def fedproto(setup: TrainingSetup, lam: float) -> Iterator[dict[str, Vector]]:
    net, models = setup.net, {}
    prototypes: dict[int, Vector] = {}
    for t, clients in enumerate(COHORTS):
        sums: dict[int, list[Vector]] = {}
        for i in clients:
            w = models.get(i, setup.start)
            for bx, by in setup.examples(i, t):
                features, scores = net.outputs(w, bx)
                near = np.stack([prototypes.get(y, f) for y, f in zip(by, features, strict=True)])
                d_features = 2.0 * lam * (features - near) / features.size
                d_scores = (softmax(scores) - np.eye(3)[by]) / len(by)
                w = w - LR * net.pull_back(w, bx, d_scores, d_features)
            models[i] = w
            x, labels = setup.data[i]
            features, _ = net.outputs(w, x)
            for y in np.unique(labels):
                sums.setdefault(int(y), []).append(features[labels == y].mean(axis=0))
        prototypes |= {y: np.mean(rows, axis=0) for y, rows in sums.items()}
        shown = {f"personal{i}": w for i, w in models.items()}
        yield shown | {f"prototype{y}": c for y, c in prototypes.items()}


def look(ours: Federation) -> dict[str, Vector]:
    prototypes = ours.played.server.memory["fedproto"]["prototypes"].numpy()
    return kept(ours, "personal") | {f"prototype{y}": c for y, c in enumerate(prototypes)}


@pytest.mark.parametrize("lam", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("labels", [None, [[0], [1, 2], [0, 1], [1]]])
def test_fedproto(lam: float, labels: list[list[int]] | None) -> None:
    setup = TrainingSetup(epochs=2, seed=3, labels=labels)
    ours = setup.ours(f"fedproto(lam={lam})", LR)
    assert not ours.params  # nothing is shared but prototypes
    for cohort, expected in zip(COHORTS, fedproto(setup, lam), strict=True):
        ours.round(cohort)
        seen = look(ours)
        for name, values in expected.items():
            np.testing.assert_allclose(seen[name], values, rtol=0, atol=1e-12)


def prototypes_of(o: Arrays, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The prototypes under a prefix, [Y, F], and which classes have one."""
    has = [f"{prefix}.proto.{y}" in o for y in range(3)]
    rows = [o[f"{prefix}.proto.{y}"] if h else np.zeros(6) for y, h in enumerate(has)]
    return torch.from_numpy(np.stack(rows)), torch.tensor(has, dtype=torch.float64)


@pytest.mark.parametrize("name", ["pfllib_fedproto_a", "flbench_fedproto_a"])
def test_steps_and_means_follow_both_collections(name: str) -> None:
    """Their prototypes of a client are of the moving model, so each round is given theirs."""
    o = oracle(name)
    played = collected(o, f"fedproto(lam={float(o['hp.lamda'])})", int(o["hp.epochs"]))
    memory = played.played.server.memory["fedproto"]
    for t in ROUNDS:
        if t > 1:
            means, is_known = prototypes_of(o, f"r{t - 1}")
            played.played.server.memory["fedproto"] = memory | {
                "prototypes": means,
                "is_known": is_known,
            }
        done = played.round()
        uploads = []
        for k in CLIENTS:
            own = done.client_state[k]["personal"]
            assert distance(own, tensors(o, f"r{t}.client{k}.", NAMES)) < 1e-12, (t, k)
            uploads.append(prototypes_of(o, f"r{t}.client{k}"))
        stacked, known = (torch.stack(x) for x in zip(*uploads, strict=True))
        means = stacked.sum(0) / known.sum(0)[:, None]  # what `next_server` computes
        assert float((means - prototypes_of(o, f"r{t}")[0]).abs().max()) < 1e-12


# --- laws ------------------------------------------------------------------------------------


def test_in_the_first_round_and_without_weight_clients_train_alone() -> None:
    first, plain = federation("fedproto").round(), federation("fedper(keep='*')").round()
    for k in range(4):
        assert gap(first.client_state[k]["personal"], plain.client_state[k]["personal"]) == 0.0
    drawn, alone, kept_apart = (
        federation(m) for m in ("fedproto", "fedproto(lam=0.0)", "fedper(keep='*')")
    )
    for played in (drawn, alone, kept_apart):
        for _ in range(3):
            played.round()
    for k in range(4):
        a, b, c = (p.played.client_state[k]["personal"] for p in (drawn, alone, kept_apart))
        assert equal(b, c)
        assert gap(a, c) > 1e-3


def test_a_class_that_no_client_of_the_round_has_keeps_its_prototype() -> None:
    setup = TrainingSetup(epochs=1, labels=[[0], [1, 2], [0, 1], [1]])
    ours = setup.ours("fedproto", LR)
    ours.round([0])
    before = ours.played.server.memory["fedproto"]
    ours.round([3])
    after = ours.played.server.memory["fedproto"]
    assert torch.equal(before["prototypes"][0], after["prototypes"][0])
    assert before["is_known"].tolist() == [1, 0, 0]
    assert after["is_known"].tolist() == [1, 1, 0]


def test_a_head_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(ModelError, match="number of features is not known"):
        parse("fedproto").server_states[0].init_server({}, Population(4, 2))


def test_parts_that_act_on_shared_parameters_are_refused() -> None:
    with pytest.raises(CompositionError, match=r"gcfed\.local needs SHARED_PARAMETERS"):
        parse("fedproto+gcfed")
    with pytest.raises(CompositionError, match="all parameters stay at the clients, and fedprox"):
        federation("fedper(keep='*')+fedprox")
    assert parse("fedproto+knnper").personal_prediction is not None
