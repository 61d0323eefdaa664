"""The Dirichlet recipes: row for row against public code, and the distributions they promise."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2

from each import each
from fedkeel.data.partition import dirichlet as d
from fedkeel.data.partition.common import group, members
from fedkeel.errors import DataError, SlowWork

ORACLE = Path(__file__).parents[1] / "oracles" / "hetero_dir.npz"
LABELS = np.random.default_rng(5).integers(0, 10, 600)


def complete(lists, n):
    assert all(rows.dtype == np.int64 for rows in lists)
    assert sorted(np.concatenate(lists).tolist()) == list(range(n))


def agrees(observed, expected):
    """Pearson's test at the level 1e-6: it cannot fail by chance, as the seed is fixed."""
    total = sum(observed.values())
    assert set(observed) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1.0)
    statistic = sum((observed[k] - total * p) ** 2 / (total * p) for k, p in expected.items())
    return chi2.sf(statistic, len(expected) - 1) > 1e-6


@each("case", range(8))
def test_dirichlet_equals_fedlab(case):
    with np.load(ORACLE) as file:
        assert int(file["n_cases"]) == 8
        get = {k.split(".")[1]: file[k] for k in file.files if k.startswith(f"case{case}.")}
    lists, attempts = d.dirichlet_attempts(
        get["labels"],
        int(get["num_clients"]),
        float(get["alpha"]),
        int(get["min_size"]),
        int(get["seed"]),
        classes=int(get["num_classes"]),
    )
    assert [len(rows) for rows in lists] == get["sizes"].tolist()
    np.testing.assert_array_equal(np.concatenate(lists), get["indices"])
    assert attempts == int(get["attempts"])


def test_dirichlet_draws_for_classes_without_examples():
    """As FedLab's loop over num_classes does: the empty class takes its draw from the stream."""
    labels = LABELS[LABELS < 5] * 2
    with_gap = d.dirichlet(labels, 5, 0.5, classes=10)
    packed = d.dirichlet(labels // 2, 5, 0.5)
    complete(with_gap, len(labels))
    assert [r.tolist() for r in with_gap] != [r.tolist() for r in packed]


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 1), (0.3, 10), (100.0, 40)])
def test_dirichlet_properties(alpha, least):
    lists = d.dirichlet(LABELS, 10, alpha, least, seed=3)
    complete(lists, len(LABELS))
    assert min(map(len, lists)) >= least
    again = d.dirichlet(LABELS, 10, alpha, least, seed=3)
    other = d.dirichlet(LABELS, 10, alpha, least, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(lists, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(lists, other, strict=True))


def test_dirichlet_leaves_global_random_state_and_labels_alone():
    np.random.seed(0)
    before, labels = np.random.get_state()[1].copy(), LABELS.copy()
    d.dirichlet(labels, 10, 0.1)
    d.dirichlet_gradma(labels, 10, 0.1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    np.testing.assert_array_equal(labels, LABELS)


def test_dirichlet_refuses_the_impossible_at_once():
    with pytest.raises(
        DataError, match=r"61 for 10 clients of 600 examples; expected at most .* 60"
    ):
        d.dirichlet(LABELS, 10, 1.0, min_size=61, attempts=10**9)


def test_dirichlet_gives_up():
    with pytest.raises(DataError) as caught:
        d.dirichlet(LABELS, 10, 0.01, min_size=55, attempts=7)
    text = str(caught.value)
    assert "7 attempts" in text
    assert "min_size 55" in text
    assert "larger alpha" in text
    got = int(text.split("smallest client of ")[1].split()[0])
    assert 0 <= got < 55


def test_dirichlet_gives_up_after_work_that_counts_classes_and_clients(monkeypatch):
    """It counted only examples: 10,000 attempts of 0.3 s with 1,000 classes, 2,000 clients."""
    impossible = {"alpha": 0.01, "min_size": 200}
    monkeypatch.setattr(d, "_WORK", 50 * (len(LABELS) + 2 * 10 * 1003))
    with pytest.raises(DataError, match="50 attempts"):
        d.dirichlet(LABELS, 3, **impossible)
    with pytest.raises(DataError, match="25 attempts"):
        d.dirichlet(LABELS, 3, **impossible, classes=20)
    with pytest.raises(DataError, match="10 attempts"):
        d.dirichlet(LABELS, 3, **impossible, classes=2000)


def test_dirichlet_says_what_takes_long(monkeypatch):
    monkeypatch.setattr(d, "_PATIENCE", -1.0)
    with pytest.warns(SlowWork, match="attempt 1 of at most 10,000 to give every client 5 ex"):
        lists = d.dirichlet(LABELS, 10, 1.0, min_size=5)
    monkeypatch.undo()
    again = d.dirichlet(LABELS, 10, 1.0, min_size=5)
    assert [rows.tolist() for rows in lists] == [rows.tolist() for rows in again]


def test_dirichlet_accepts_exactly_the_minimum_size():
    first = d.dirichlet(LABELS, 10, 1.0, attempts=1)
    least = min(map(len, first))
    again = d.dirichlet(LABELS, 10, 1.0, min_size=least, attempts=1)
    assert [r.tolist() for r in again] == [r.tolist() for r in first]
    with pytest.raises(DataError, match=f"smallest client of {least} examples at best"):
        d.dirichlet(LABELS, 10, 1.0, min_size=least + 1, attempts=1)


def test_dirichlet_draws_for_classes_after_the_last_example():
    """Everybody is full by then, so that no share is left; the draws are made all the same."""
    random, rows = np.random.RandomState(0), np.arange(20)
    random.shuffle(rows)
    for _ in range(3):
        random.dirichlet([0.5])
    random.shuffle(rows)
    assert d.dirichlet([0] * 20, 1, 0.5, classes=3)[0].tolist() == rows.tolist()


def test_dirichlet_with_underflowing_shares_is_complete_or_refused():
    for seed in range(20):
        complete(d.dirichlet(LABELS, 3, 1e-3, seed=seed), len(LABELS))
    with pytest.raises(DataError, match="larger alpha"):
        d.dirichlet(LABELS, 3, 1e-9, attempts=100)


def gradma_by_hand(labels, clients, alpha, seed):
    """The published procedure, one draw at a time."""
    random, classes = np.random.RandomState(seed), labels.max() + 1
    shares = random.dirichlet(np.full(clients, alpha), size=classes)
    left = [[i for i in range(len(labels)) if labels[i] == y] for y in range(classes)]
    lists = [[] for _ in range(clients)]
    for _ in range(2):
        for mine in lists:
            mine.append(left[random.randint(low=0, high=classes)].pop())
    for share, rows in zip(shares, left, strict=True):
        random.shuffle(rows)
        ends = [int(v) for v in np.cumsum(share)[:-1] * len(rows)]
        for mine, a, b in zip(lists, [0, *ends], [*ends, len(rows)], strict=True):
            mine.extend(rows[a:b])
    for mine in lists:
        random.shuffle(mine)
    return lists


@pytest.mark.parametrize(("clients", "alpha", "seed"), [(10, 0.01, 0), (100, 0.1, 1), (7, 5.0, 2)])
def test_gradma_follows_the_published_procedure(clients, alpha, seed):
    lists = d.dirichlet_gradma(LABELS, clients, alpha, seed)
    complete(lists, len(LABELS))
    assert [rows.tolist() for rows in lists] == gradma_by_hand(LABELS, clients, alpha, seed)


def test_gradma_gives_two_to_everybody_also_when_a_class_runs_out():
    labels = np.array([0] * 2 + [1] * 38)
    lists = d.dirichlet_gradma(labels, 20, 0.1)
    complete(lists, 40)
    assert [len(rows) for rows in lists] == [2] * 20


@pytest.mark.parametrize(
    ("clients", "alpha", "words"), [(301, 0.1, "300"), (3, 1e-9, "larger alpha")]
)
def test_gradma_refuses(clients, alpha, words):
    with pytest.raises(DataError, match=words):
        d.dirichlet_gradma(LABELS, clients, alpha)


@pytest.mark.parametrize("sizes", ["equal", "power", [10, 20, 400]])
def test_prior_sizes(sizes):
    lists = d.dirichlet_prior(LABELS, 3, 0.2, sizes, sigma=1.0, seed=2)
    taken = np.concatenate(lists)
    assert len(set(taken.tolist())) == len(taken)
    if sizes == "equal":
        assert [len(r) for r in lists] == [200] * 3
    if sizes == "power":
        complete(lists, 600)
    if isinstance(sizes, list):
        assert [len(r) for r in lists] == sizes


def test_prior_is_followed_while_examples_last():
    """Small clients of a large set: the histogram is the prior up to sampling error."""
    labels = np.repeat(np.arange(4), 20_000)
    lists = d.dirichlet_prior(labels, 2, 1.0, sizes=[4000, 4000], seed=1)
    shares = np.array([np.bincount(labels[rows], minlength=4) / 4000 for rows in lists])
    random = d.generator(1, "partition")
    random.standard_exponential(8000)  # the turns are drawn first
    prior = random.dirichlet(np.full(4, 1.0), size=2)
    np.testing.assert_allclose(shares, prior, atol=4 * 0.5 / np.sqrt(4000))


def test_prior_takes_random_examples_of_a_class():
    rows = d.dirichlet_prior(np.zeros(1000, int), 1, 1.0, sizes=[100])[0]
    assert rows.mean() == pytest.approx(499.5, abs=5 * 289 / np.sqrt(100))
    assert len(rows) == 100


def test_prior_small_alpha_is_skewed_and_large_is_not():
    spread = []
    for alpha in (0.01, 1000.0):
        lists = d.dirichlet_prior(LABELS, 10, alpha)
        tops = [np.bincount(LABELS[rows]).max() / len(rows) for rows in lists]
        spread.append(np.median(tops))
    assert spread[0] > 0.45
    assert spread[1] < 0.25


def test_turns_are_uniform_among_clients_that_are_not_full():
    """Sizes 3 and 1: the small client's only turn is the i-th with probability 1/2, 1/4, 1/8, 1/8.

    A random order of all turns would give 1/4 each.
    """
    random = np.random.default_rng(0)
    seen = Counter()
    for _ in range(4000):
        turns = d._turns(np.array([3, 1]), random).tolist()
        assert sorted(turns) == [0, 0, 0, 1]
        seen[turns.index(1)] += 1
    assert agrees(seen, {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125})


def one_after_the_other(prior, turns, supply):
    """Exact probability of every outcome of drawing classes one turn after the other."""
    done = {(): 1.0}
    for who in turns:
        ahead = Counter()
        for path, chance in done.items():
            left = np.array(supply) > np.bincount(np.array(path, int), minlength=len(supply))
            mass = prior[who] * left
            mass = mass / mass.sum() if mass.sum() > 0 else left / left.sum()
            for y in np.flatnonzero(mass):
                ahead[(*path, int(y))] += chance * mass[y]
        done = ahead
    return done


@pytest.mark.parametrize(
    ("prior", "supply"),
    [
        ([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], [2, 1, 2]),
        ([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], [1, 2, 2]),
    ],
)
def test_drawing_all_at_once_is_drawing_one_after_the_other(prior, supply):
    prior, supply, turns = np.array(prior), np.array(supply), np.array([0, 1, 0, 0, 1])
    random = np.random.default_rng(1)
    seen = Counter(
        tuple(d._draw_without_replacement(prior, turns, supply, random).tolist())
        for _ in range(4000)
    )
    expected = one_after_the_other(prior, turns.tolist(), supply)
    assert all((np.bincount(np.array(k), minlength=3) <= supply).all() for k in seen)
    assert agrees(seen, expected)


def test_drawing_in_blocks_changes_nothing():
    prior, turns = np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1, 0, 1])
    left = np.array([True, True])
    whole = d._draw(prior, turns, left, np.random.default_rng(0))
    parts = d._draw(prior, turns, left, np.random.default_rng(0), block=2)
    np.testing.assert_array_equal(whole, parts)


@each("recipe", [d.dirichlet, d.dirichlet_gradma, d.dirichlet_prior])
@each("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_is_checked(recipe, alpha):
    with pytest.raises(DataError, match=r"alpha.*\n.*> 0"):
        recipe(LABELS, 3, alpha)


@pytest.mark.parametrize("recipe", [d.dirichlet, d.dirichlet_gradma])
def test_seeds_beyond_the_legacy_generator_are_refused(recipe):
    with pytest.raises(DataError, match=r"0\.\.4294967295"):
        recipe(LABELS, 3, 1.0, seed=2**32)


def test_members_and_group_are_inverse():
    each = members(LABELS, 10)
    assert all(
        (LABELS[rows] == y).all() and (np.diff(rows) > 0).all() for y, rows in enumerate(each)
    )
    owner = np.array([2, 0, -1, 2])
    assert [r.tolist() for r in group(owner, 4, np.array([9, 8, 7, 6]))] == [[8], [], [9, 6], []]
