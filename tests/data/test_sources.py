import bz2
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedkeel.config import Data
from fedkeel.data import known_sets, load
from fedkeel.data.read import sources
from fedkeel.data.read.catalogue import SOURCES
from fedkeel.data.read.sources import cache_folder
from fedkeel.errors import DataError


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("FEDKEEL_DATA", str(folder))
    return folder


def plain(name, **more):
    return load(Data(source=name, normalize="none", **more), seed=0)


def refused(call, *words):
    with pytest.raises(DataError) as caught:
        call()
    assert len(caught.value.lines()) <= 4
    for word in words:
        assert word in str(caught.value)


def test_digits_are_those_of_the_library(monkeypatch):
    rows = sources._digits_rows()
    monkeypatch.setattr(sources, "find_spec", lambda _: None)
    assert np.array_equal(rows, sources._digits_rows())
    assert rows.shape == (1797, 65)


def test_digits():
    train, test = plain("digits")
    assert train.x.shape == (1438, 1, 8, 8)
    assert test.x.shape == (359, 1, 8, 8)
    assert train.x.dtype == torch.float32
    assert train.x.min() == 0
    assert train.x.max() == 1
    assert train.classes == 10
    assert train.sources == ("digits",)
    assert train.source is None
    whole = np.bincount(np.concatenate([train.y, test.y]))
    assert whole.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(np.bincount(test.y) - 0.2 * whole).max() < 1


def test_the_test_set_of_digits_is_the_same_for_every_seed():
    settings = Data(source="digits", test_fraction=0.1)
    one, two = load(settings, seed=0), load(settings, seed=1)
    assert one[1].fingerprint() == two[1].fingerprint()
    assert one[0].fingerprint() == two[0].fingerprint()
    assert len(one[1]) == 180


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", "MNIST", "."])
@pytest.mark.parametrize(("gz", "dots"), [(True, False), (False, True)])
def test_mnist(root, write_mnist, folder, gz, dots):
    write_mnist(root / folder, gz, dots)
    train, test = plain("mnist")
    assert train.x.shape == (12, 1, 28, 28)
    assert train.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert test.y.tolist() == [9, 8, 7, 6]
    for i in range(12):
        assert train.x[i, 0, i, 2 * i].item() == pytest.approx((255 - i) / 255)
    assert (train.x > 0).sum() == 12
    assert train.label_names == tuple("0123456789")


def test_fashion_mnist_and_mnist_are_told_apart(root, write_mnist, monkeypatch):
    write_mnist(root / "FashionMNIST" / "raw")
    assert plain("fashion-mnist")[0].label_names[9] == "Ankle boot"
    refused(lambda: plain("mnist"), "not here")
    monkeypatch.setenv("FEDKEEL_DATA", str(root / "FashionMNIST" / "raw"))
    assert len(plain("fashion-mnist")[0]) == 12
    refused(lambda: plain("mnist"), "not here")


def test_normalising_by_the_published_numbers(root, write_mnist):
    write_mnist(root / "mnist")
    train, _ = load(Data(source="mnist"), seed=0)
    assert train.x[0, 0, 27, 27].item() == pytest.approx(-0.1307 / 0.3081)
    assert train.x[0, 0, 0, 0].item() == pytest.approx((1 - 0.1307) / 0.3081)


@pytest.mark.parametrize("zipped", [True, False])
def test_emnist_letters(root, write_idx, tmp_path, zipped):
    stored = np.zeros((3, 28, 28), dtype=np.uint8)
    stored[:, 5, 20] = 255  # column 5, row 20: the files have columns before rows
    folder = tmp_path / "made"
    for half, labels in (("train", [1, 26, 2]), ("test", [3, 3, 1])):
        name = f"emnist-letters-{half}"
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", stored)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", np.array(labels))
    if zipped:
        (root / "EMNIST").mkdir()
        with zipfile.ZipFile(root / "EMNIST" / "gzip.zip", "w") as archive:
            for file in folder.iterdir():
                archive.write(file, f"gzip/{file.name}")
    else:
        shutil.copytree(folder, root / "EMNIST" / "raw")
    train, test = plain("emnist-letters")
    assert train.x.shape == (3, 1, 28, 28)
    assert train.x[0, 0, 20, 5] == 1
    assert train.x[0, 0, 5, 20] == 0
    assert train.y.tolist() == [0, 25, 1]
    assert test.y.tolist() == [2, 2, 0]
    assert train.classes == 26
    assert train.label_names[25] == "z"


def test_the_classes_of_emnist():
    classes = {name[7:]: s.classes for name, s in SOURCES.items() if name.startswith("emnist-")}
    assert classes == {
        "digits": 10,
        "letters": 26,
        "balanced": 47,
        "byclass": 62,
        "bymerge": 47,
        "mnist": 10,
    }
    assert "".join(SOURCES["emnist-bymerge"].label_names[36:]) == "abdefghnqrt"
    assert len(set(SOURCES["cifar100"].label_names)) == 100


def test_a_label_that_the_set_does_not_have(root, write_idx, write_mnist):
    write_mnist(root / "mnist")
    write_idx(root / "mnist" / "t10k-labels-idx1-ubyte.gz", np.array([1, 2, 30, 4]))
    refused(lambda: plain("mnist"), "label 30 in example 2", "labels 0..9", "another")


def test_usps(root):
    folder = root / "USPS"
    folder.mkdir()
    values = np.linspace(-1, 1, 256)
    line = " ".join(f"{k + 1}:{value:.3f}" for k, value in enumerate(values))
    for name in ("usps", "usps.t"):
        (folder / f"{name}.bz2").write_bytes(bz2.compress(f"10 {line}\n1 {line}\n".encode()))
    train, test = plain("usps")
    assert train.x.shape == test.x.shape == (2, 1, 16, 16)
    assert train.y.tolist() == [9, 0]
    np.testing.assert_allclose(train.x[1].flatten(), (values + 1) / 2, atol=3e-4)


def test_svhn(root):
    (root / "SVHN").mkdir()
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5)).astype(np.uint8)
    for half in ("train", "test"):
        y = np.array([[10], [1], [2], [3], [9]], dtype=np.uint8)
        savemat(root / "SVHN" / f"{half}_32x32.mat", {"X": x, "y": y})
    train, _ = plain("svhn")
    assert train.y.tolist() == [0, 1, 2, 3, 9]
    assert train.x.shape == (5, 3, 32, 32)
    assert train.x[4, 2, 7, 9].item() == pytest.approx(x[7, 9, 2, 4] / 255)


def cifar_record(*labels, first=0):
    planes = np.arange(first, first + 3072) % 256
    return bytes([*labels, *planes.tolist()])


def test_cifar10(root):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    for i in range(1, 6):
        (folder / f"data_batch_{i}.bin").write_bytes(cifar_record(i) + cifar_record(9 - i, first=1))
    (folder / "test_batch.bin").write_bytes(cifar_record(9))
    train, test = plain("cifar10")
    assert train.y.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    assert test.y.tolist() == [9]
    # red is the first plane, rows come before columns: row 1, column 2 of green is 1024 + 34
    assert test.x[0, 1, 1, 2].item() == pytest.approx((1024 + 34) % 256 / 255)
    assert train.x[1, 0, 0, 0].item() == pytest.approx(1 / 255)
    (folder / "data_batch_3.bin").unlink()
    refused(lambda: plain("cifar10"), "without data_batch_3.bin", "data get cifar10")


def test_cifar100_takes_the_fine_label(root):
    folder = root / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(cifar_record(3, 99))
    (folder / "test.bin").write_bytes(cifar_record(4, 1))
    train, test = plain("cifar100")
    assert train.y.tolist() == [99]
    assert train.label_names[99] == "worm"
    assert test.label_names[test.y[0]] == "aquarium_fish"


@pytest.mark.parametrize(
    ("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")]
)
def test_pickles_are_refused_with_the_reason(root, name, folder):
    (root / folder).mkdir()
    refused(lambda: plain(name), "pickled version", "can run any code", f"data get {name}", folder)


def test_mnist_m_flat_records(root):
    folder = root / "mnist_m"
    folder.mkdir()
    (folder / "mnist_m_train_first2.bin").write_bytes(cifar_record(3) + cifar_record(4))
    (folder / "mnist_m_test_first1.bin").write_bytes(cifar_record(5))
    train, test = plain("mnist-m")
    assert train.y.tolist() == [3, 4]
    assert test.y.tolist() == [5]
    assert train.x[0, 2, 0, 1].item() == pytest.approx((2048 + 1) % 256 / 255)


@pytest.fixture
def tiny(root):
    """Two classes of two training images each, one of them grey, and three validation images."""
    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True)
    for wnid, red in (("n02", 200), ("n01", 40)):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        for i in range(2):
            image = Image.new("RGB", (64, 64), (red, 0, 0))
            image = image.convert("L") if (wnid, i) == ("n01", 1) else image
            image.save(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", quality=95)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    for i in range(3):
        Image.new("RGB", (64, 64), (0, 80 * i, 0)).save(
            folder / "val" / "images" / f"val_{i}.JPEG", quality=95
        )
    (folder / "val" / "val_annotations.txt").write_text(
        "val_2.JPEG\tn02\t0\t0\t63\t63\nval_0.JPEG\tn01\t1\t2\t3\t4\n"
    )
    return folder


def test_tiny_imagenet(tiny):
    train, test = plain("tiny-imagenet")
    assert train.x.shape == (4, 3, 64, 64)
    assert train.y.tolist() == [0, 0, 1, 1]  # in the order of n01, n02
    assert train.x[2].mean((1, 2)).tolist() == pytest.approx([200 / 255, 0, 0], abs=0.01)
    assert train.x[1].mean((1, 2)).tolist() == pytest.approx([12 / 255] * 3, abs=0.01)  # grey
    assert test.y.tolist() == [1, 0]
    assert test.x[0].mean((1, 2)).tolist() == pytest.approx([0, 160 / 255, 0], abs=0.01)
    assert train.classes == 200


def test_tiny_imagenet_that_is_not_whole(tiny):
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn09\t0\t0\t1\t1\n")
    refused(lambda: plain("tiny-imagenet"), "'val_0.JPEG\\tn09", "in line 1")
    Image.new("RGB", (64, 32)).save(tiny / "train" / "n01" / "images" / "n01_1.JPEG")
    (tiny / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t1\t1\n")
    refused(lambda: plain("tiny-imagenet"), "n01_1.JPEG", "(3, 32, 64)")
    shutil.rmtree(tiny / "train" / "n02")
    refused(lambda: plain("tiny-imagenet"), "no images in", "n02")


def test_mnist_m_as_published(root):
    folder = root / "mnist_m"
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    for half in ("train", "test"):
        (folder / f"mnist_m_{half}").mkdir(parents=True)
        for i in range(2):
            Image.fromarray(pixels[i]).save(folder / f"mnist_m_{half}" / f"{i:08}.png")
        (folder / f"mnist_m_{half}_labels.txt").write_text("00000001.png 5\n00000000.png 0\n")
    train, _ = plain("mnist-m")
    assert train.y.tolist() == [5, 0]
    assert torch.equal(train.x[0], torch.from_numpy(pixels[1]).permute(2, 0, 1) / 255)
    (folder / "mnist_m_test_labels.txt").write_text("00000001.png five\n")
    refused(lambda: plain("mnist-m"), "'00000001.png five' in line 1")
    (folder / "mnist_m_test_labels.txt").write_text("00000007.png 5\n")
    refused(lambda: plain("mnist-m"), "00000007.png")


def test_what_is_not_here(root):
    refused(
        lambda: plain("svhn"),
        str(root / "SVHN"),
        str(cache_folder() / "SVHN"),
        "train_32x32.mat",
        "fedkeel data get svhn",
        "FEDKEEL_DATA",
    )
    refused(lambda: plain("mnist-m"), "no address that can be fetched")


def test_fedkeel_data_comes_before_the_cache(root, write_mnist, write_idx):
    write_mnist(cache_folder() / "MNIST" / "raw")
    assert plain("mnist")[1].y.tolist() == [9, 8, 7, 6]
    write_mnist(root / "mnist")
    write_idx(root / "mnist" / "t10k-labels-idx1-ubyte.gz", np.array([1, 2, 3, 4]))
    assert plain("mnist")[1].y.tolist() == [1, 2, 3, 4]


def test_the_cache_folder(monkeypatch, tmp_path):
    assert cache_folder(tmp_path / "own") == tmp_path / "own"
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FEDKEEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fedkeel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "fedkeel"


def test_known(root, write_mnist):
    write_mnist(root / "mnist")
    rows = {row.name: row for row in known_sets()}
    assert rows["digits"].where == "built in"
    assert rows["mnist"].where == str(root / "mnist")
    assert rows["svhn"].where == "not here"
    assert (rows["svhn"].train, rows["svhn"].test) == (73257, 26032)
    assert rows["svhn"].download == 182_040_794 + 64_275_384
    assert rows["mnist-m"].download is None
    assert "address" in rows["mnist-m"].note
    assert all(row.citation for row in rows.values())
