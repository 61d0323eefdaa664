"""FedExP, restated from Jhunjhunwala et al. 2023, Algorithm 1: equal shares, one factor a round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span, Sums
from fedkeel.tree import Tree
from harness import Federation, distance, oracle, tensors, toy_network
from method.players import alike, equal, federation, gap, play, skewed
from papers.numpy_net import Told, TrainingSetup, agree, descend, paced

LR = 0.3
COHORTS = [[0, 2, 3], [1, 3], [0, 1, 2, 3], [2], [0, 1]]


def fedexp(
    setup: TrainingSetup, eps: float, factors: list[float], weights: str = "uniform", **local: float
) -> Iterator[Told]:
    w = setup.start
    for t, clients in enumerate(COHORTS):
        sent = {}
        for i in clients:
            steps = [
                (lambda y, bx=bx, by=by: setup.net.grad(y, bx, by))
                for bx, by in setup.examples(i, t)
            ]
            sent[i] = descend(w, iter(steps), LR, **local) - w
        p = setup.shares(weights, clients, t)
        mean = sum(s * sent[i] for s, i in zip(p, clients, strict=True))
        spread = sum(s * np.sum(sent[i] ** 2) for s, i in zip(p, clients, strict=True))
        factors.append(max(1.0, spread / (2 * (np.sum(mean**2) + eps))))
        w = w + factors[-1] * mean
        yield Told(w, sent)


@each("eps", [0.0, 1e-3])
@each("local", [{}, {"momentum": 0.9, "decay": 0.05}])
@each("weights", ["uniform", "examples"])
def test_fedexp(eps: float, local: dict, weights: str) -> None:
    setup = TrainingSetup(epochs=2, labels=[[0], [1], [2], [0, 1]])
    ours = {("weight_decay" if k == "decay" else k): v for k, v in local.items()}
    factors: list[float] = []
    story = fedexp(setup, eps, factors, weights, **local)
    agree(setup.ours(f"fedexp(eps={eps})", LR, weights=weights, **ours), story, COHORTS)
    assert max(factors) > 1.05  # so the factor is seen
    assert factors[3] == 1.0  # of one client alone


# --- the authors' code -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("fedexp_a", "fedexp"),
        ("fedexp_prox_a", "fedprox(mu=0.5)+fedexp"),
        ("fedexp_scaffold_a", "scaffold+fedexp"),
    ],
)
def test_fedexp_follows_its_authors(name: str, expression: str) -> None:
    """Their eps is multiplied by the number of clients, and falls with the square of the rate."""
    o = oracle(name)
    clients = [(o[f"client{k}.x"], o[f"client{k}.y"]) for k in range(3)]
    steps, size = int(o["hp.local_steps"]), int(o["hp.batch_size"])

    def batches(k: int, _: int) -> list[np.ndarray]:
        n = len(clients[k][1])
        every = [np.arange(n)[i : i + size] for i in range(0, n, size)]
        return [every[s % len(every)] for s in range(steps)]

    rate = [float(o["hp.lr"]) * float(o["hp.decay"]) ** t for t in (1, 2, 3)]
    local = Local(
        lr=rate[0],
        steps=steps,
        batch_size=size,
        weight_decay=float(o["hp.weight_decay"]),
        clip_norm=float(o["hp.max_norm"]),
    )
    played = Federation(
        expression, toy_network(tensors(o, "init.")), clients, local, batches, weights="examples"
    )

    def told() -> Iterator[Told]:
        for t in (1, 2, 3):
            eps = 3 * float(o["hp.epsilon"]) * float(o["hp.decay"]) ** (2 * t)
            method = expression.replace("fedexp", f"fedexp(eps={eps!r})")
            played.plan = parse(method, weights="examples")
            yield Told(np.zeros(0))

    for t, _ in enumerate(paced(played, told(), rate), start=1):
        if "scaffold" in name and t > 1:  # theirs weighs control variates by examples, ours equally
            before = tensors(o, f"r{t}.c_before.")
            played.played.server.memory["scaffold"] = {"c": dict(before)}
        done = played.round()
        for k, update in done.deltas.items():
            assert distance(update, tensors(o, f"r{t}.client{k}.delta.")) < 1e-12
        assert done.diagnostics["fedexp.factor"] == pytest.approx(
            float(o[f"r{t}.eta_g"]), abs=1e-12
        )
        assert distance(played.params, tensors(o, f"r{t}.")) < 1e-12


# --- laws and reductions ---------------------------------------------------------------------


def test_one_client_alone_trains_as_in_fedavg_bit_for_bit() -> None:
    alone = skewed((12,))
    assert equal(play("fedexp(eps=0.0)", alone), play("fedavg", alone))


def test_clients_that_agree_make_a_step_of_fedavg() -> None:
    assert equal(play("fedexp(eps=0.0)", alike()), play("fedavg", alike(), weights="uniform"))
    assert gap(play("fedexp(eps=0.0)"), play("fedavg", weights="uniform")) > 1e-3


def test_a_large_eps_is_fedavg_bit_for_bit() -> None:
    assert equal(play("fedexp(eps=1e6)"), play("fedavg", weights="uniform"))


def reduced(rows: Tree, expression: str, summed: bool = False) -> tuple[Tree, float]:
    """The aggregate after the method's transform of some updates, and the factor."""
    count = len(next(iter(rows.values())))
    plan = parse(expression)
    part = plan.aggregate_transforms[0]
    norms2 = sum(v.square().flatten(1).sum(dim=1) for v in rows.values())
    cohort = RoundCohort(
        np.arange(count), np.full(count, 1.0 / count), 0.1, 0, Population(count, count), ("w",), 0
    )
    updates: Span = Span(rows)
    if summed:  # as an engine keeps them where only the sum is needed: two groups
        groups = [slice(0, count - 1), slice(count - 1, count)]
        shares = {
            k: torch.stack([v[g].sum(dim=0) / count for g in groups]) for k, v in rows.items()
        }
        updates, norms2 = (
            Sums(shares, weights=cohort.weights),
            torch.stack([norms2[g].sum() for g in groups]),  # type: ignore[index]
        )
    cohort.uploads["norm2"] = norms2  # type: ignore[assignment]
    mean = plan.reduction.reduce(updates, cohort)
    found = part.transform_aggregate(mean, updates, cohort)
    return found, cohort.diagnostics[".factor"]


@pytest.mark.parametrize("summed", [False, True])
def test_orthogonal_updates_of_one_length_are_multiplied_by_half_their_number(
    summed: bool,
) -> None:
    rows = {"w": 0.3 * torch.eye(6, dtype=torch.float64)}
    found, factor = reduced(rows, "fedexp(eps=0.0)", summed)
    assert factor == pytest.approx(3.0, rel=1e-14)
    assert gap(found, {"w": torch.full((6,), 0.15, dtype=torch.float64)}) < 1e-14


@pytest.mark.parametrize("value", [0.0, 1e-200])
def test_updates_of_nothing_give_no_nan(value: float) -> None:
    found, factor = reduced({"w": torch.full((3, 2), value)}, "fedexp(eps=0.0)")
    assert factor == 1.0
    assert torch.isfinite(found["w"]).all()


def test_projections_onto_affine_sets_come_nearer_by_what_the_paper_promises() -> None:
    """Clients project onto {w : A_k w = A_k w*}; the identity holds for any common point w*."""
    rng = np.random.default_rng(0)
    common, start = rng.normal(size=12), rng.normal(size=12)
    planes = [np.linalg.qr(rng.normal(size=(12, 2)))[0] for _ in range(5)]  # orthonormal normals
    updates = np.stack([q @ (q.T @ (common - start)) for q in planes])
    found, factor = reduced({"w": torch.from_numpy(updates)}, "fedexp(eps=0.0)")
    assert factor > 1.0
    spread, mean2 = (updates**2).sum(axis=1).mean(), (updates.mean(axis=0) ** 2).sum()
    before, after = (np.sum((common - w) ** 2) for w in (start, start + found["w"].numpy()))
    assert before - after == pytest.approx(0.75 * spread**2 / mean2, rel=1e-12)
    plain = np.sum((common - start - updates.mean(axis=0)) ** 2)
    assert after < plain < before


def test_what_is_sent_is_one_number_up() -> None:
    done = federation("fedexp").round()
    for k, reply in done.replies.items():
        norm2 = float(tree.dot(done.deltas[k], done.deltas[k]))
        assert float(reply.uploads["fedexp"]["norm2"]) == norm2
    assert parse("fedexp").sum_only_uploads == {"fedexp"}
    assert parse("fedexp", weights="examples").sum_only_uploads == frozenset()
