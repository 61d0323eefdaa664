"""FLTrust (Cao et al., NDSS 2021): restated from Algorithm 2, and the laws that it states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeel.errors import CompositionError
from fedkeel.method.context import Population, RoundCohort
from fedkeel.method.grammar import parse
from fedkeel.solve.span import Span
from method.players import alike, gap, play
from papers.numpy_net import Told, TrainingSetup, Vector, agree, descend

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "fltrust_a.npz")
LR = 0.3
COHORTS = [[0, 1, 2, 3, 4, 5, 6], [1, 3, 4], [0, 2, 3, 4, 6]]


def aggregated(rows: np.ndarray, own: Vector) -> Vector:
    """What FLTrust makes of updates [K, D] in two tensors."""
    half = rows.shape[1] // 2
    count = len(rows)
    cohort = RoundCohort(
        *(np.arange(count), np.ones(count) / count, 0.1, 0, Population(count, count)),
        *(("b", "w"), 0),
        root={"b": torch.from_numpy(own[:half]), "w": torch.from_numpy(own[half:])},
    )
    span = Span({"b": torch.from_numpy(rows[:, :half]), "w": torch.from_numpy(rows[:, half:])})
    found = parse("fltrust").reduction.reduce(span, cohort)
    return np.concatenate([found["b"].numpy(), found["w"].numpy()])


def fltrust(rows: list[Vector], own: Vector) -> Vector:
    """Algorithm 2, lines 8 to 13, one client after the other."""
    score, total = 0.0, np.zeros_like(own)
    for g in rows:
        cosine = g @ own / (np.linalg.norm(g) * np.linalg.norm(own))
        trust = max(0.0, cosine)  # Eq. (2)
        score += trust
        total = total + trust * np.linalg.norm(own) / np.linalg.norm(g) * g  # Eq. (3)
    return total / score  # Eq. (4)


@pytest.mark.parametrize("number", range(int(ORACLE["n_cases"])))
def test_the_aggregate_is_that_of_public_code(number: int) -> None:
    rows, own = ORACLE[f"case{number}.vectors"], ORACLE[f"case{number}.own"]
    np.testing.assert_allclose(
        aggregated(rows, own), ORACLE[f"case{number}.aggregate"], rtol=0, atol=1e-12
    )


def test_restated() -> None:
    """The server has the examples and the batches of client 0, and trains as it does."""
    setup = TrainingSetup(sizes=(9, 5, 12, 7, 6, 8, 10), epochs=1)

    def told() -> Iterator[Told]:
        x = setup.start
        for t, clients in enumerate(COHORTS):
            moved = {}
            for i in {0, *clients}:
                steps = [lambda w, b=b: setup.net.grad(w, *b) for b in setup.examples(i, t)]
                moved[i] = descend(x, iter(steps), LR) - x
            x = x + fltrust([moved[i] for i in clients], moved[0])
            yield Told(x, {i: moved[i] for i in clients})

    agree(setup.ours("fltrust", LR), told(), COHORTS)


def test_what_the_paper_says_of_single_updates() -> None:
    rng = np.random.default_rng(0)
    rows, own = rng.normal(size=(6, 8)), rng.normal(size=8)
    rows[:3] += own
    found = aggregated(rows, own)
    np.testing.assert_allclose(found, fltrust(list(rows), own), atol=1e-12)
    scaled = rows * np.array([1e4, 1.0, 3.0, 1e-3, 1.0, 7.0])[:, None]
    np.testing.assert_allclose(aggregated(scaled, own), found, atol=1e-10)  # lengths do not count
    assert np.linalg.norm(found) <= np.linalg.norm(own) * (1 + 1e-12)
    against = np.concatenate([rows, [-own, -50.0 * own]])  # an angle of 180 degrees
    np.testing.assert_allclose(aggregated(against, own), found, atol=1e-12)
    np.testing.assert_allclose(aggregated(np.tile(own, (4, 1)), own), own, atol=1e-12)


def test_attackers_in_the_majority_do_not_turn_it_round() -> None:
    rng = np.random.default_rng(1)
    own = rng.normal(size=30)
    honest = own + 0.5 * rng.normal(size=(3, 30))
    found = aggregated(np.concatenate([honest, -20.0 * honest, -honest, -honest]), own)
    np.testing.assert_allclose(found, aggregated(honest, own), atol=1e-12)


def test_nobody_who_is_trusted_and_updates_of_zero_leave_the_model() -> None:
    own = np.ones(4)
    assert not aggregated(-np.ones((3, 4)), own).any()
    assert not aggregated(np.zeros((3, 4)), own).any()
    assert not aggregated(np.ones((3, 4)), np.zeros(4)).any()
    one = aggregated(np.concatenate([np.zeros((3, 4)), 5.0 * np.ones((1, 4))]), own)
    np.testing.assert_allclose(one, own)


def test_clients_that_all_have_the_server_s_examples_are_fedavg() -> None:
    """Their updates differ by rounding only, as the order of the examples is another one."""
    local = {"batches": lambda k, _: [np.arange(8)]}
    assert gap(play("fltrust", alike(), **local), play("fedavg", alike(), **local)) < 1e-12


def test_a_method_that_hides_or_merges_nothing_goes_with_it() -> None:
    assert parse("nnm+fltrust+momentum+fedprox").reduction.name == "fltrust"
    for other in ("dpclient", "median"):
        with pytest.raises(CompositionError, match="takes one"):
            parse(f"fltrust+{other}")
    with pytest.raises(CompositionError, match="FRESH_UPDATES"):
        parse("fltrust+fedasync")
