"""Who takes part: uniform, in proportion to examples, and who drops."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from each import each
from fedkeel.base.rng import generator
from fedkeel.config import Cohort
from fedkeel.data.cohort import new_clients, numbered, select
from fedkeel.errors import ConfigError, DataError

ONES = np.ones(20, dtype=np.int64)


@each("sampling", ["uniform", "examples"])
@each(("population", "count"), [(1, 1), (7, 3), (100, 99), (20_000, 5)])
def test_clients_ascend_without_duplicates(sampling, population, count):
    sizes = np.arange(1, population + 1)
    for round in range(5):
        chosen = select(Cohort(clients=count, sampling=sampling), sizes, 0, round)
        assert chosen.clients.dtype == np.int64
        assert len(chosen.clients) == count
        assert (np.diff(chosen.clients) > 0).all()
        assert chosen.clients[0] >= 0
        assert chosen.clients[-1] < population
        assert len(chosen.dropped) == 0


@pytest.mark.parametrize("sampling", ["uniform", "examples"])
def test_everybody_takes_part_by_default(sampling):
    chosen = select(Cohort(sampling=sampling), ONES, 0, 0)
    assert chosen.clients.tolist() == list(range(20))


def test_uniform_sampling_is_uniform():
    """Counts over R rounds: variance R K/C (1 - K/C), so this statistic is chi-square (C - 1)."""
    rounds, count, population = 2000, 5, 20
    settings = Cohort(participation=0.25)
    seen = np.zeros(population)
    for round in range(rounds):
        seen[select(settings, ONES, 1, round).clients] += 1
    expected = rounds * count / population
    variance = expected * (1 - count / population)
    statistic = ((seen - expected) ** 2 / variance).sum() * (population - 1) / population
    assert 1e-4 < chi2.sf(statistic, population - 1) < 1 - 1e-4


def test_sampling_by_examples_is_one_after_the_other():
    """Sizes 1, 2, 5: P{i, j} = p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j)."""
    p = np.array([1, 2, 5]) / 8
    settings, rounds = Cohort(clients=2, sampling="examples"), 3000
    sizes = np.array([1, 2, 5])
    seen = Counter(tuple(select(settings, sizes, 0, r).clients.tolist()) for r in range(rounds))
    statistic = 0.0
    for i, j in ((0, 1), (0, 2), (1, 2)):
        expected = rounds * p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))
        statistic += (seen[i, j] - expected) ** 2 / expected
    assert chi2.sf(statistic, 2) > 1e-4


def test_uniform_sampling_does_not_depend_on_sizes():
    settings = Cohort(clients=6)
    a, b = select(settings, ONES, 3, 4), select(settings, np.arange(1, 21), 3, 4)
    np.testing.assert_array_equal(a.clients, b.clients)


def test_cohort_depends_on_seed_and_round_only():
    settings = Cohort(clients=6)
    first = select(settings, ONES, 3, 4).clients
    np.random.seed(1)
    generator(3, "cohort", 4).random(100)
    select(settings, ONES, 3, 5)
    np.testing.assert_array_equal(select(settings, ONES, 3, 4).clients, first)
    assert any(select(settings, ONES, 3, r).clients.tolist() != first.tolist() for r in (5, 6))
    assert any(select(settings, ONES, s, 4).clients.tolist() != first.tolist() for s in (5, 6))


def test_a_fixed_cohort_is_that_of_the_first_round():
    fixed, fresh = Cohort(clients=3, sampling="fixed"), Cohort(clients=3)
    sizes = np.ones(20, dtype=np.int64)
    first = select(fresh, sizes, 5, 0).clients
    assert all(np.array_equal(select(fixed, sizes, 5, t).clients, first) for t in range(9))
    assert not np.array_equal(select(fixed, sizes, 6, 0).clients, first)
    leaky = Cohort(clients=3, sampling="fixed", dropout=0.5)
    found = [select(leaky, sizes, 5, t) for t in range(20)]
    assert all(set(one.clients) | set(one.dropped) == set(first) for one in found)
    assert len({len(one.clients) for one in found}) > 1  # who drops is drawn in every round


def test_dropping_does_not_change_who_is_selected():
    for round in range(20):
        plain = select(Cohort(clients=8), ONES, 0, round)
        lossy = select(Cohort(clients=8, dropout=0.5), ONES, 0, round)
        both = np.concatenate([lossy.clients, lossy.dropped])
        assert np.sort(both).tolist() == plain.clients.tolist()
        assert (np.diff(lossy.clients) > 0).all()
        assert (np.diff(lossy.dropped) > 0).all()


def test_share_that_drops():
    dropped = [len(select(Cohort(dropout=0.3), ONES, 0, r).dropped) for r in range(500)]
    error = np.sqrt(0.3 * 0.7 / (500 * 20))
    assert np.mean(dropped) / 20 == pytest.approx(0.3, abs=4 * error)
    assert np.var(dropped) == pytest.approx(20 * 0.3 * 0.7, rel=0.3)  # independent: binomial


def test_who_drops_is_drawn_from_a_stream_of_its_own():
    for round in (0, 3):
        drops = generator(5, "dropout", round).random(20) < 0.5
        chosen = select(Cohort(dropout=0.5), ONES, 5, round)
        assert chosen.dropped.tolist() == np.flatnonzero(drops).tolist()


def test_everybody_may_drop():
    chosen = [select(Cohort(clients=1, dropout=0.9), ONES, 0, r) for r in range(20)]
    empty = [c for c in chosen if len(c.clients) == 0]
    assert empty
    assert all(c.clients.dtype == np.int64 and len(c.dropped) == 1 for c in empty)


def test_clients_without_examples_are_not_drawn_by_examples():
    sizes = np.array([0, 3, 0, 4, 2])
    settings = Cohort(clients=3, sampling="examples")
    assert select(settings, sizes, 0, 0).clients.tolist() == [1, 3, 4]
    with pytest.raises(DataError, match=r"3 of 5 clients.*at least 4"):
        select(Cohort(clients=4, sampling="examples"), sizes, 0, 0)


def test_more_clients_than_there_are_is_refused():
    with pytest.raises(ConfigError, match=r"1\.\.20"):
        select(Cohort(clients=21), ONES, 0, 0)


@pytest.mark.parametrize("sampling", ["uniform", "examples", "fixed", "poisson"])
def test_new_clients_are_never_selected(sampling):
    settings = Cohort(clients=5, sampling=sampling, new_clients=6)
    new = set(new_clients(settings, 20, seed=3).tolist())
    assert len(new) == 6
    seen = {int(k) for r in range(200) for k in select(settings, ONES, 3, r).clients}
    assert seen.isdisjoint(new)
    assert sampling == "fixed" or seen | new == set(range(20))
    assert set(new_clients(settings, 20, seed=4).tolist()) != new


def test_all_are_all_but_new_clients():
    settings = Cohort(new_clients=2)
    chosen = select(settings, np.ones(9, dtype=np.int64), seed=0, round=0).clients
    assert chosen.tolist() == [0, 1, 2, 3, 6, 7, 8]  # new are 4 and 5
    assert Cohort(participation=0.5, new_clients=12).size(20) == 4
    with pytest.raises(ConfigError, match="leaves nobody"):
        Cohort(new_clients=20).size(20)


def test_new_clients_by_name_are_in_no_round() -> None:
    names = ("east", "north", "south", "west")
    settings = numbered(Cohort(new_clients=("north",)), names, 4)
    assert settings.new_clients == (1,)
    assert numbered(settings, names, 4) == settings
    assert new_clients(settings, 4, 7).tolist() == [1]
    sizes = np.array([5, 5, 5, 5])
    for sampling in ("uniform", "fixed", "examples", "poisson"):
        of = settings.model_copy(update={"sampling": sampling})
        assert of.size(4) == 3
        for round in range(4):
            assert set(select(of, sizes, 7, round).clients.tolist()) == {0, 2, 3}
    for given, words in ((("nord",), "'nord' that does not exist"), (("west", "west"), "twice")):
        with pytest.raises(ConfigError, match=words):
            numbered(Cohort(new_clients=given), names, 4)
    assert numbered(Cohort(new_clients=("2",)), (), 4).new_clients == (2,)
