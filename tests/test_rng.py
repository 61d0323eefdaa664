"""Random streams by name: the same for the same name, and for no other."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, product

import numpy as np
import pytest

from each import each
from fedkeel.base.rng import FEW, generator, generators, torch_seed, torch_seeds

NAMES = list(product((0, 1, 2**32 - 1), ("cohort", "batches"), (0, 1, 1000), (0, 1, 50_000)))


def test_every_name_has_a_stream_of_its_own() -> None:
    """No two of 54 names give the same first numbers, also where their numbers are exchanged."""
    first = {name: tuple(generator(*name).integers(2**63, size=2)) for name in NAMES}
    assert len(set(first.values())) == len(NAMES)
    assert len({torch_seed(*name) for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert tuple(generator(*name).integers(2**63, size=2)) == first[name]


LARGEST = 2**32 - 1
CLIENTS = [0, 1, 7, 2**16, 2**31, LARGEST, *range(100, 100 + FEW)]


@each("seed", [0, 1, 2026, 2**31, LARGEST, LARGEST + 1])
@each("round", [0, 3, LARGEST, LARGEST + 1])
@each("clients", [CLIENTS, CLIENTS[:3], [*CLIENTS, LARGEST + 1], []])
def test_streams_made_together_are_those_made_one_by_one(
    seed: int, round: int, clients: list[int]
) -> None:
    together = generators(seed, "batches", round, clients)
    for client, stream in zip(clients, together, strict=True):
        alone = generator(seed, "batches", round, client)
        assert stream.bit_generator.state == alone.bit_generator.state
        assert np.array_equal(stream.permutation(60), alone.permutation(60))
    seeds = [torch_seed(seed, "torch", round, client) for client in clients]
    assert torch_seeds(seed, "torch", round, clients) == seeds


@each("purposes", list(combinations(("cohort", "batches", "init", "fedgh", ""), 2)))
def test_streams_of_two_purposes_are_not_related(purposes: tuple[str, str]) -> None:
    a, b = (generator(0, purpose).normal(size=4000) for purpose in purposes)
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(4000)


def test_neighbouring_rounds_and_clients_are_not_related() -> None:
    draws = np.stack(
        [generator(0, "batches", t, k).normal(size=500) for t in (0, 1) for k in range(9)]
    )
    apart = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(apart).max() < 5.5 / np.sqrt(500)


def test_a_stream_does_not_depend_on_global_state_or_on_other_streams() -> None:
    expected = generator(3, "cohort", 1).random(5)
    np.random.seed(0)
    generator(3, "cohort", 0).random(100)
    np.testing.assert_array_equal(generator(3, "cohort", 1).random(5), expected)


def test_a_stream_is_the_same_in_another_process() -> None:
    """The purpose is not hashed by Python, whose hashes differ from process to process."""
    code = (
        "from fedkeel.base.rng import generator, torch_seed;"
        "print(torch_seed(5, 'init', 2, 7), generator(5, 'x').random())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [
        str(torch_seed(5, "init", 2, 7)),
        str(generator(5, "x").random()),
    ]


def test_torch_seeds_have_63_bits() -> None:
    seeds = [torch_seed(s, "init") for s in range(200)]
    assert all(0 <= s < 2**63 for s in seeds)
    assert max(seeds) > 2**62


@pytest.mark.parametrize("name", [(-1, "x"), (0, "x", -1), (0, "x", 0, -1)])
def test_numbers_below_zero_name_nothing(name: tuple) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        generator(*name)
