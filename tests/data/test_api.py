"""Federations of a user's own arrays."""

from array import array
from collections import deque

import numpy as np
import pytest
import torch

from each import each
from fedkeel.config import Partition
from fedkeel.data.dataset import dataset
from fedkeel.data.federation import federation
from fedkeel.data.partition import from_arrays as api
from fedkeel.data.partition.recipes import dirichlet, divide
from fedkeel.errors import ConfigError, DataError

Y = np.arange(60) % 3
X = np.zeros((60, 2))


@pytest.mark.parametrize(
    ("made", "settings"),
    [
        (lambda: api.iid(X, Y, 4, seed=3), {"clients": 4}),
        (
            lambda: api.iid(X, Y, 2, sizes=np.array([5, 9]), seed=3),
            {"clients": 2, "sizes": (5, 9)},
        ),
        (
            lambda: api.dirichlet(X, Y, clients=np.int64(4), alpha=1, min_size=2, seed=3),
            {"kind": "dirichlet", "clients": 4, "alpha": 1.0, "min_size": 2},
        ),
        (
            lambda: api.by_classes(X, Y, 4, 2, sizes="power", sigma=1.0, holdout=0.2, seed=3),
            {
                "kind": "classes",
                "clients": 4,
                "classes_per_client": 2,
                "sizes": "power",
                "sigma": 1.0,
                "holdout": 0.2,
            },
        ),
    ],
)
def test_same_as_the_settings(made, settings):
    clients, expected = made(), divide(dataset(X, Y), Partition(**settings), 3)
    np.testing.assert_array_equal(clients.rows, expected.rows)
    np.testing.assert_array_equal(clients.offsets, expected.offsets)
    assert clients.how == expected.how


def test_a_tensor_with_gradients_is_taken_as_its_numbers():
    x = torch.ones(60, 2, requires_grad=True)
    clients = api.iid(x * 2, torch.from_numpy(Y), clients=4)
    assert not clients.data.x.requires_grad
    assert clients.data.fingerprint() == dataset(2 * np.ones((60, 2)).astype("f4"), Y).fingerprint()


def test_tensors_are_taken():
    clients = api.dirichlet(torch.zeros(60, 2), torch.from_numpy(Y), clients=4, alpha=0.5)
    assert clients.sizes.sum() == 60


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([10, 9, 10], ("9", "10")),
        (np.array(["b", "a", "b"], dtype=object), ("a", "b")),
        (torch.tensor([1, 0, 1]), ("0", "1")),
    ],
)
def test_by_client(ids, names):
    clients = api.by_client(np.zeros((3, 1)), [0, 1, 1], ids)
    assert clients.names == names
    assert clients.client(0).tolist() == [1]
    assert clients.client(1).tolist() == [0, 2]
    assert clients.data.clients == names


def test_from_clients():
    own = {"b": ([[1.0], [2.0]], [0, 2]), "a": (torch.tensor([[3.0]]), np.array([1]))}
    clients = api.from_clients(own)
    assert clients.names == clients.data.clients == ("b", "a")
    assert [clients.client(k).tolist() for k in (0, 1)] == [[0, 1], [2]]
    assert clients.data.x.flatten().tolist() == [1, 2, 3]
    assert (clients.data.y.tolist(), clients.data.classes) == ([0, 2, 1], 3)
    assert api.from_clients(list(own.values())).names == ("0", "1")
    held = api.from_clients([(X, Y), (X, Y)], holdout=0.5)
    assert held.sizes.sum() == len(X)


@each(
    ("clients", "says"),
    [
        ({}, "There are no clients"),
        (None, "got an object of type NoneType"),
        (3, "got an object of type int"),
        ({1: (X, Y), "1": (X, Y)}, "Two clients are called '1'"),
        ({"a": X}, r"client a has no pair of arrays[\s\S]*got an object of type ndarray"),
        ([(X, Y), (X[:0], Y[:0])], "client 1"),
        ({"a": (X, Y), "b": (X[:3], Y[:2])}, "client b: inputs and targets do not match"),
        ({"a": ([[1.0]], [0]), "b": ([[1.0, 2.0]], [0])}, r"client b[\s\S]*got \(2,\) for one"),
        ({"a": ([[1.0]], [0]), "b": ([[np.nan]], [0])}, "client b: an input is NaN"),
    ],
)
def test_what_is_no_client_is_named(clients, says):
    with pytest.raises(DataError, match=says):
        api.from_clients(clients)


@pytest.mark.parametrize(
    "ids",
    [
        [2**63 + 1, 2**63 + 2, 5],
        np.array([2**63 + 1, 2**63 + 2, 5], dtype=np.uint64),
        [np.uint64(2**63 + 1), np.uint64(2**63 + 2), np.int64(5)],
        [2**60 + 1, 2**60 + 2, 0.5],
        [10**20 + 1, 10**20 + 2, 5],
    ],
)
def test_large_client_ids_stay_apart(ids):
    clients = api.by_client(np.zeros((3, 1)), [0, 1, 1], ids)
    names = [str(value) for value in sorted(np.asarray(ids, dtype=object).tolist())]
    assert clients.names == tuple(names)
    assert clients.client(2).tolist() == [1]


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_missing_client_ids_are_refused(gap):
    with pytest.raises(DataError, match="row 2"):
        api.by_client(np.zeros((3, 1)), [0, 1, 1], ["a", "b", gap])


def test_number_of_client_ids_is_checked():
    with pytest.raises(DataError, match=r"\(2,\); expected \(3,\)"):
        api.by_client(np.zeros((3, 1)), [0, 1, 1], ["a", "b"])


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="alpha"):
        api.dirichlet(X, Y, clients=3, alpha=-1.0)
    with pytest.raises(ConfigError, match="'sizes' has 1 entries for 2 clients"):
        api.iid(X, Y, 2, sizes=[3])
    with pytest.raises(DataError, match="do not match"):
        api.iid(X, Y[:5], 2)


@each(
    ("x", "y", "says"),
    [
        (X, Y.astype(str), "such as '0'; expected whole numbers from 0\n  do   number them"),
        (X, Y.astype(object), "numpy.unique(y, return_inverse=True)"),
        (
            X.astype(object),
            Y,
            "got inputs of type object, such as [0.0]; expected [N, ...] numbers",
        ),
        (X.astype(str), Y, "x.astype(numpy.float32)"),
        (X, np.where(Y[0] == Y, np.nan, Y), "a target is missing or infinite.\n  got nan in row 0"),
        (
            np.ma.masked_array(X, np.arange(X.size).reshape(X.shape) == X.shape[1]),
            Y,
            "inputs have gaps.\n  got a masked value in row 1",
        ),
        (X, np.ma.masked_equal(Y, Y[0]), "labels have gaps.\n  got a masked value in row 0"),
        (X + 1j, Y, "numpy.stack([x.real, x.imag], axis=1)"),
        (torch.from_numpy(X) + 1j, Y, "got inputs of type complex"),
        (None, Y, "such as [None]"),
        ([[1.0], [1.0, 2.0]], [0, 1], "data: inputs are not an array"),
        (X[:2], [0, [1]], "data: labels are not an array"),
    ],
)
def test_what_is_no_number_is_refused_with_what_to_do(x, y, says):
    with pytest.raises(DataError) as caught:
        api.iid(x, y, 2)
    assert says in str(caught.value)
    assert caught.value.do
    assert len(caught.value.lines()) <= 4


def test_arrays_of_another_make_are_taken_as_their_numbers():
    """They ended in a traceback."""
    expected = api.iid(X, Y, 2).data.x
    assert torch.equal(api.iid(X.astype(">f8"), Y.astype(">i4"), 2).data.x, expected)
    assert torch.equal(api.iid(torch.from_numpy(X).to_sparse(), Y, 2).data.x, expected)
    whole = np.ma.masked_array(X, mask=np.zeros(X.shape, bool))
    assert torch.equal(api.iid(whole, Y, 2).data.x, expected)


class Endless:
    """As many a Dataset of torch: it has a length, and its items never end."""

    def __init__(self, length: int = 60) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> list[float]:
        self.read += 1
        if self.read > 10 * self.length:
            raise AssertionError("it was read beyond its end")
        return [float(row), 0.0]


@each(
    "call",
    [
        lambda data: api.iid(data, Y, 2),
        lambda data: api.iid(X, data, 2),
        lambda data: api.iid([data, data], [0, 1], 2),
        lambda data: api.iid(np.array([[1.0]]), [(data,)], 2),
        lambda data: api.by_client(X, Y, data),
        lambda data: api.from_clients({"a": (data, Y)}),
        lambda data: api.iid(X, Y, 2, sizes=data),
        lambda data: federation(dataset(X, Y), data),
        lambda data: federation(dataset(X, Y), [data]),
        lambda data: dirichlet(data, 2, 0.5),
    ],
)
def test_an_object_that_may_never_end_is_not_read(call):
    data = Endless()
    with pytest.raises(DataError, match=r"type Endless(.|\n)*numpy\.stack") as caught:
        call(data)
    assert len(caught.value.lines()) == 4
    assert data.read == 0


def test_what_says_where_it_ends_is_taken():
    rows = array("d", [1.0, 2.0]), torch.tensor([3.0, 4.0])
    for x in (rows, deque(rows), [np.float32([1, 2]), memoryview(array("f", [3.0, 4.0]))]):
        assert api.iid(x, range(2), 2).data.x.tolist() == [[1, 2], [3, 4]]
    endless: list[object] = []
    endless += [endless, endless]
    with pytest.raises(DataError, match="are not an array"):
        api.iid(endless, [0, 1], 2)


def test_a_masked_client_id_is_missing():
    with pytest.raises(DataError, match="A client id is missing"):
        api.by_client(np.zeros((3, 1)), [0, 1, 1], np.ma.masked_equal([1, 2, 1], 2))


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        (
            [k == Y for k in range(3)],
            r"client 0.*\n.*a mask of shape \[60\](.|\n)*numpy.flatnonzero",
        ),
        ([torch.from_numpy(Y == 0)], "a mask of shape"),
        ([[1, 2], [0.9, 1.9]], r"client 1 are not row numbers.*\n.*float64"),
        (np.arange(6).reshape(3, 2)[:, :, None], r"an array of shape \[2, 1\]"),
        ({"a": [0, 1]}, "a dict(.|\n)*from_clients"),
        ([[0, 60]], "row 60"),
        ([[0, 1], []], "client 1 is empty"),
    ],
)
def test_rows_that_are_no_row_numbers_are_refused(lists: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        federation(dataset(X, Y), lists)


def test_rows_in_any_form() -> None:
    for lists in ([[0, 1], [5]], [np.array([0, 1], np.int16), torch.tensor([5])], [range(2), (5,)]):
        made = federation(dataset(X, Y), lists)
        assert [made.client(k).tolist() for k in range(2)] == [[0, 1], [5]]
    square = federation(dataset(X, Y), np.arange(6).reshape(3, 2))  # three clients of two
    assert square.client(2).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("y", "classes", "dtype"),
    [
        (Y, int(Y.max()) + 1, torch.int64),
        (Y.astype(float), int(Y.max()) + 1, torch.int64),
        (Y + 0.5, 0, torch.float64),
        ((Y + 0.5).astype(np.float32), 0, torch.float32),
        (np.stack([Y, Y], axis=1), int(Y.max()) + 1, torch.int64),
        (np.ones((len(Y), 2)), 2, torch.float64),
        (np.full((len(Y), 2), 0.5), 0, torch.float64),
    ],
)
def test_targets_are_labels_or_quantities(y, classes, dtype):
    data = api.iid(X, y, 2).data
    assert (data.classes, data.y.dtype, tuple(data.y.shape)) == (classes, dtype, y.shape)
    assert data.has_labels == (classes > 0 and y.ndim == 1)


def test_whole_numbers_are_quantities_where_that_is_said():
    data = api.iid(X, Y - 7, 2, classes=0).data
    assert (data.classes, data.y.tolist()) == (0, [float(y - 7) for y in Y])
    with pytest.raises(DataError, match="for quantities say classes=0"):
        api.iid(X, Y - 7, 2)


@pytest.mark.parametrize("divide", [api.dirichlet, api.by_classes])
def test_quantities_are_not_divided_by_their_labels(divide):
    more = {"alpha": 1.0} if divide is api.dirichlet else {"k": 1}
    with pytest.raises(DataError, match="divides examples by their labels, and these have none"):
        divide(X, Y + 0.5, clients=2, **more)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([-128, 127, 0, 127], dtype="i1"),
        np.array([2**64 - 1, 2**64 - 3, 2**64 - 1, 2**64 - 1], dtype="u8"),
        np.array([-(2**63), 2**63 - 1, 0, 0]),
        np.array([7, 3, 3, 7], dtype="u2"),
    ],
)
def test_ids_that_are_numbers_are_in_their_order(ids):
    clients = api.by_client(np.zeros((4, 1), "f4"), [0, 1, 0, 1], ids)
    names, client = np.unique(ids, return_inverse=True)
    assert clients.names == tuple(str(name) for name in names.tolist())
    assert clients.data.client.tolist() == client.tolist()
    assert [clients.client(k).tolist() for k in range(len(clients))] == [
        np.flatnonzero(client == k).tolist() for k in range(len(names))
    ]


def test_a_federation_is_told_in_five_lines() -> None:
    hospitals = {"north": (X[:40], Y[:40]), "south": (X[:15], Y[:15])}
    assert repr(api.from_clients(hospitals, holdout=0.2)).splitlines() == [
        "Federation of 2 clients: north, south",
        "  divided   client: 2 clients of 12 to 32 examples (median 22), 3 classes each, "
        "11 more held out",
        "  train     44 examples, 12 to 32 each",
        "  held out  11 examples",
        "  example   input [2], 3 classes",
    ]
    quantities = federation(dataset({"a": X, "b": X[:, 0]}, X + 0.5), [[0, 1]])
    assert repr(quantities).splitlines() == [
        "Federation of one client",
        "  divided   given",
        "  train     2 examples, 2 each",
        "  held out  nothing",
        "  example   a [2], b [], targets [60, 2]",
    ]
    many = api.from_clients([(X, Y)] * 300)
    assert len(repr(many).splitlines()) == 5
    assert max(map(len, repr(many).splitlines())) < 100


def test_clients_of_unequal_shapes_are_told_what_to_do() -> None:
    with pytest.raises(DataError, match="client b: inputs have another shape") as caught:
        api.from_clients({"a": (X, Y), "b": (np.zeros((60, 3)), Y)})
    assert "same columns in the same order" in str(caught.value)
    with pytest.raises(DataError, match="do not match") as caught:
        api.from_clients({"a": (X, Y[:30])})
    assert "from the same rows" in str(caught.value)
