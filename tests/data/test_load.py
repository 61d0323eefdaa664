"""Joining, resizing, normalising and limiting."""

import bz2

import numpy as np
import pytest
import torch

from fedkeel.config import Data
from fedkeel.data import load
from fedkeel.errors import DataError


@pytest.fixture
def root(tmp_path, monkeypatch, write_mnist):
    """MNIST and MNIST-M, with 12 and 2 training examples, and USPS with 3."""
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    write_mnist(tmp_path / "mnist")
    folder = tmp_path / "mnist_m"
    folder.mkdir()
    for half, count in (("train", 2), ("test", 1)):
        colours = np.full((count, 3073), 10, dtype=np.uint8)
        colours[:, 0] = 5
        colours[:, 1:1025] = 200  # red
        colours[0, 1] = 255
        (folder / f"mnist_m_{half}.bin").write_bytes(colours.tobytes())
    folder = tmp_path / "usps"
    folder.mkdir()
    for name, count in (("usps", 3), ("usps.t", 2)):
        pixels = " ".join(f"{k}:{-0.5 if k % 2 else 0.5}" for k in range(1, 257))
        text = "".join(f"{label + 1} {pixels}\n" for label in range(count))
        (folder / f"{name}.bz2").write_bytes(bz2.compress(text.encode()))
    return tmp_path


THREE = ("mnist", "mnist-m", "usps")


def refused(call, *words):
    with pytest.raises(DataError) as caught:
        call()
    assert len(caught.value.lines()) <= 4
    for word in words:
        assert word in str(caught.value)


def test_join(root):
    train, test = load(Data(source=THREE, shape=(3, 32, 32), normalize="none"), 0)
    assert train.x.shape == (17, 3, 32, 32)
    assert test.x.shape == (7, 3, 32, 32)
    assert train.sources == test.sources == THREE
    assert train.source.tolist() == [0] * 12 + [1] * 2 + [2] * 3
    assert test.source.tolist() == [0] * 4 + [1] + [2] * 2
    assert train.source.dtype == np.int64
    assert train.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 5, 5, 0, 1, 2]
    assert train.classes == 10
    assert train.label_names == tuple("0123456789")
    assert torch.equal(train.x[:12, 0], train.x[:12, 2])  # grey is repeated
    assert train.x[12, 0, 0, 0] == 1
    assert train.x[13, :, 9, 9].tolist() == pytest.approx([200 / 255, 10 / 255, 10 / 255])
    assert 0.25 <= train.x[14:].min() < train.x[14:].max() <= 0.75


def test_join_to_grey(root):
    train, _ = load(Data(source=("mnist-m", "mnist"), shape=(1, 28, 28), normalize="none"), 0)
    luma = 0.299 * 200 + 0.587 * 10 + 0.114 * 10
    assert train.x[1, 0, 14, 14].item() == pytest.approx(luma / 255)
    assert train.x[2, 0, 0, 0] == 1  # MNIST is as it was


def test_joined_sets_are_standardised_each_by_itself(root):
    train, test = load(Data(source=THREE, shape=(3, 32, 32)), 0)
    plain, plain_test = load(Data(source=THREE, shape=(3, 32, 32), normalize="none"), 0)
    for source in (0, 2):
        own = train.x[torch.from_numpy(train.source == source)].to(torch.float64)
        np.testing.assert_allclose(own.mean((0, 2, 3)), np.zeros(3), atol=1e-6)
        np.testing.assert_allclose(own.std((0, 2, 3), correction=0), np.ones(3), atol=1e-5)
    before = plain.x[:12].to(torch.float64)
    expected = (plain_test.x[:4] - before.mean()) / before.std(correction=0)
    np.testing.assert_allclose(test.x[:4], expected, atol=1e-5)


def test_a_set_that_is_joined_unchanged_keeps_its_published_numbers(root):
    train, _ = load(Data(source=("mnist", "mnist-m"), shape=(1, 28, 28)), 0)
    assert train.x[0, 0, 27, 27].item() == pytest.approx(-0.1307 / 0.3081)


def test_standardize_takes_the_whole_training_set(root):
    train, _ = load(Data(source=THREE, shape=(3, 32, 32), normalize="standardize"), 0)
    np.testing.assert_allclose(train.x.double().mean((0, 2, 3)), np.zeros(3), atol=1e-6)
    assert abs(train.x[:12].mean().item()) > 0.1


def test_pixels_are_standardised_each_by_itself(root):
    train, test = load(Data(source="mnist", normalize="pixels"), 0)
    plain, plain_test = load(Data(source="mnist", normalize="none"), 0)
    before, after = (255 * each.x.flatten(1).numpy().astype(float) for each in (plain, plain_test))
    mean, std = before.mean(0), before.std(0)
    seen = std > 0  # FedProx's recipe, on values to 255
    expected = (after[:, seen] - mean[seen]) / (std[seen] + 0.001)
    np.testing.assert_allclose(test.x.flatten(1)[:, seen], expected, rtol=1e-5, atol=1e-6)
    assert (train.x.flatten(1)[:, ~seen] == 0).all()
    assert seen.sum() == 12  # every training image is marked in a pixel of its own


def test_shapes_that_differ_need_a_shape(root):
    refused(
        lambda: load(Data(source=THREE), 0),
        "mnist and mnist-m",
        "1x28x28 and 3x32x32",
        "data.shape",
    )


def test_one_set_is_resized(root):
    train, test = load(Data(source="mnist", shape=(3, 14, 14), normalize="none"), 0)
    assert train.x.shape == (12, 3, 14, 14)
    assert test.x.shape == (4, 3, 14, 14)
    assert train.source is None


def test_limit(root):
    train, test = load(Data(source=THREE, shape=(1, 28, 28), limit=3, normalize="none"), 0)
    assert train.source.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert len(test) == 7
    again, _ = load(Data(source=THREE, shape=(1, 28, 28), limit=3, normalize="none"), 9)
    assert train.fingerprint() == again.fingerprint()
    alone, _ = load(Data(source="mnist", limit=3, normalize="none"), 0)
    assert torch.equal(alone.x, train.x[:3])
    rows = [int((image > 0).any(1).nonzero()[0]) for image in alone.x[:, 0]]
    assert rows == sorted(rows)  # image i is marked in row i
    assert rows != [0, 1, 2]
    assert alone.y.tolist() == [row % 10 for row in rows]


def test_a_source_named_twice(root):
    refused(lambda: load(Data(source=("mnist", "mnist")), 0), "'mnist' twice")


def test_tables_joined_by_the_names_of_their_labels(tmp_path):
    (tmp_path / "north.csv").write_text("x,label,who\n1,b,1\n2,c,2\n3,b,1\n4,c,2\n")
    (tmp_path / "south.csv").write_text("x,label,who\n5,a,1\n6,c,1\n7,a,1\n8,c,1\n")
    paths = tuple(str(tmp_path / f"{name}.csv") for name in ("north", "south"))
    train, test = load(Data(source=paths, client="who", test_fraction=0.5), 0)
    assert train.sources == ("north", "south")
    assert train.label_names == ("a", "b", "c")
    assert train.classes == 3
    truth = {1: "b", 2: "c", 3: "b", 4: "c", 5: "a", 6: "c", 7: "a", 8: "c"}
    for half in (train, test):
        got = [half.label_names[label] for label in half.y.tolist()]
        assert got == [truth[int(x)] for x in half.x.flatten().tolist()]
    assert train.clients == ("north/1", "north/2", "south/1")
    names = [train.clients[k] for k in train.client]
    where = {1: "north/1", 2: "north/2", 3: "north/1", 4: "north/2"}
    assert names == [where.get(int(x), "south/1") for x in train.x.flatten().tolist()]


def test_whole_numbers_are_joined_in_their_order(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,2\n2,10\n3,2\n4,10\n")
    (tmp_path / "b.csv").write_text("x,label\n5,9\n6,10\n7,9\n8,10\n")
    paths = tuple(str(tmp_path / f"{name}.csv") for name in "ab")
    train, _ = load(Data(source=paths, test_fraction=0.5), 0)
    assert train.label_names == ("2", "9", "10")


def test_ones_own_digits_join_a_known_set(root):
    path = root / "mine.npz"
    x = np.full((4, 28, 28), 51, dtype=np.uint8)
    np.savez(path, x=x, label=[3, 8, 3, 8])  # numbered 0 and 1 by themselves
    train, _ = load(Data(source=("mnist", str(path)), test_fraction=0.5), 0)
    assert train.sources == ("mnist", "mine")
    assert sorted(train.y[12:].tolist()) == [3, 8]
    assert train.x[12:].unique().tolist() == pytest.approx([0.2])  # not normalised


def test_tables_that_cannot_be_joined(tmp_path, root):
    (tmp_path / "a.csv").write_text("x,label\n1,0\n2,1\n3,0\n4,1\n")
    (tmp_path / "b.csv").write_text("z,label\n1,0\n2,1\n3,0\n4,1\n")
    a, b = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    refused(lambda: load(Data(source=(a, b), test_fraction=0.5), 0), "columns differ")
    refused(lambda: load(Data(source=(a, "mnist"), test_fraction=0.5), 0), "columns differ")
    refused(lambda: load(Data(source=a, shape=(1, 2, 2), test_fraction=0.5), 0), "for images")


def test_files_of_one_name_are_named_by_their_paths(tmp_path):
    texts = []
    for folder in ("n", "s"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "a.csv"
        path.write_text("x,label\n1,0\n2,1\n3,0\n4,1\n")
        texts.append(str(path))
    train, _ = load(Data(source=tuple(texts), test_fraction=0.5), 0)
    assert train.sources == tuple(texts)


def test_one_test_file_for_two_paths_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,0\n2,1\n")
    a = str(tmp_path / "a.csv")
    refused(lambda: load(Data(source=(a, "b.csv"), test=a), 0), "2 paths", "data.test")


def test_what_is_set_aside_does_not_depend_on_the_files_name(tmp_path):
    """A file that was renamed had another test set, and another score."""
    text = "a,label\n" + "".join(f"{i},{i % 3}\n" for i in range(60))
    halves = []
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text(text)
        settings = Data(source=str(tmp_path / name), test_fraction=0.3, limit=20)
        halves.append([half.x.tolist() for half in load(settings, 0)])
    assert halves[0] == halves[1]
