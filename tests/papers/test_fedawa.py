"""FedAWA, restated from Shi et al. 2025 with torch's Adam, and compared with its authors' code.

The restatement takes L as it is written, on whole vectors, and lets torch differentiate it; ours
knows only the inner products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from fedkeel import tree
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span
from harness import Federation, distance, oracle, tensors
from method.players import equal, federation, gap, play, skewed
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [0, 3], [1, 2, 3], [0, 1, 3]]


def loss_of(shares: torch.Tensor, start: torch.Tensor, D: torch.Tensor, kind: str) -> torch.Tensor:
    models = start + D
    if kind == "cosine":
        far = 1 - torch.cosine_similarity(start[None], models)
    else:
        far = (D**2).mean(dim=1)
    return (shares * far).sum() + (shares * (D - shares @ D).norm(dim=1)).sum()


def fedawa(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    steps: int,
    lr: float,
    kind: str,
    form: str = "weights",
) -> Iterator[Told]:
    x = setup.start
    z = dict.fromkeys(range(len(setup.sizes)), 0.0)
    for t, clients in enumerate(cohorts):
        sent = {}
        for i in clients:
            grads = (lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t))
            sent[i] = descend(x, grads, LR) - x
        D, start = torch.from_numpy(np.stack([sent[i] for i in clients])), torch.from_numpy(x)
        p = torch.from_numpy(setup.shares("examples", clients))
        free = torch.tensor([z[i] for i in clients], dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([free], lr=lr, betas=(0.5, 0.999))

        def shares(free=free, p=p):
            return torch.softmax(free + (p if form == "public" else p.log()), dim=0)

        used = shares().detach().clone()
        for _ in range(steps):
            used = shares().detach().clone()
            adam.zero_grad()
            loss_of(shares(), start, D, kind).backward()
            adam.step()
        if form == "weights":
            used = shares().detach()
        z.update(zip(clients, free.tolist(), strict=True))
        x = x + (used @ D).numpy()
        yield Told(x, sent, {f"z{i}": np.array([z[i]]) for i in clients})


def look(ours: Federation) -> Mapping[str, Vector]:
    return {f"z{i}": np.array([float(row["fedawa"]["z"])]) for i, row in ours.rows.items()}


@pytest.mark.parametrize(
    ("steps", "lr", "kind", "form"),
    [
        (1, 0.001, "cosine", "weights"),
        (5, 0.1, "cosine", "weights"),
        (5, 0.1, "square", "weights"),
        (3, 0.1, "cosine", "public"),
    ],
)
def test_fedawa(steps: int, lr: float, kind: str, form: str) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7))
    ours = setup.ours(f"fedawa(steps={steps}, lr={lr}, distance={kind!r}, form={form!r})", LR)
    story = fedawa(setup, COHORTS, steps, lr, kind, form)
    assert agree(ours, story, COHORTS, look, tol=1e-10) == len(COHORTS)


@pytest.mark.parametrize("name", ["fedawa_a", "fedawa_a5"])
def test_it_follows_its_authors(name: str) -> None:
    """Only the server, on models of clients that are given."""
    o = oracle(name)
    steps = int(o["hp.server_epochs"])
    part = parse(f"fedawa(form='public', steps={steps})").parts[0]
    shares = o["num_examples"] / o["num_examples"].sum()
    params, z = tensors(o, "init."), torch.zeros(4, dtype=torch.float64)
    for t in (1, 2, 3):
        models = [tensors(o, f"r{t}.client{k}.") for k in range(4)]
        rows = {n: torch.stack([model[n] - params[n] for model in models]) for n in params}
        start = torch.cat([v.ravel() for v in params.values()])
        ends = torch.stack([torch.cat([v.ravel() for v in model.values()]) for model in models])
        far = 1 - torch.cosine_similarity(start[None], ends)
        cohort = RoundCohort(
            *(np.arange(4), shares, 0.1, t - 1, Population(4, 4), tuple(params), 0),
            uploads={"distance": far},
            rows={"z": z},
        )
        _, after = part._trained(Span(rows), cohort)
        params = tree.add(params, part.reduce(Span(rows), cohort))
        z = torch.from_numpy(after)
        assert np.abs(shares + after - o[f"r{t}.T_after"]).max() < 1e-12
        assert distance(params, tensors(o, f"r{t}.")) < 1e-12


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", ["fedawa(lr=0.0)", "fedawa(steps=0)"])
def test_without_training_it_is_fedavg(expression: str) -> None:
    assert gap(play(expression, rounds=3), play("fedavg", rounds=3)) < 1e-15
    assert gap(play("fedawa(lr=0.1)", rounds=3), play("fedavg", rounds=3)) > 1e-4


def test_one_client_alone_is_fedavg() -> None:
    alone = skewed((12,))
    assert equal(play("fedawa", alone), play("fedavg", alone))


def test_of_equal_clients_none_gains_weight() -> None:
    ours = federation("fedawa(lr=0.1, steps=4)", skewed((12,)) * 3)
    assert ours.round().diagnostics["fedawa.change"] < 1e-15


def test_small_steps_lower_the_loss_of_the_weights() -> None:
    setup = TrainingSetup()
    start = torch.from_numpy(setup.start)
    losses = []
    for lr in (0.0, 0.01, 0.05):
        ours = setup.ours(f"fedawa(lr={lr}, steps=3)", LR)
        played = ours.round()
        D = torch.stack(
            [torch.cat([v.ravel() for v in d.values()]) for d in played.deltas.values()]
        )
        shares = torch.from_numpy(setup.shares("examples", range(4)))
        z = torch.tensor([float(ours.rows[k]["fedawa"]["z"]) for k in range(4)])
        raised = shares * z.exp()
        losses.append(float(loss_of(raised / raised.sum(), start, D, "cosine")))
    assert losses[2] < losses[1] - 1e-5 < losses[0] - 2e-5
