"""FedAvg with DP-SGD, restated from Abadi et al. 2016, Algorithm 1, one example after the other.

The noise is given: both sides read the same standard normal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from each import each
from fedkeel import tree
from fedkeel.config import Local
from fedkeel.errors import CompositionError
from fedkeel.method.context import ClientInfo, Population
from fedkeel.method.grammar import parse
from fedkeel.method.local_loop import client_start, client_step
from fedkeel.method.local_training import ClientTraining
from fedkeel.method.part import Capability
from fedkeel.method.server_memory import server_start
from fedkeel.method.server_round import server_message
from fedkeel.task.batch import Batch
from fedkeel.tree import Tree
from harness import EVERYTHING, Federation, toy_network
from method.players import LOCAL, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

LR = 0.2
COHORTS = [[0, 1], [0, 2], [2, 3], [1, 2, 3]]


def normal(setup: TrainingSetup, k: int, t: int, s: int) -> Vector:
    """z of client k in step s of round t."""
    return np.random.default_rng([7, k, t, s]).normal(size=setup.start.shape)


def given(setup: TrainingSetup, ours: Federation) -> Federation:
    """Our federation with the noise of `normal`."""

    def noise(k: int) -> Callable[[], Tree]:
        t, taken = ours.played.server.round, iter(range(1000))

        def draw() -> Tree:
            z = setup.net.split(normal(setup, k, t, next(taken)))
            return {name: torch.from_numpy(v.copy()) for name, v in z.items()}

        return draw

    ours.noise = noise
    return ours


def shortened(g: Vector, norm: float) -> Vector:
    return g / max(1.0, float(np.linalg.norm(g)) / norm)


def dpsgd(
    setup: TrainingSetup,
    cohorts: Sequence[Sequence[int]],
    norm: float,
    sigma: float,
    clipped: str = "example",
    noise_on: str = "sum",
    mu: float = 0.0,
    **local: object,
) -> Iterator[Told]:
    x = setup.start
    for t, clients in enumerate(cohorts):
        sent = {}
        for k in clients:

            def at(s, bx, by, k=k, t=t, x=x):
                def gradient(w: Vector) -> Vector:
                    B = len(bx)
                    found = [setup.net.grad(w, bx[b : b + 1], by[b : b + 1]) for b in range(B)]
                    if clipped == "example":
                        total = sum(shortened(g, norm) for g in found)
                    else:
                        total = B * shortened(sum(found) / B, norm)
                    z = sigma * norm * normal(setup, k, t, s)
                    g = (total + z) / B if noise_on == "sum" else total / B + z
                    return g + mu * (w - x)

                return gradient

            steps = (at(s, *batch) for s, batch in enumerate(setup.examples(k, t)))
            sent[k] = descend(x, steps, LR, **local) - x
        p = setup.shares("examples", clients, t)
        x = x + sum(s * sent[k] for s, k in zip(p, clients, strict=True))
        yield Told(x, sent)


@each("clipped", ["example", "batch"])
@each("noise_on", ["sum", "mean"])
@each("size", [(0.5, 0.1), (1.5, 0.01)])
@each("local", [{}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_dpsgd(clipped: str, noise_on: str, size: tuple[float, float], local: dict) -> None:
    setup = TrainingSetup(sizes=(9, 5, 12, 7), epochs=2)
    theirs = dict(local)
    theirs["decay"] = theirs.pop("weight_decay", 0.0)
    expression = (
        f"dpsgd(norm={size[0]}, sigma={size[1]}, clipped='{clipped}', noise_on='{noise_on}')"
    )
    ours = given(setup, setup.ours(expression, LR, **local))
    agree(ours, dpsgd(setup, COHORTS, *size, clipped, noise_on, **theirs), COHORTS)


def test_a_proximal_term_is_neither_clipped_nor_noisy() -> None:
    setup = TrainingSetup(epochs=2)
    ours = given(setup, setup.ours("dpsgd(norm=0.3, sigma=0.1)+fedprox(mu=0.7)", LR))
    agree(ours, dpsgd(setup, COHORTS, 0.3, 0.1, mu=0.7), COHORTS)


# --- laws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [LOCAL, Local(lr=0.05, epochs=2, batch_size=4, momentum=0.9)])
def test_without_bound_and_noise_it_is_fedavg(local: Local) -> None:
    for clipped in ("example", "batch"):
        ours = play(f"dpsgd(norm=1e6, sigma=0.0, clipped='{clipped}')", local=local, rounds=3)
        assert gap(ours, play("fedavg", local=local, rounds=3)) < 1e-12
    assert gap(play("dpsgd(norm=0.5, sigma=0.0)", local=local), play("fedavg", local=local)) > 1e-3


def test_a_federation_repeats_its_noise_and_another_round_has_other_noise() -> None:
    ours = play("dpsgd(sigma=0.5)")
    assert gap(play("dpsgd(sigma=0.5)"), ours) == 0.0
    assert gap(play("dpsgd(sigma=0.0)"), ours) > 1e-3


def gradient(expression: str, batch: Batch, noise: Tree | None = None, scale: float = 4.0) -> Tree:
    """The gradient of one step at the received model, whose parameters are scaled."""
    network = toy_network()
    network.params = tree.scale(network.params, scale)
    plan = parse(expression, EVERYTHING)
    training = ClientTraining(plan, network, Local(lr=1.0, steps=1))
    message = server_message(plan, server_start(training, Population(1, 1)), 1.0)
    zero = tree.zeros_like(network.params)
    with torch.no_grad():
        client, progress = client_start(training, message, None, ClientInfo(0, 1), lambda: batch)
        after = client_step(client, progress, batch, noise=zero if noise is None else noise)
    return tree.sub(message.params, after.params)


def length(a: Tree) -> float:
    return float(tree.dot(a, a)) ** 0.5


def examples(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(torch.from_numpy(rng.normal(size=(n, 8))), torch.from_numpy(rng.integers(0, 3, n)))


def test_no_example_moves_the_gradient_by_more_than_the_bound() -> None:
    """With the mean clipped instead, one example may take all of the bound."""
    n, norm = 6, 0.2
    batch = examples(n)
    plain = gradient(f"dpsgd(norm={norm})", batch)
    assert length(plain) <= norm + 1e-12
    moved = []
    for b in range(n):
        x, y = batch.x.clone(), batch.y.clone()
        x[b], y[b] = -1e3 * x[b], (y[b] + 1) % 3
        moved.append(length(tree.sub(gradient(f"dpsgd(norm={norm})", Batch(x, y)), plain)))
    assert max(moved) <= 2 * norm / n + 1e-12
    assert max(moved) > norm / n
    mean = f"dpsgd(norm={norm}, clipped='batch')"
    outlier = gradient(mean, Batch(x, y))
    assert length(tree.sub(outlier, gradient(mean, batch))) > 2 * norm / n


@pytest.mark.parametrize(("noise_on", "share"), [("sum", 1 / 6), ("mean", 1.0)])
def test_the_noise_is_sigma_times_the_bound(noise_on: str, share: float) -> None:
    batch = examples(6)
    source = torch.Generator().manual_seed(0)
    z = {
        k: torch.randn(v.shape, generator=source).double() for k, v in toy_network().params.items()
    }
    method = f"dpsgd(norm=0.2, sigma=0.3, noise_on='{noise_on}')"
    added = tree.sub(gradient(method, batch, z), gradient(method, batch))
    assert gap(added, tree.scale(z, 0.3 * 0.2 * share)) < 1e-12


@pytest.mark.parametrize("clipped", ["example", "batch"])
def test_padding_counts_nothing(clipped: str) -> None:
    batch, more = examples(5), examples(8, seed=1)
    x = torch.cat([batch.x, 10 * more.x])
    y = torch.cat([batch.y, more.y])
    weight = (torch.arange(13) < 5).double()
    noise = tree.scale({k: torch.ones_like(v) for k, v in toy_network().params.items()}, 0.7)
    method = f"dpsgd(norm=0.2, sigma=0.3, clipped='{clipped}')"
    padded = gradient(method, Batch(x, y, weight), noise)
    assert gap(padded, gradient(method, batch, noise)) < 1e-13


def test_an_example_without_a_gradient_stays_without_one() -> None:
    """Scores so far apart that the loss is exactly zero: nothing is divided by its length."""
    network, batch = toy_network(), examples(4)
    far = tree.scale(network.params, 1e4)
    certain = Batch(batch.x, network.logits(far, {}, batch.x).argmax(dim=1))
    assert length(gradient("dpsgd(norm=0.2)", certain, scale=1e4)) == 0.0
    y = certain.y.clone()
    y[0] = (y[0] + 1) % 3
    mixed = gradient("dpsgd(norm=0.2)", Batch(batch.x, y), scale=1e4)
    assert length(mixed) == pytest.approx(0.2 / 4, rel=1e-12)


def test_it_is_refused_where_examples_see_each_other() -> None:
    with pytest.raises(CompositionError, match="needs EXAMPLE_LOSSES"):
        parse("dpsgd", EVERYTHING - {Capability.EXAMPLE_LOSSES})
