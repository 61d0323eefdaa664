"""A folder of images with one folder for each class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedkeel.data.read.identifiers import encode, encode_as
from fedkeel.data.read.image_files import ImageSize, read_image, read_image_size
from fedkeel.data.read.images import write_images
from fedkeel.data.read.limits import check_size
from fedkeel.data.read.raw_examples import RawExamples
from fedkeel.errors import DataError, counted

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff")
IGNORED_SUFFIXES = (".csv", ".db", ".html", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")
"""What may lie beside images: notes on them, and files that systems leave in every folder."""

_TRAINING = ("train", "training")
_TESTING = ("test", "testing", "val", "valid", "validation")
"""What folders of training and of test images are called, in letters of either case."""


def train_and_test_folders(folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of the training images, and that of the test images if there is one.

    Where `folder` holds ``train`` and ``test`` with folders in both, these are the two.
    """
    halves = folder / "train", folder / "test"
    if all(half.is_dir() and any(path.is_dir() for path in half.iterdir()) for half in halves):
        return halves
    return folder, None


def beside_halves(folder: Path) -> tuple[str, ...]:
    """Return the names of the folders with images beside ``train`` and ``test``."""
    others = (path for path in _entries(folder) if path.name not in ("train", "test"))
    return tuple(path.name for path in others if path.is_dir() and _has_images(path))


def tables_in(folder: Path) -> tuple[str, ...]:
    """Return the tables in a folder of images and in the folders of its classes, none of them read.

    They are named by their path below the folder.
    """
    below = [folder, *(path for path in _entries(folder) if path.is_dir())]
    below += [path for parent in below[1:] for path in _entries(parent) if path.is_dir()]
    files = (path for parent in below for path in _entries(parent))
    return tuple(
        path.relative_to(folder).as_posix() for path in files if path.suffix.lower() in _TABLES
    )


_TABLES = (".csv", ".json", ".jsonl", ".parquet", ".tsv", ".xls", ".xlsx")


def read_folder(
    folder: Path, shape: tuple[int, int, int] | None, label_names: tuple[str, ...] | None = None
) -> RawExamples:
    """Read ``folder/CLASS/*.png|jpg|jpeg|bmp|tif|tiff``.

    Classes are numbered in the order of their names.

    Args:
        folder: the folder that holds the folders of the classes.
        shape: (channels, height, width) that images of different sizes are brought to; without it
            all must be of one size. Grey images among coloured ones become coloured.
        label_names: the classes of the training images, for test images.

    Returns:
        [N, C, H, W]: bytes where no size has to be changed, or else numbers in [0, 1] in `shape`.

    Raises:
        DataError: there are no classes, a class has no images or files of another kind, images lie
            elsewhere or are all alike, an image cannot be read, or two differ in size and no shape
            is given.
    """
    files, labels = _list_images(folder)
    if label_names is None:
        y, label_names = encode(np.array(labels))
    else:
        y = encode_as(encode(np.array(labels)), label_names, str(folder))
    sizes = [read_image_size(file) for file in files]
    pixels = {size.pixels for size in sizes}
    if len(pixels) > 1 and shape is None:
        raise _different_sizes(folder, files, sizes)
    if len(pixels) == 1:
        channels = max(size.channels for size in sizes)
        sizes = [size._replace(channels=channels) for size in sizes]
    if shape is None or pixels == {shape[1:]}:
        x = _read_bytes(folder, files, sizes[0])
    else:
        _check_memory(folder, len(files), ImageSize(*shape))
        x = torch.empty((len(files), *shape), dtype=torch.float32)
        for row, (file, size) in enumerate(zip(files, sizes, strict=True)):
            image = torch.from_numpy(np.ascontiguousarray(read_image(file, size.channels)))
            write_images(x[row : row + 1], image[None], str(file))
    return RawExamples(_checked(folder, x, len(label_names)), y, label_names)


def read_new_images(
    path: Path, shape: tuple[int, int, int]
) -> tuple[list[str], Tensor, list[tuple[int, int]]]:
    """Read an image, or all images in a folder and the folders in it, without classes.

    Args:
        path: an image file, or a folder.
        shape: (channels, height, width) that each image is brought to.

    Returns:
        The files; [N, C, H, W] numbers in [0, 1]; and (height, width) of each before.

    Raises:
        DataError: there are no images, or one cannot be read.
    """
    if not path.exists():
        raise DataError(f"There is no file or folder {str(path)!r}.", do="check the path")
    files = sorted(filter(_is_image, path.rglob("*"))) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} has no images in it.", expected=", ".join(IMAGE_SUFFIXES))
    _check_memory(path, len(files), ImageSize(*shape))
    x = torch.empty((len(files), *shape), dtype=torch.float32)
    sizes = []
    for row, file in enumerate(files):
        image = torch.from_numpy(np.ascontiguousarray(read_image(file, shape[0])))
        write_images(x[row : row + 1], image[None], str(file))
        sizes.append((image.shape[1], image.shape[2]))
    return [str(file) for file in files], x, sizes


def _read_bytes(folder: Path, files: Sequence[Path], size: ImageSize) -> Tensor:
    """Read images of one size as bytes [N, C, H, W]."""
    _check_memory(folder, len(files), size)
    x = torch.empty((len(files), *size), dtype=torch.uint8)
    for row, file in enumerate(files):
        x[row] = torch.from_numpy(read_image(file, size.channels))
    return x


def _check_memory(folder: Path, count: int, size: ImageSize) -> None:
    """Refuse images that do not fit into memory as float32."""
    what = f"the set of {counted(count, 'image')} of {size.width} x {size.height} pixels"
    total = 4 * count * math.prod(size)
    check_size(folder, what, total, total, "set data.shape to smaller images, or give fewer")


def _different_sizes(folder: Path, files: Sequence[Path], sizes: Sequence[ImageSize]) -> DataError:
    other = next(row for row, size in enumerate(sizes) if size.pixels != sizes[0].pixels)
    both = (
        f"{files[row].relative_to(folder)} ({sizes[row].height} high, {sizes[row].width} wide)"
        for row in (0, other)
    )
    return DataError(
        f"{folder}: the images differ in size.",
        got=", ".join(both),
        do="set data.shape to (channels, height, width) that all are brought to",
    )


def _checked(folder: Path, x: Tensor, classes: int) -> Tensor:
    """Refuse images that are all alike."""
    if len(x) > 1 and classes > 1 and all(torch.equal(x[0], image) for image in x[1:]):
        raise DataError(
            f"{folder}: all {len(x):,} images are alike.",
            got=f"the same pixels in {classes} classes",
            expected="images that differ",
            do="look at some of them; what is transparent is laid on white",
        )
    return x


def _list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all image files in the folders of the classes, and the class of each."""
    classes = [path for path in _entries(folder) if path.is_dir()]
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if not classes:
        raise DataError(
            f"{folder} has no folders in it.",
            expected=f"one folder for each class, with images ({suffixes})",
            do="move the images of each class into a folder with its name",
        )
    loose = [path for path in _entries(folder) if _is_image(path)]
    if loose:
        raise DataError(
            f"{folder} has images beside the folders of the classes.",
            got=f"{counted(len(loose), 'image')}, such as {loose[0].name}",
            expected=f"images in {', '.join(path.name for path in classes[:3])}",
            do="move them into the folders of their classes, or elsewhere",
        )
    contents = {path: _entries(path) for path in classes}
    for path, entries in contents.items():
        if any(below.is_dir() and _has_images(below) for below in entries):
            raise _too_deep(folder, classes, path)
    images: list[Path] = []
    labels: list[str] = []
    for below, files in contents.items():
        images_here = [file for file in files if _is_image(file)]
        if not images_here:
            raise DataError(
                f"{below} has no images.",
                expected=f"files that end in {suffixes}",
                do="put the images of this class there; if it is not a class, move it elsewhere",
            )
        known = (*IMAGE_SUFFIXES, *IGNORED_SUFFIXES)
        unknown = [file for file in files if file.suffix.lower() not in known and not file.is_dir()]
        if unknown:
            raise DataError(
                f"{below} has {counted(len(unknown), 'file')} of a kind that is not read.",
                got=f"{unknown[0].name} beside {counted(len(images_here), 'image')}",
                expected=f"files that end in {suffixes}",
                do="convert them, or move them elsewhere",
            )
        images += images_here
        labels += [below.name] * len(images_here)
    return images, labels


def _too_deep(folder: Path, classes: Sequence[Path], path: Path) -> DataError:
    """Return the error of a folder whose images lie below `path`, by what that may mean."""
    below = {child.name: [p.name for p in _entries(child) if p.is_dir()] for child in classes}
    common = set(below[path.name]).intersection(*below.values())
    training = next((name for name in below if name.lower() in _TRAINING), None)
    testing = next((name for name in below if name.lower() in _TESTING), None)
    deeper = next(p for p in _entries(path) if p.is_dir() and _has_images(p))
    got = f"images in {path.name}/{deeper.name}"
    expected = "images in the folders of the classes themselves"
    if training and testing and len(common):
        do = f'set data.source = "{folder / training}" and data.test = "{folder / testing}"'
        left = sorted(below.keys() - {training, testing})
        do += f"; {', '.join(left)} would then be left out" if left else ""
    elif len(classes) == 1:
        do = f'set data.source = "{path}"'
    elif len(common) > 1:
        names = ", ".join(f'"{child}"' for child in classes[:2])
        do = (
            "if each is a patient or a place of its own, set data.source = "
            f'[{names}{", ..." if len(classes) > 2 else ""}] and partition.kind = "source"'
        )
    else:
        do = (
            f"move them up into {path}, or, if they are another class, beside it into {folder}; "
            "nothing below the folder of a class is read"
        )
    return DataError(
        f"{folder}: images lie in folders below {path.name}.",
        got=got,
        expected=expected,
        why="they would be left out",
        do=do,
    )


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds, in order, but for hidden files."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()


def _has_images(folder: Path, depth: int = 3) -> bool:
    """Return whether images lie in a folder, or in folders up to `depth` below."""
    entries = _entries(folder)
    return any(map(_is_image, entries)) or (
        depth > 0 and any(path.is_dir() and _has_images(path, depth - 1) for path in entries)
    )
