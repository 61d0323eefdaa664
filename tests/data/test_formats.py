import bz2
import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedkeel.data.read import formats, image_files
from fedkeel.data.read.formats import StoredFile
from fedkeel.errors import DataError


def refused(call, *words):
    """The call is refused in at most four lines that hold all the words."""
    with pytest.raises(DataError) as caught:
        call()
    lines = caught.value.lines()
    assert len(lines) <= 4
    assert not [line for line in lines if "\n" in line]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_idx(tmp_path, write_idx, name):
    array = np.arange(24).reshape(2, 3, 4)
    file = StoredFile(write_idx(tmp_path / name, array))
    assert formats.read_idx(file, 3).tolist() == array.tolist()


def test_idx_reads_big_endian_sizes(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 1, 4]) + bytes(260))
    assert formats.read_idx(StoredFile(path), 1).shape == (260,)


def test_idx_that_is_something_else(tmp_path, write_idx):
    path = tmp_path / "page"
    path.write_bytes(b"<html>not here</html>")
    refused(lambda: formats.read_idx(StoredFile(path), 3), str(path), "3c 68 74 6d", "00 00 08 03")
    labels = write_idx(tmp_path / "labels", np.arange(3))
    refused(lambda: formats.read_idx(StoredFile(labels), 3), "00 00 08 01", "with 3 axes")
    path.write_bytes(b"")
    refused(lambda: formats.read_idx(StoredFile(path), 1), "nothing")


def test_idx_that_is_cut_short(tmp_path, write_idx):
    path = write_idx(tmp_path / "images", np.zeros((5, 4, 4)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    refused(lambda: formats.read_idx(StoredFile(path), 3), "73 bytes of data", "expected 80")
    path.write_bytes(whole[:10])
    refused(lambda: formats.read_idx(StoredFile(path), 3), "within its header")
    path.write_bytes(whole + b"x")
    refused(lambda: formats.read_idx(StoredFile(path), 3), "more bytes")


def test_gzip_that_is_cut_short_or_damaged(tmp_path, write_idx):
    path = write_idx(tmp_path / "images.gz", np.random.default_rng(0).integers(0, 256, (9, 9, 9)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    refused(
        lambda: formats.read_idx(StoredFile(path), 3), "images.gz cannot be read", "fetch it again"
    )
    path.write_bytes(whole[:300] + bytes([whole[300] ^ 255]) + whole[301:])
    refused(lambda: formats.read_idx(StoredFile(path), 3), "images.gz cannot be read")
    path.write_bytes(b"not gzip")
    refused(lambda: formats.read_idx(StoredFile(path), 3), "Not a gzipped file")


def test_idx_whose_header_promises_more_than_any_memory(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(bytes([0, 0, 8, 3]) + b"\xff" * 12)
    refused(lambda: formats.read_idx(StoredFile(path), 3), "promises", "4294967295")


def test_idx_pair_of_different_lengths(tmp_path, write_idx):
    images = StoredFile(write_idx(tmp_path / "images", np.zeros((3, 2, 2))))
    labels = StoredFile(write_idx(tmp_path / "labels", np.zeros(4)))
    refused(lambda: formats.read_idx_pair(images, labels), "4 labels", "expected 3")


def test_idx_in_a_zip(tmp_path, write_idx):
    inner = write_idx(tmp_path / "a.gz", np.arange(6)).read_bytes()
    path = tmp_path / "gzip.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("gzip/a.gz", inner)
    assert formats.read_idx(StoredFile(path, "gzip/a.gz"), 1).tolist() == [0, 1, 2, 3, 4, 5]
    refused(lambda: formats.read_idx(StoredFile(path, "gzip/b.gz"), 1), "no item named 'gzip/b.gz'")
    path.write_bytes(path.read_bytes()[:40])
    refused(lambda: formats.read_idx(StoredFile(path, "gzip/a.gz"), 1), "not a zip file")


def test_libsvm(tmp_path):
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(b"10 1:-1 2:0.5 3:1 4:-0.25\n3 1:1 4:-1\n"))
    x, y = formats.read_libsvm(StoredFile(path), (1, 2, 2))
    assert x.dtype == np.float32
    assert x.tolist() == [[[[0, 0.75], [1, 0.375]]], [[[1, 0.5], [0.5, 0]]]]
    assert y.tolist() == [10, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"1 1:x\n", "label index:value"),
        (b"1 5:1\n", "cannot be read"),
        (b"1 0:1\n", "cannot be read"),
        (b"1 1:1.5\n", "values up to 1.5"),
        (b"1 1:nan\n", "values up to nan"),
        (b"", "cannot be read"),
    ],
)
def test_libsvm_that_is_something_else(tmp_path, text, words):
    path = tmp_path / "usps"
    path.write_bytes(text)
    refused(lambda: formats.read_libsvm(StoredFile(path), (1, 2, 2)), words, str(path))


def test_svhn(tmp_path):
    x = np.arange(2 * 3 * 3 * 4, dtype=np.uint8).reshape(2, 3, 3, 4)  # H, W, C, N
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": x, "y": np.array([[10], [1], [9], [10]], dtype=np.uint8)})
    got, y = formats.read_svhn(StoredFile(path))
    assert got.shape == (4, 3, 2, 3)
    assert got[3, 2, 1, 0] == x[1, 0, 2, 3]
    assert y.tolist() == [0, 1, 9, 0]


def test_svhn_that_is_something_else(tmp_path):
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": np.zeros((2, 2, 3, 4), dtype=np.uint8), "y": np.zeros((3, 1))})
    refused(lambda: formats.read_svhn(StoredFile(path)), "3 labels")
    savemat(path, {"X": np.zeros((2, 2, 3, 4), dtype=np.uint8)})
    refused(lambda: formats.read_svhn(StoredFile(path)), "arrays X and y")
    whole = path.read_bytes()
    for data in (whole[:150], whole[:60], b"", b"v" * 300):
        path.write_bytes(data)
        refused(lambda: formats.read_svhn(StoredFile(path)), str(path))


def test_records(tmp_path):
    one, two = StoredFile(tmp_path / "1.bin"), StoredFile(tmp_path / "2.bin")
    one.path.write_bytes(bytes([7, *range(12), 8, *range(100, 112)]))
    two.path.write_bytes(bytes([9, *range(200, 212)]))
    x, y = formats.read_records([one, two], (3, 2, 2))
    assert y.tolist() == [7, 8, 9]
    assert x[1].tolist() == [
        [[100, 101], [102, 103]],
        [[104, 105], [106, 107]],
        [[108, 109], [110, 111]],
    ]
    assert x[2, 2, 1, 1] == 211
    assert x.base is not None  # no copy


def test_records_with_two_labels_take_the_second(tmp_path):
    file = StoredFile(tmp_path / "train.bin")
    file.path.write_bytes(bytes([4, 77, 1, 2, 3, 5, 88, 4, 5, 6]))
    x, y = formats.read_records([file], (3, 1, 1), labels=2)
    assert y.tolist() == [77, 88]
    assert x.reshape(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_records_that_are_compressed(tmp_path):
    file = StoredFile(tmp_path / "train.bin.gz")
    file.path.write_bytes(gzip.compress(bytes([4, 1, 2, 3, 5, 4, 5, 6])))
    x, y = formats.read_records([file], (3, 1, 1))
    assert y.tolist() == [4, 5]
    assert x.reshape(2, 3).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("size", [0, 12, 27])
def test_records_that_are_cut_short(tmp_path, size):
    file = StoredFile(tmp_path / "1.bin")
    file.path.write_bytes(bytes(size))
    refused(lambda: formats.read_records([file], (3, 2, 2)), f"{size} bytes", "a multiple of 13")


def test_decode(tmp_path):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert image_files.read_image_size(tmp_path / "a.png") == (3, 2, 3)
    assert (
        image_files.read_image(tmp_path / "a.png", 3).tolist() == pixels.transpose(2, 0, 1).tolist()
    )
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "b.bmp")
    assert image_files.read_image_size(tmp_path / "b.bmp") == (1, 2, 3)
    assert image_files.read_image(tmp_path / "b.bmp", 1).tolist() == [pixels[:, :, 0].tolist()]
    assert image_files.read_image(tmp_path / "b.bmp", 3)[2].tolist() == pixels[:, :, 0].tolist()
    Image.fromarray(pixels).convert("P").save(tmp_path / "c.png", transparency=b"\x00\xff")
    assert image_files.read_image(tmp_path / "c.png", 3).shape == (3, 2, 3)


def test_images_that_cannot_be_read(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32)).astype(np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    refused(lambda: image_files.read_image(path, 1), str(path))
    path.write_bytes(b"nothing")
    refused(lambda: image_files.read_image_size(path), "expected an image")
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(path)
    refused(lambda: image_files.read_image_size(path), "I;16", "8-bit")


def test_plain_file_that_is_a_folder(tmp_path):
    refused(lambda: formats.read_idx(StoredFile(tmp_path), 1), "directory")


def test_bzip2_that_is_cut_short(tmp_path):
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(b"1 1:1\n" * 99)[:-9])
    refused(lambda: formats.read_libsvm(StoredFile(path), (1, 1, 1)), "usps.bz2 cannot be read")
    path.write_bytes(gzip.compress(b"1 1:1\n"))
    refused(lambda: formats.read_libsvm(StoredFile(path), (1, 1, 1)), "usps.bz2 cannot be read")


def test_an_encrypted_archive_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "own.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"12345")
    raw = bytearray(path.read_bytes())
    raw[6] |= 1  # the flag of encryption, here and in the directory
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="encrypted"), StoredFile(path, "a").open() as stream:
        stream.read()
