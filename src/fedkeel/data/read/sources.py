"""Finding and reading the known sets in the layouts that their publishers and others use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedkeel.data.dataset import Ints
from fedkeel.data.read import formats
from fedkeel.data.read.catalogue import SOURCES, Layout, Source, find
from fedkeel.data.read.formats import Stored
from fedkeel.data.read.raw_examples import Raw, stratified
from fedkeel.errors import DataError
from fedkeel.rng import generator

_Half = tuple[NDArray[Any], Ints]


@dataclass(frozen=True)
class Row:
    """What `fedkeel data list` says of a known set.

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


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder that downloads go into.

    It is `cache`, or else the environment's FEDKEEL_CACHE, or ``fedkeel`` below XDG_CACHE_HOME, or
    ``~/.cache/fedkeel``.
    """
    if cache is not None:
        return cache
    if given := os.environ.get("FEDKEEL_CACHE"):
        return Path(given).expanduser()
    above = os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache") / "fedkeel"


def roots(cache: Path | None = None) -> list[Path]:
    """Return the folders that known sets are looked for in: FEDKEEL_DATA, then the cache."""
    given = os.environ.get("FEDKEEL_DATA")
    own = [Path(given).expanduser()] if given else []
    return [*own, cache_folder(cache)]


def locate(source: Source, cache: Path | None = None) -> tuple[Path, list[Stored]] | None:
    """Look for the files of a known set.

    Returns:
        The folder that has them and the file of each of the set's parts, or None.
    """
    for root in roots(cache):
        for name in source.folders:
            folder = root / name
            if not folder.is_dir() or (name == "." and _another(source, folder)):
                continue
            files = [_part(source, folder, part) for part in source.parts]
            there = [file for file in files if file is not None]
            if len(there) == len(files):
                return folder, there
    return None


def _another(source: Source, folder: Path) -> bool:
    """Whether bare files in `folder` are the other set of those that share their file names."""
    if source.name not in ("mnist", "fashion-mnist"):
        return False
    fashion = any("fashion" in part.lower() for part in folder.resolve().parts[-2:])
    return fashion != (source.name == "fashion-mnist")


def _part(source: Source, folder: Path, part: str) -> Stored | None:
    """Return where a part of a set is in a folder, None where it is not."""
    if source.layout == "mnist-m":
        return _mnist_m_part(folder, part)
    for name in (part, part.replace("-idx", ".idx")):
        for ending in ("", ".gz", ".bz2"):
            path = folder / f"{name}{ending}"
            if path.is_file():
                return Stored(path)
    archive = folder / source.archive
    if source.archive and archive.is_file():
        return Stored(archive, f"gzip/{part}.gz")
    return None


def _mnist_m_part(folder: Path, part: str) -> Stored | None:
    """Return the listing of the publisher's images, or else the largest file of flat records."""
    listing = folder / f"{part}_labels.txt"
    if listing.is_file() and (folder / part).is_dir():
        return Stored(listing)
    flat = sorted(folder.glob(f"{part}*.bin"), key=lambda path: path.stat().st_size)
    return Stored(flat[-1]) if flat else None


def read(name: str, test_fraction: float, cache: Path | None = None) -> tuple[Raw, Raw]:
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
    found = locate(source, cache)
    if found is None:
        raise _absent(source, cache)
    train, test = _READERS[source.layout](source, found[1])
    return _raw(source, train), _raw(source, test)


def _raw(source: Source, half: _Half) -> Raw:
    x, y = half
    y = y - source.first
    if len(y) and (y.min() < 0 or y.max() >= source.classes):
        row = int(np.flatnonzero((y < 0) | (y >= source.classes))[0])
        raise DataError(
            f"The files of {source.name!r} hold a label that the set does not have.",
            got=f"label {y[row] + source.first} in example {row} (counted from 0)",
            expected=f"labels {source.first}..{source.first + source.classes - 1}",
            do="check that the folder holds this set and not another with the same file names",
        )
    return Raw(torch.from_numpy(x), y, source.label_names)


def _digits(source: Source, test_fraction: float) -> tuple[Raw, Raw]:
    from sklearn.datasets import load_digits  # slow to import

    found = load_digits()
    x = torch.from_numpy((found.images / 16).astype(np.float32))[:, None]
    whole = Raw(x, found.target.astype(np.int64), source.label_names)
    train, test = stratified(whole.y, test_fraction, generator(0, "data.digits"))
    return whole.take(train), whole.take(test)


def _idx(source: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    return (
        formats.idx_pair(files[0], files[1], source.transposed),
        formats.idx_pair(files[2], files[3], source.transposed),
    )


def _libsvm(source: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    return formats.libsvm(files[0], source.shape), formats.libsvm(files[1], source.shape)


def _svhn(_: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    return formats.svhn(files[0]), formats.svhn(files[1])


def _cifar(source: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    labels = 1 if source.classes == 10 else 2  # CIFAR-100 has a coarse and a fine label
    return (
        formats.records(files[:-1], source.shape, labels),
        formats.records(files[-1:], source.shape, labels),
    )


def _mnist_m(source: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    halves = [
        formats.listed_images(file.path.parent / part, file.path)
        if file.path.suffix == ".txt"
        else formats.records([file], source.shape)
        for file, part in zip(files, source.parts, strict=True)
    ]
    return halves[0], halves[1]


def _tiny_imagenet(_: Source, files: Sequence[Stored]) -> tuple[_Half, _Half]:
    train, tested = formats.tiny_imagenet(files[0].path, files[1].path)
    return train, tested


_READERS: dict[Layout, Callable[[Source, Sequence[Stored]], tuple[_Half, _Half]]] = {
    "idx": _idx,
    "libsvm": _libsvm,
    "svhn": _svhn,
    "cifar": _cifar,
    "mnist-m": _mnist_m,
    "tiny-imagenet": _tiny_imagenet,
}


def _absent(source: Source, cache: Path | None) -> DataError:
    """Return the error of a set that is not here: what was looked for, where, and the way out."""
    do = f"fedkeel data get {source.name}" if source.remotes else source.note
    do += "; or set FEDKEEL_DATA to a folder that has it"
    pickled = [path for path in _foreign(source, cache) if path.exists()]
    if pickled:
        return DataError(
            f"{source.name!r} is here only in its pickled version.",
            got=pickled[0],
            expected=f"the binary version, in a folder {source.folders[0]}",
            why="a pickle can run any code when it is read, so nothing is unpickled",
            do=do,
        )
    for folder in (root / name for root in roots(cache) for name in source.folders):
        missing = [part for part in source.parts if _part(source, folder, part) is None]
        if len(missing) < len(source.parts) and not _another(source, folder):
            return DataError(
                f"The files of {source.name!r} are not all here.",
                got=f"{folder} without {', '.join(missing[:3])}",
                do=do,
            )
    return DataError(
        f"The files of {source.name!r} are not here.",
        got=", ".join(f"no {root / source.folders[0]}" for root in roots(cache)),
        expected=f"one of the folders {', '.join(source.folders)} with {source.parts[0]} and "
        f"{len(source.parts) - 1} more",
        do=do,
    )


def _foreign(source: Source, cache: Path | None) -> list[Path]:
    """Return where a form of the set that is not read would be."""
    above = {(root / name).parent for root in roots(cache) for name in source.folders}
    names = [source.foreign, f"{source.foreign}.tar.gz"] if source.foreign else []
    return [folder / name for folder in sorted(above) for name in names]


def known(cache: Path | None = None) -> list[Row]:
    """Return a row for each known set, with where it was found; see `Row`."""
    rows = []
    for source in SOURCES.values():
        found = locate(source, cache)
        where = str(found[0]) if found else "not here"
        rows.append(
            Row(
                name=source.name,
                train=source.train,
                test=source.test,
                shape=source.shape,
                classes=source.classes,
                where="built in" if source.layout == "embedded" else where,
                download=sum(remote.size for remote in source.remotes) or None,
                citation=source.citation,
                note=source.note,
            )
        )
    return rows
