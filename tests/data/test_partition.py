"""IID and class partitions, clients given by the data, and `divide`."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each import each
from fedkeel.config import Partition
from fedkeel.data.dataset import dataset
from fedkeel.data.partition import recipes as p
from fedkeel.data.partition.common import draw_sizes, shares
from fedkeel.data.partition.dirichlet import dirichlet, dirichlet_gradma, dirichlet_prior
from fedkeel.errors import DataError

LABELS = np.random.default_rng(7).integers(0, 10, 1000)


def made(labels=LABELS, **more):
    return dataset(np.zeros((len(labels), 1), np.float32), labels, **more)


def disjoint(lists, n):
    rows = np.concatenate(lists)
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(np.unique(rows)) == len(rows)
    return len(rows)


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(i, j) for i, j in zip(a, b, strict=True))


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=80).map(np.array),
    clients=st.integers(1, 12),
    kind=st.sampled_from(["iid", "classes", "dirichlet", "dirichlet_gradma", "dirichlet_prior"]),
    sizes=st.sampled_from(["equal", "power", "given"]),
    more=st.tuples(st.integers(1, 5), st.floats(0.05, 100.0), st.floats(0.0, 5.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_goes_to_one_client_and_none_is_lost(labels, clients, kind, sizes, more, seed):
    """But by numbers of a smaller sum, and by the floors of FedProx's power law."""
    n, (k, alpha, sigma) = len(labels), more
    if sizes == "given":
        sizes = [max(1, n // clients - i % 2) for i in range(clients)]
    makers = {
        "iid": lambda: p.iid(n, clients, seed, sizes, sigma),
        "classes": lambda: p.classes(labels, clients, k, sizes, sigma, seed),
        "dirichlet": lambda: dirichlet(labels, clients, alpha, 1, seed, attempts=20),
        "dirichlet_gradma": lambda: dirichlet_gradma(labels, clients, alpha, seed),
        "dirichlet_prior": lambda: dirichlet_prior(labels, clients, alpha, sizes, sigma, seed),
    }
    try:
        lists = makers[kind]()
    except DataError:
        assert clients > 1 or k > len(set(labels.tolist())) or n < 2  # one client takes any data
        return
    assert len(lists) == clients
    assigned = disjoint(lists, n)
    if isinstance(sizes, list) and kind in ("iid", "dirichlet_prior"):
        assert [len(rows) for rows in lists] == sizes
    elif kind != "classes" or sizes == "equal":
        assert assigned == n
    assert same(lists, makers[kind]())


def test_equal_sizes_differ_by_at_most_one():
    lists = p.iid(1000, 7, seed=1)
    assert disjoint(lists, 1000) == 1000
    assert [len(r) for r in lists] == [143] * 6 + [142]


def test_iid_is_random_and_repeatable():
    assert same(p.iid(50, 4, seed=1), p.iid(50, 4, seed=1))
    assert not same(p.iid(50, 4, seed=1), p.iid(50, 4, seed=2))
    shares = [LABELS[rows].mean() for rows in p.iid(1000, 2, seed=0)]
    assert shares == pytest.approx([LABELS.mean()] * 2, abs=0.5)


def test_given_sizes_leave_the_rest_to_nobody():
    lists = p.iid(10, 3, sizes=[1, 2, 4])
    assert [len(r) for r in lists] == [1, 2, 4]
    assert disjoint(lists, 10) == 7


@pytest.mark.parametrize(
    "sizes",
    [[1, 2], [0, 2, 3], [4, 4, 4], [1.5, 2.0, 3.0], [], [-1, 3, 3], [2**63 - 1, 2**63 - 1, 2]],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(DataError, match="3 whole numbers >= 1, at most 10 in all"):
        p.iid(10, 3, sizes=sizes)


def test_power_sizes_sum_to_all_and_leave_nobody_out():
    random = np.random.default_rng(0)
    for n, clients, sigma in ((1000, 100, 2.0), (100, 100, 2.0), (50, 3, 50.0), (10**6, 50, 0.01)):
        counts = draw_sizes(n, clients, "power", sigma, random)
        assert counts.sum() == n
        assert counts.min() >= 1
    assert counts.max() < 1.1 * counts.min()  # sigma 0.01 is nearly equal


def test_power_sizes_are_shares_rounded():
    exact = shares(30, 1.0, np.random.default_rng(2)) * 70
    counts = draw_sizes(100, 30, "power", 1.0, np.random.default_rng(2))
    low, high = np.floor(exact) + 1, np.ceil(exact) + 1
    assert ((counts == low) | (counts == high)).all()
    up = counts > low
    assert (exact % 1)[up].min() > (exact % 1)[~up].max()  # the largest remainders are rounded up


def test_power_sizes_are_log_normal():
    counts = draw_sizes(10**7, 2000, "power", 1.5, np.random.default_rng(3))
    assert np.log(counts).std() == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("clients", [0, -1, 11])
def test_number_of_clients_is_checked(clients):
    for call in (lambda: p.iid(10, clients), lambda: p.classes([0] * 10, clients, 1)):
        with pytest.raises(DataError, match=r"1\.\.10 clients"):
            call()


def test_one_class_for_each_client_is_the_class():
    lists = p.classes(LABELS, 10, 1)
    for y, rows in enumerate(lists):
        np.testing.assert_array_equal(rows, np.flatnonzero(y == LABELS))


def test_classes_wrap_around_the_ring():
    lists = p.classes(LABELS, 25, 2, seed=3)
    assert disjoint(lists, 1000) == 1000
    for u, rows in enumerate(lists):
        assert set(LABELS[rows].tolist()) == {u % 10, (u + 1) % 10}
    held = [np.bincount(LABELS[rows], minlength=10) for rows in lists]
    for y in range(10):
        quota = [h[y] for h in held if h[y]]
        assert max(quota) - min(quota) <= 1


@pytest.mark.parametrize(
    ("clients", "k", "first"), [(5, 2, [0, 2, 4, 6, 8]), (4, 3, [0, 2, 5, 7]), (3, 4, [0, 3, 6])]
)
def test_few_clients_are_spread_over_all_classes(clients, k, first):
    lists = p.classes(LABELS, clients, k)
    assert disjoint(lists, 1000) == 1000
    for start, rows in zip(first, lists, strict=True):
        assert set(LABELS[rows].tolist()) == {(start + j) % 10 for j in range(k)}


def test_classes_that_do_not_occur_are_not_counted():
    lists = p.classes([4, 7, 4, 9, 7, 9], 3, 1)
    assert [rows.tolist() for rows in lists] == [[0, 2], [1, 4], [3, 5]]


def test_power_classes_follow_fedprox():
    """Five of each class first; then floors of shares: less than one row lost for each holder."""
    lists = p.classes(LABELS, 20, 2, "power", sigma=2.0, seed=1)
    disjoint(lists, 1000)
    table = np.array([np.bincount(LABELS[rows], minlength=10) for rows in lists])
    for u in range(20):
        assert np.flatnonzero(table[u]).tolist() == sorted({u % 10, (u + 1) % 10})
    assert table[table > 0].min() >= 5
    lost = np.bincount(LABELS, minlength=10) - table.sum(axis=0)
    assert (lost >= 0).all()
    assert (lost < 4).all()  # each class has 4 holders
    assert lost.sum() > 0
    assert table.max() > 3 * np.median(table[table > 0])  # sigma 2 is far from equal


def test_power_classes_with_one_holder_lose_nothing():
    assert same(p.classes(LABELS, 10, 1, "power"), p.classes(LABELS, 10, 1))


def test_power_classes_with_few_rows_share_what_there_is():
    lists = p.classes([0] * 7, 3, 1, "power", sigma=0.1)
    assert min(map(len, lists)) >= 2


def test_given_sizes_of_classes():
    lists = p.classes(LABELS, 5, 2, sizes=[2, 3, 4, 5, 60])
    held = [np.bincount(LABELS[rows], minlength=10) for rows in lists]
    pairs = [(int(h[2 * u]), int(h[2 * u + 1])) for u, h in enumerate(held)]
    assert pairs == [(1, 1), (2, 1), (2, 2), (3, 2), (30, 30)]
    assert [len(r) for r in lists] == [2, 3, 4, 5, 60]


def test_classes_take_random_examples():
    rows = p.classes(np.zeros(1000, int), 1, 1, sizes=[100])[0]
    assert rows.mean() == pytest.approx(499.5, abs=5 * 289 / np.sqrt(100))
    assert not same(p.classes(LABELS, 20, 1, seed=0), p.classes(LABELS, 20, 1, seed=1))
    assert same(p.classes(LABELS, 20, 1, seed=1), p.classes(LABELS, 20, 1, seed=1))


@each(
    ("labels", "clients", "k", "sizes", "words"),
    [
        ([0, 1, 2], 1, 4, "equal", r"1\.\.3"),
        ([0, 1, 2], 1, 0, "equal", r"1\.\.3"),
        ([0, 1, 2, 2], 2, 1, "equal", "at least 3 clients or 2 classes"),
        ([0, 0, 0, 1], 4, 1, "equal", "Class 1 has fewer"),
        ([0, 0, 0, 1], 4, 1, "power", "Class 1 has fewer"),
        ([0, 0, 1, 1], 2, 1, [1, 3], "at most 2 in all"),
        ([0, 0, 1, 1], 2, 2, [1, 3], "at least 1 for each"),
        ([0, 1], 2, 1, "huge", "equal, power"),
    ],
)
def test_classes_refuses(labels, clients, k, sizes, words):
    with pytest.raises(DataError, match=words):
        p.classes(labels, clients, k, sizes)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0], [0, -1]])
def test_labels_are_checked(labels):
    with pytest.raises(DataError, match="label"):
        p.classes(labels, 1, 1)


def test_by_value_keeps_order_and_leaves_out_the_absent():
    rows, offsets, names = p.by_value(np.array([3, 0, 3, 1]), ["a", "b", "c", "d"])
    assert names == ("a", "b", "d")
    assert (rows.tolist(), offsets.tolist()) == ([1, 3, 0, 2], [0, 1, 2, 4])


def joined():
    labels = np.array([0, 1, 1, 0, 0, 1])
    source = np.array([0, 0, 0, 1, 1, 0])
    client = np.array([1, 1, 0, 0, 0, 1])
    more = {"sources": ("usps", "svhn"), "source": source, "client": client}
    return made(labels, clients=("ann", "bob"), **more)


@pytest.mark.parametrize(
    ("kind", "names", "sizes"),
    [
        ("source", ("usps", "svhn"), [4, 2]),
        ("source_class", ("usps/0", "usps/1", "svhn/0"), [1, 3, 2]),
        ("client", ("ann", "bob"), [3, 3]),
    ],
)
def test_divide_takes_the_clients_from_the_data(kind, names, sizes):
    clients = p.divide(joined(), Partition(kind=kind), 0)
    assert clients.names == names
    assert clients.sizes.tolist() == sizes


def test_source_class_uses_label_names():
    data = made(np.array([0, 1]), label_names=("cat", "dog"))
    assert p.by_source_class(data)[2] == ("data/cat", "data/dog")


def test_divide_without_a_client_column_says_what_to_do():
    with pytest.raises(DataError, match=r"data\.client"):
        p.divide(made(), Partition(kind="client"), 0)


@pytest.mark.parametrize(
    ("settings", "lists", "mattered"),
    [
        ({"kind": "iid"}, lambda: p.iid(1000, 8, 5), {"sizes": "equal"}),
        (
            {"kind": "iid", "sizes": "power", "sigma": 0.5},
            lambda: p.iid(1000, 8, 5, "power", 0.5),
            {"sizes": "power", "sigma": 0.5},
        ),
        (
            {"kind": "dirichlet", "alpha": 0.3, "min_size": 20},
            lambda: p.dirichlet(LABELS, 8, 0.3, 20, 5, classes=12),
            {"alpha": 0.3, "min_size": 20},
        ),
        (
            {"kind": "dirichlet_gradma", "alpha": 0.3},
            lambda: p.dirichlet_gradma(LABELS, 8, 0.3, 5, classes=12),
            {"alpha": 0.3},
        ),
        (
            {"kind": "dirichlet_prior", "alpha": 0.3, "sizes": (9,) * 8},
            lambda: p.dirichlet_prior(LABELS, 8, 0.3, (9,) * 8, seed=5, classes=12),
            {"alpha": 0.3, "sizes": "given"},
        ),
        (
            {"kind": "classes", "classes_per_client": 3, "sizes": "power", "sigma": 1.0},
            lambda: p.classes(LABELS, 8, 3, "power", 1.0, 5),
            {"classes_per_client": 3, "sizes": "power", "sigma": 1.0},
        ),
    ],
)
def test_divide_applies_the_recipe_and_records_it(settings, lists, mattered):
    clients = p.divide(made(classes=12), Partition(clients=8, **settings), 5)
    expected = lists()
    assert same([clients.client(k) for k in range(8)], expected)
    how = dict(clients.how)
    says, attempts = how.pop("says"), how.pop("attempts", None)
    assert says.startswith(settings["kind"])
    assert (attempts is not None) == (settings["kind"] == "dirichlet")
    assert how == {
        "kind": settings["kind"],
        "clients": 8,
        "seed": 5,
        **mattered,
        "examples": 1000,
        "unassigned": 1000 - sum(map(len, expected)),
        "holdout": 0.0,
        "held_out": 0,
    }
    assert json.loads(json.dumps(clients.how)) == clients.how


def test_the_partitions_own_seed_comes_first():
    own = p.divide(made(), Partition(clients=4, seed=9), 0)
    run = p.divide(made(), Partition(clients=4), 9)
    np.testing.assert_array_equal(own.rows, run.rows)
    assert own.how["seed"] == 9
    assert not np.array_equal(own.rows, p.divide(made(), Partition(clients=4), 0).rows)


def test_divide_says_it_in_words():
    labels = [0] * 4 + [1] * 2 + [2] * 3
    says = p.divide(made(np.array(labels)), Partition(kind="classes", clients=3), 0).how["says"]
    assert says == "classes: 3 clients of 2 to 4 examples (median 3), 1 class each"
    sizes = Partition(clients=2, sizes=(3, 3))
    says = p.divide(made(np.zeros(9, int)), sizes, 0).how["says"]
    assert says == "iid: 2 clients of 3 examples, 1 class each, 3 more unassigned"


def test_divide_holds_out():
    clients = p.divide(made(), Partition(clients=10, holdout=0.25), 0)
    assert clients.sizes.tolist() == [75] * 10
    assert clients.how["held_out"] == 250
    assert len(clients.holdout_rows) == 250
    assert disjoint([clients.rows, clients.holdout_rows], 1000) == 1000
    assert clients.how["says"].endswith("250 more held out")
    own = p.divide(made(), Partition(clients=10, holdout=0.25, seed=9), 0)
    whole = p.divide(made(), Partition(clients=10, seed=9), 0)
    np.testing.assert_array_equal(own.holdout_rows, whole.hold_out(0.25, 9).holdout_rows)


def test_fifty_thousand_clients():
    labels = np.arange(100_000) % 10
    data = made(labels, client=np.arange(100_000) // 2, clients=tuple(map(str, range(50_000))))
    for settings in (
        {"clients": 50_000},
        {"clients": 50_000, "kind": "classes"},
        {"kind": "client"},
    ):
        clients = p.divide(data, Partition(**settings), 0)
        assert clients.sizes.tolist() == [2] * 50_000
        assert np.unique(clients.rows).size == 100_000
