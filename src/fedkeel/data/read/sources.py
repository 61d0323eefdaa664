"""Finding and reading the known sets in the layouts that their publishers and others use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.base.named_files import expanded
from fedkeel.base.rng import generator
from fedkeel.data.dataset import Ints
from fedkeel.data.read import formats, image_files
from fedkeel.data.read.catalogue import SOURCES, ImageSet, Layout, find
from fedkeel.data.read.formats import StoredFile
from fedkeel.data.read.raw_examples import RawExamples, stratified_split
from fedkeel.errors import DataError

_Examples = tuple[NDArray[Any], Ints]
"""[N, C, H, W] images and [N] labels."""


@dataclass(frozen=True)
class KnownSet:
    """What `fedkeel data list` shows of a known set.

    Args:
        name: what settings call it.
        train: number of training examples.
        test: number of test examples.
        shape: (channels, height, width).
        classes: number of classes.
        where: folder in which it was found, ``"built in"``, or ``"not here"``.
        download: size of the download in bytes, None where there is nothing to download.
        citation: one line.
        note: where to get it when it cannot be downloaded.
    """

    name: str
    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    where: str
    download: int | None
    citation: str
    note: str


@dataclass(frozen=True)
class Located:
    """Where the files of a known set are.

    Args:
        folder: the folder that has them.
        files: the file for each entry of `ImageSet.files`.
    """

    folder: Path
    files: list[StoredFile]


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder that downloads go into.

    It is `cache`, or else the environment's FEDKEEL_CACHE, or ``fedkeel`` below XDG_CACHE_HOME, or
    ``~/.cache/fedkeel``.
    """
    if cache is not None:
        return cache
    if folder := os.environ.get("FEDKEEL_CACHE"):
        return expanded(folder)
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache") / "fedkeel"


def search_folders(cache: Path | None = None) -> list[Path]:
    """Return the folders that known sets are looked for in: FEDKEEL_DATA, then the cache."""
    folder = os.environ.get("FEDKEEL_DATA")
    return [*([expanded(folder)] if folder else []), cache_folder(cache)]


def locate(source: ImageSet, cache: Path | None = None) -> Located | None:
    """Look for the files of a known set; None where they are not all here."""
    for root in search_folders(cache):
        for name in source.folders:
            folder = root / name
            if not folder.is_dir() or (name == "." and _is_of_another_set(source, folder)):
                continue
            files = [_find_file(source, folder, file) for file in source.files]
            present = [file for file in files if file is not None]
            if len(present) == len(files):
                return Located(folder, present)
    return None


def _is_of_another_set(source: ImageSet, folder: Path) -> bool:
    """Whether files in `folder` itself are of the other one of two sets with the same file names.

    The name of the folder decides.
    """
    if source.name not in ("mnist", "fashion-mnist"):
        return False
    is_fashion = any("fashion" in part.lower() for part in folder.resolve().parts[-2:])
    return is_fashion != (source.name == "fashion-mnist")


def _find_file(source: ImageSet, folder: Path, file: str) -> StoredFile | None:
    """Return where one of a set's files is in a folder, None where it is not."""
    if source.layout == "mnist-m":
        listing = folder / f"{file}_labels.txt"
        if listing.is_file() and (folder / file).is_dir():
            return StoredFile(listing)
        records = sorted(folder.glob(f"{file}*.bin"), key=lambda path: path.stat().st_size)
        return StoredFile(records[-1]) if records else None
    for name in (file, file.replace("-idx", ".idx")):
        for suffix in ("", ".gz", ".bz2"):
            path = folder / f"{name}{suffix}"
            if path.is_file():
                return StoredFile(path)
    archive = folder / source.archive
    if source.archive and archive.is_file():
        return StoredFile(archive, f"gzip/{file}.gz")
    return None


def read_known_set(
    name: str, test_fraction: float, cache: Path | None = None
) -> tuple[RawExamples, RawExamples]:
    """Read a known set.

    Args:
        name: one of the known names.
        test_fraction: share set aside for testing of a set that has no test set of its own. The
            same examples are set aside in every run.
        cache: see `cache_folder`.

    Returns:
        The training set and the test set.

    Raises:
        DataError: there is no such set, its files are not here, or they cannot be read.
    """
    source = find(name)
    if source.layout == "embedded":
        return _digits(source, test_fraction)
    located = locate(source, cache)
    if located is None:
        raise _absent(source, cache)
    train, test = _READERS[source.layout](source, located.files)
    return _raw(source, train), _raw(source, test)


def _raw(source: ImageSet, examples: _Examples) -> RawExamples:
    x, y = examples
    y = y - source.first_label
    if len(y) and (y.min() < 0 or y.max() >= source.classes):
        row = int(np.flatnonzero((y < 0) | (y >= source.classes))[0])
        raise DataError(
            f"The files of {source.name!r} hold a label that the set does not have.",
            got=f"label {y[row] + source.first_label} in example {row} (counted from 0)",
            expected=f"labels {source.first_label}..{source.first_label + source.classes - 1}",
            do="check that the folder holds this set and not another with the same file names",
        )
    return RawExamples(torch.from_numpy(x), y, source.label_names)


def _digits(source: ImageSet, test_fraction: float) -> tuple[RawExamples, RawExamples]:
    rows = _digits_rows()
    x = torch.from_numpy((rows[:, :-1] / 16).astype(np.float32)).reshape(-1, *source.shape)
    examples = RawExamples(x, rows[:, -1].astype(np.int64), source.label_names)
    train, test = stratified_split(examples.y, test_fraction, generator(0, "data.digits"))
    return examples.take(train), examples.take(test)


def _digits_rows() -> NDArray[np.float64]:
    """Return scikit-learn's digits, [1797, 65]: 64 pixels in 0..16 and the label.

    Its file is read without the library, which needs seconds to import.
    """
    library = find_spec("sklearn")
    if library is not None and library.origin is not None:
        file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def _idx(source: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    return (
        formats.read_idx_pair(files[0], files[1], source.transposed),
        formats.read_idx_pair(files[2], files[3], source.transposed),
    )


def _libsvm(source: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    train, test = (formats.read_libsvm(file, source.shape) for file in files)
    return train, test


def _svhn(_: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    return formats.read_svhn(files[0]), formats.read_svhn(files[1])


def _cifar(source: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    labels = 1 if source.classes == 10 else 2  # CIFAR-100 has a coarse and a fine label
    return (
        formats.read_records(files[:-1], source.shape, labels),
        formats.read_records(files[-1:], source.shape, labels),
    )


def _mnist_m(source: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    train, test = (
        image_files.read_listed_images(file.path.parent / name, file.path)
        if file.path.suffix == ".txt"
        else formats.read_records([file], source.shape)
        for file, name in zip(files, source.files, strict=True)
    )
    return train, test


def _tiny_imagenet(_: ImageSet, files: Sequence[StoredFile]) -> tuple[_Examples, _Examples]:
    return image_files.read_tiny_imagenet(files[0].path, files[1].path)


_READERS: dict[Layout, Callable[[ImageSet, Sequence[StoredFile]], tuple[_Examples, _Examples]]] = {
    "idx": _idx,
    "libsvm": _libsvm,
    "svhn": _svhn,
    "cifar": _cifar,
    "mnist-m": _mnist_m,
    "tiny-imagenet": _tiny_imagenet,
}


def _absent(source: ImageSet, cache: Path | None) -> DataError:
    """Return the error of a set that is not here: what was looked for, where, and the way out."""
    do = f"fedkeel data get {source.name}" if source.downloads else source.note
    do += "; or set FEDKEEL_DATA to a folder that has it"
    roots = search_folders(cache)
    folders = [root / name for root in roots for name in source.folders]
    if source.pickled_folder:
        for parent in sorted({folder.parent for folder in folders}):
            for name in (source.pickled_folder, f"{source.pickled_folder}.tar.gz"):
                if (parent / name).exists():
                    return DataError(
                        f"{source.name!r} is here only in its pickled version.",
                        got=parent / name,
                        expected=f"the binary version, in a folder {source.folders[0]}",
                        why="a pickle can run any code when it is read, so nothing is unpickled",
                        do=do,
                    )
    for folder in folders:
        missing = [file for file in source.files if _find_file(source, folder, file) is None]
        if len(missing) < len(source.files) and not _is_of_another_set(source, folder):
            return DataError(
                f"The files of {source.name!r} are not all here.",
                got=f"{folder} without {', '.join(missing[:3])}",
                do=do,
            )
    return DataError(
        f"The files of {source.name!r} are not here.",
        got=", ".join(f"no {root / source.folders[0]}" for root in roots),
        expected=f"one of the folders {', '.join(source.folders)} with {source.files[0]} and "
        f"{len(source.files) - 1} more",
        do=do,
    )


def known_sets(cache: Path | None = None) -> list[KnownSet]:
    """Return each known set, with where it was found."""
    rows = []
    for source in SOURCES.values():
        located = locate(source, cache)
        where = str(located.folder) if located else "not here"
        rows.append(
            KnownSet(
                name=source.name,
                train=source.train,
                test=source.test,
                shape=source.shape,
                classes=source.classes,
                where="built in" if source.layout == "embedded" else where,
                download=sum(download.size for download in source.downloads) or None,
                citation=source.citation,
                note=source.note,
            )
        )
    return rows
