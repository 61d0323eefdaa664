"""Readers of published file formats: idx, LIBSVM text, MATLAB, CIFAR's records, lists of images.

Each checks what the file says of itself against what is in it, and a file that is cut short or is
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
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from fedkeel.data.dataset import Ints
from fedkeel.errors import DataError

Pixels = NDArray[np.uint8]

_AT_ONCE = 1 << 20  # bytes read at a time
# Pillow's modes that are read, and how many channels they come to.
_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}
# A RuntimeError is what zipfile raises of members that are encrypted, or compressed in other ways.
_UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, KeyError, RuntimeError)


@dataclass(frozen=True)
class Stored:
    """Where the bytes of a file are.

    Args:
        path: the file, which may be compressed by gzip or bzip2.
        member: name inside `path` where that is a zip file, also possibly compressed.
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
            return sum(map(len, iter(partial(stream.read, _AT_ONCE), b"")))

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
            elif self.path.suffix == ".gz":
                with gzip.open(self.path) as stream:
                    yield cast(BinaryIO, stream)
            elif self.path.suffix == ".bz2":
                with bz2.open(self.path) as stream:
                    yield cast(BinaryIO, stream)
            else:
                with self.path.open("rb") as plain:
                    yield plain
        except _UNREADABLE as error:
            raise damaged(self, reason(error)) from None


def damaged(file: object, got: object, expected: object = None) -> DataError:
    """Return the error of a file that is not what it should be."""
    return DataError(
        f"{file} cannot be read.",
        got=got,
        expected=expected,
        do="replace it by a whole copy; if it is of a download, delete it and fetch it again",
    )


def reason(error: BaseException) -> str:
    """Return the first line of what a library says of an error, or else the error's kind."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def idx(file: Stored, axes: int) -> Pixels:
    """Read an idx file of unsigned bytes: big-endian header, then the bytes.

    Args:
        file: the file.
        axes: how many axes it must have: 1 for labels, 3 for images.

    Returns:
        An array with the axes that the header names.

    Raises:
        DataError: not idx, not unsigned bytes, other axes, too short, or too long.
    """
    with file.open() as stream:
        magic = stream.read(4)
        if magic != bytes((0, 0, 8, axes)):
            raise damaged(
                file,
                f"a file that begins with {magic.hex(' ') or 'nothing'}",
                f"an idx file of bytes with {axes} axes, which begins with 00 00 08 0{axes}",
            )
        sides = stream.read(4 * axes)
        if len(sides) < 4 * axes:
            raise damaged(file, "a file that ends within its header")
        shape = tuple(np.frombuffer(sides, dtype=">u4").tolist())
        try:
            data = np.empty(shape, dtype=np.uint8)
        except (ValueError, MemoryError):
            raise damaged(file, f"a header that promises {shape}") from None
        _read_into(stream, data, file)
        if stream.read(1):
            raise damaged(file, "more bytes than its header promises", f"{shape}")
    return data


def _read_into(stream: BinaryIO, data: Pixels, file: object) -> None:
    """Fill `data` from a stream, which must not end before."""
    flat = data.reshape(-1)
    done = 0
    while done < len(flat):
        part = stream.read(min(_AT_ONCE, len(flat) - done))
        if not part:
            raise damaged(file, f"{done:,} bytes of data", f"{len(flat):,}")
        flat[done : done + len(part)] = np.frombuffer(part, dtype=np.uint8)
        done += len(part)


def idx_pair(images: Stored, labels: Stored, transposed: bool = False) -> tuple[Pixels, Ints]:
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
    x, y = idx(images, 3), idx(labels, 1)
    if len(x) != len(y):
        raise damaged(labels, f"{len(y):,} labels", f"{len(x):,}, as {images} has images")
    if transposed:
        x = x.transpose(0, 2, 1)
    return x[:, None], y.astype(np.int64)


def libsvm(file: Stored, shape: tuple[int, int, int]) -> tuple[NDArray[np.float32], Ints]:
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
            raise damaged(file, reason(error), "lines of 'label index:value ...'") from None
    x = rows.toarray()
    if len(x) == 0:
        raise damaged(file, "no examples")
    if not np.abs(x).max() <= 1:
        raise damaged(file, f"values up to {np.abs(x).max()}", "values in [-1, 1]")
    x += 1
    x /= 2
    return x.reshape(-1, *shape), labels.astype(np.int64)


def svhn(file: Stored) -> tuple[Pixels, Ints]:
    """Read SVHN's cropped digits: a MATLAB file with X (H, W, C, N) and y (N, 1).

    Returns:
        [N, C, H, W] bytes, and [N] labels 0..9; the file writes the digit 0 as 10.

    Raises:
        DataError: not a MATLAB file with these two arrays.
    """
    from scipy.io import loadmat  # slow to import
    from scipy.io.matlab import MatReadError

    wrong = (*_UNREADABLE, MatReadError, ValueError, TypeError, KeyError, IndexError)
    try:
        with file.open() as stream:
            found = loadmat(stream, variable_names=("X", "y"))
        x, y = found["X"], found["y"].reshape(-1)
    except wrong as error:
        raise damaged(file, reason(error), "a MATLAB file with arrays X and y") from None
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != len(y):
        got = f"X {x.shape} of {x.dtype} and {len(y):,} labels"
        raise damaged(file, got, "X (height, width, 3, N) of uint8 and N labels")
    return np.require(x, requirements="W").transpose(3, 2, 0, 1), y.astype(np.int64) % 10


def records(
    files: Sequence[Stored], shape: tuple[int, int, int], labels: int = 1
) -> tuple[Pixels, Ints]:
    """Read records of label bytes followed by the planes of an image, as CIFAR's binary version.

    Args:
        files: read one after the other.
        shape: (channels, height, width) of an image.
        labels: number of label bytes; the last of them counts (CIFAR-100: coarse, then fine).

    Returns:
        [N, C, H, W] bytes, and [N] labels.

    Raises:
        DataError: a file's length is not a whole number of records.
    """
    length = labels + math.prod(shape)
    sizes = [file.size() for file in files]
    for file, size in zip(files, sizes, strict=True):
        if size == 0 or size % length:
            raise damaged(file, f"{size:,} bytes", f"a multiple of {length:,}, which one image has")
    data = np.empty((sum(sizes) // length, length), dtype=np.uint8)
    start = 0
    for file, size in zip(files, sizes, strict=True):
        rows = data[start : start + size // length]
        with file.open() as stream:
            _read_into(stream, rows, file)
        start += len(rows)
    return data[:, labels:].reshape(-1, *shape), data[:, labels - 1].astype(np.int64)


def peek(path: Path) -> tuple[int, int, int]:
    """Return (channels, height, width) of an image file, reading its header only.

    Raises:
        DataError: not an image, one that is neither 8-bit grey nor colour, or one of several pages.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, size = image.mode, image.size
            pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    except (*_UNREADABLE, ValueError, SyntaxError) as error:
        raise damaged(path, reason(error), "an image") from None
    if mode not in _CHANNELS:
        raise DataError(
            f"{path} has a kind of pixel that is not read.",
            got=f"Pillow's mode {mode!r}",
            expected="8-bit grey or colour",
            do="convert the images to 8 bits, or put their numbers into an .npz file",
        )
    if pages > 1:
        raise DataError(
            f"{path} holds several images.",
            got=f"{pages} pages",
            expected="one image in a file",
            do="write each page into a file of its own, or all into an .npz file",
        )
    return _CHANNELS[mode], size[1], size[0]


def decode(path: Path, channels: int) -> Pixels:
    """Read an image file.

    Args:
        path: the file.
        channels: 1 for grey or 3 for red, green, blue.

    Returns:
        [channels, H, W] bytes.

    Raises:
        DataError: not an image, or cut short.
    """
    from PIL import Image

    peek(path)
    try:
        with Image.open(path) as image:
            # A palette with transparent entries is read by way of RGBA, as Pillow asks for.
            whole = image.convert("RGBA") if image.mode == "P" else image
            pixels = np.array(whole.convert("L" if channels == 1 else "RGB"))
    except (*_UNREADABLE, ValueError, SyntaxError) as error:
        raise damaged(path, reason(error), "an image") from None
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def listed_images(folder: Path, listing: Path) -> tuple[Pixels, Ints]:
    """Read colour images that a text file lists with their labels: ``name label`` in each line.

    Returns:
        [N, 3, H, W] bytes, and [N] labels.

    Raises:
        DataError: a line is something else, an image cannot be read, or two differ in size.
    """
    names, labels = [], []
    for row, line in enumerate(listing.read_text(encoding="utf-8").splitlines()):
        words = line.split()
        if len(words) != 2 or not words[1].isdigit():
            raise damaged(listing, f"{line[:60]!r} in line {row + 1}", "'name label'")
        names.append(words[0])
        labels.append(int(words[1]))
    if not names:
        raise damaged(listing, "no examples")
    _, height, width = decode(folder / names[0], channels=3).shape
    files = [(folder / name, label) for name, label in zip(names, labels, strict=True)]
    return _decoded(files, (3, height, width))


def tiny_imagenet(listing: Path, annotations: Path) -> tuple[tuple[Pixels, Ints], ...]:
    """Read Tiny ImageNet: JPEG images of 64 x 64 pixels, of classes that WordNet numbers.

    Classes are numbered in the order of their WordNet numbers. Grey images become coloured.

    Args:
        listing: ``wnids.txt``, one class in a line; beside it ``train/CLASS/images/*.JPEG``.
        annotations: ``val/val_annotations.txt``, ``name CLASS`` and a box in each line; beside it
            ``images/name``.

    Returns:
        [N, 3, 64, 64] bytes and [N] labels: of the training and of the validation images.

    Raises:
        DataError: a class has no images, a line is something else, an image cannot be read or has
            another size.
    """
    classes = sorted(listing.read_text(encoding="utf-8").split())
    place = {name: label for label, name in enumerate(classes)}
    train: list[tuple[Path, int]] = []
    for name, label in place.items():
        folder = listing.parent / "train" / name / "images"
        found = sorted(folder.glob("*.JPEG"))
        if not found:
            raise damaged(listing, f"no images in {folder}", f"images of class {name}")
        train += [(path, label) for path in found]
    tested: list[tuple[Path, int]] = []
    for row, line in enumerate(annotations.read_text(encoding="utf-8").splitlines()):
        words = line.split()
        if len(words) < 2 or words[1] not in place:
            raise damaged(annotations, f"{line[:60]!r} in line {row + 1}", "'name class box'")
        tested.append((annotations.parent / "images" / words[0], place[words[1]]))
    return _decoded(train, (3, 64, 64)), _decoded(tested, (3, 64, 64))


def _decoded(files: Sequence[tuple[Path, int]], shape: tuple[int, int, int]) -> tuple[Pixels, Ints]:
    """Read image files of one size."""
    x = np.empty((len(files), *shape), dtype=np.uint8)
    for row, (path, _) in enumerate(files):
        image = decode(path, channels=shape[0])
        if image.shape != shape:
            raise damaged(path, f"an image of {image.shape}", f"{shape}")
        x[row] = image
    return x, np.array([label for _, label in files], dtype=np.int64)
