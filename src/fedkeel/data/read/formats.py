"""Readers of published file formats: idx, LIBSVM text, MATLAB, CIFAR's records.

Each reader compares what a file says of itself with what is in it. A file that is cut short or is
something else is refused with its name and what is wrong. Nothing is unpickled.
"""

from __future__ import annotations

import bz2
import gzip
import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError, first_line

Pixels = NDArray[np.uint8]

BLOCK = 1 << 20
"""Bytes that are read at a time."""

# zipfile raises RuntimeError for members that are encrypted or compressed in other ways.
_READ_ERRORS = (OSError, EOFError, zlib.error, zipfile.BadZipFile, KeyError, RuntimeError)


@dataclass(frozen=True)
class StoredFile:
    """Where the bytes of a file are.

    Args:
        path: the file, which may be compressed by gzip or bzip2.
        member: name of a gzipped file inside `path`, where that is a zip file.
    """

    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    def size(self) -> int:
        """Return the number of bytes, decompressed.

        Raises:
            DataError: the file cannot be read.
        """
        if not self.member and self.path.suffix not in (".gz", ".bz2"):
            return self.path.stat().st_size
        with self.open() as stream:
            return sum(map(len, iter(partial(stream.read, BLOCK), b"")))

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open for reading, decompressed.

        Raises:
            DataError: the file cannot be read, here or while it is being read.
        """
        try:
            if self.member:
                with (
                    zipfile.ZipFile(self.path) as archive,
                    archive.open(self.member) as inner,
                    gzip.open(inner) as stream,
                ):
                    yield cast(BinaryIO, stream)
            else:
                openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
                with openers.get(self.path.suffix, open)(self.path, "rb") as stream:
                    yield stream
        except _READ_ERRORS as error:
            raise unreadable_file(self, first_line(error)) from None


def unreadable_file(file: object, got: object, expected: object = None) -> DataError:
    """Return the error of a file that is not what it should be."""
    return DataError(
        f"{file} cannot be read.",
        got=got,
        expected=expected,
        do="replace it by a complete copy; if it was downloaded, delete it and fetch it again",
    )


def read_idx(file: StoredFile, axes: int) -> Pixels:
    """Read an idx file of unsigned bytes: big-endian header, then the bytes.

    Args:
        file: the file.
        axes: number of axes that it must have: 1 for labels, 3 for images.

    Returns:
        An array with the axes that the header names.

    Raises:
        DataError: not idx, not unsigned bytes, other axes, too short, or too long.
    """
    with file.open() as stream:
        magic = stream.read(4)
        if magic != bytes((0, 0, 8, axes)):
            raise unreadable_file(
                file,
                f"a file that begins with {magic.hex(' ') or 'nothing'}",
                f"an idx file of bytes with {axes} axes, which begins with 00 00 08 0{axes}",
            )
        header = stream.read(4 * axes)
        if len(header) < 4 * axes:
            raise unreadable_file(file, "a file that ends within its header")
        shape = tuple(np.frombuffer(header, dtype=">u4").tolist())
        try:
            data = np.empty(shape, dtype=np.uint8)
        except (ValueError, MemoryError):
            raise unreadable_file(file, f"a header that promises {shape}") from None
        _read_into(stream, data, file)
        if stream.read(1):
            raise unreadable_file(file, "more bytes than its header promises", f"{shape}")
    return data


def _read_into(stream: BinaryIO, data: Pixels, file: object) -> None:
    """Fill `data` from a stream; refuse one that ends before."""
    flat = data.reshape(-1)
    done = 0
    while done < len(flat):
        block = stream.read(min(BLOCK, len(flat) - done))
        if not block:
            raise unreadable_file(file, f"{done:,} bytes of data", f"{len(flat):,}")
        flat[done : done + len(block)] = np.frombuffer(block, dtype=np.uint8)
        done += len(block)


def read_idx_pair(
    images: StoredFile, labels: StoredFile, transposed: bool = False
) -> tuple[Pixels, Ints]:
    """Read images and their labels from two idx files.

    Args:
        images: file with axes (N, H, W).
        labels: file with axis (N,).
        transposed: whether the file has columns before rows, as EMNIST.

    Returns:
        [N, 1, H, W] bytes, and [N] labels as the file has them.

    Raises:
        DataError: a file cannot be read, or there are not as many labels as images.
    """
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise unreadable_file(labels, f"{len(y):,} labels", f"{len(x):,}, as {images} has images")
    if transposed:
        x = x.transpose(0, 2, 1)
    return x[:, None], y.astype(np.int64)


def read_libsvm(file: StoredFile, shape: tuple[int, int, int]) -> tuple[NDArray[np.float32], Ints]:
    """Read images from LIBSVM text: a line is ``label index:value ...``, indices from 1.

    Args:
        file: the file; values lie in [-1, 1], and one that is not there is 0.
        shape: (channels, height, width) of an image.

    Returns:
        [N, C, H, W] in [0, 1], and [N] labels as the file has them.

    Raises:
        DataError: the file is not such text, or a value lies outside [-1, 1].
    """
    from sklearn.datasets import load_svmlight_file  # slow to import

    with file.open() as stream:
        try:
            text = io.BytesIO(stream.read())  # faster than line by line out of bzip2
            rows, labels = load_svmlight_file(
                text, n_features=math.prod(shape), dtype=np.float32, zero_based=False
            )
        except ValueError as error:
            expected = "lines of 'label index:value ...'"
            raise unreadable_file(file, first_line(error), expected) from None
    x = rows.toarray()
    if len(x) == 0:
        raise unreadable_file(file, "no examples")
    if not np.abs(x).max() <= 1:
        raise unreadable_file(file, f"values up to {np.abs(x).max()}", "values in [-1, 1]")
    x += 1
    x /= 2
    return x.reshape(-1, *shape), labels.astype(np.int64)


def read_svhn(file: StoredFile) -> tuple[Pixels, Ints]:
    """Read SVHN's cropped digits: a MATLAB file with X (H, W, C, N) and y (N, 1).

    Returns:
        [N, C, H, W] bytes, and [N] labels 0..9; the file writes the digit 0 as 10.

    Raises:
        DataError: not a MATLAB file with these two arrays.
    """
    from scipy.io import loadmat  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        with file.open() as stream:
            arrays = loadmat(stream, variable_names=("X", "y"))
        x, y = arrays["X"], arrays["y"].reshape(-1)
    except (*_READ_ERRORS, MatReadError, ValueError, TypeError, IndexError) as error:
        raise unreadable_file(
            file, first_line(error), "a MATLAB file with arrays X and y"
        ) from None
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != len(y):
        got = f"X {x.shape} of {x.dtype} and {len(y):,} labels"
        raise unreadable_file(file, got, "X (height, width, 3, N) of uint8 and N labels")
    return np.require(x, requirements="W").transpose(3, 2, 0, 1), y.astype(np.int64) % 10


def read_records(
    files: Sequence[StoredFile], shape: tuple[int, int, int], labels: int = 1
) -> tuple[Pixels, Ints]:
    """Read records of label bytes followed by the planes of an image, as CIFAR's binary version.

    Args:
        files: read one after the other.
        shape: (channels, height, width) of an image.
        labels: number of label bytes; the last of them counts (CIFAR-100: coarse, then fine).

    Returns:
        [N, C, H, W] bytes, and [N] labels.

    Raises:
        DataError: a file's length is not a multiple of a record's.
    """
    length = labels + math.prod(shape)
    sizes = [file.size() for file in files]
    for file, size in zip(files, sizes, strict=True):
        if size == 0 or size % length:
            expected = f"a multiple of {length:,}, which one image has"
            raise unreadable_file(file, f"{size:,} bytes", expected)
    data = np.empty((sum(sizes) // length, length), dtype=np.uint8)
    start = 0
    for file, size in zip(files, sizes, strict=True):
        rows = data[start : start + size // length]
        with file.open() as stream:
            _read_into(stream, rows, file)
        start += len(rows)
    return data[:, labels:].reshape(-1, *shape), data[:, labels - 1].astype(np.int64)
