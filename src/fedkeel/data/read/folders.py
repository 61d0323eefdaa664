"""A folder of images with one folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedkeel.data.read import images
from fedkeel.data.read.formats import decode, peek
from fedkeel.data.read.raw_examples import Raw, number, number_like
from fedkeel.errors import DataError, counted

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff")
_BESIDE = (".csv", ".db", ".html", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")
"""What may lie beside images: notes on them, and what systems leave in every folder."""


def halves(folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of the training images, and that of the test images if there is one.

    Where `folder` holds ``train`` and ``test`` with folders in both, these are the two.
    """
    parts = folder / "train", folder / "test"
    if all(part.is_dir() and any(below.is_dir() for below in part.iterdir()) for part in parts):
        return parts
    return folder, None


def read(
    folder: Path, shape: tuple[int, int, int] | None, like: tuple[str, ...] | None = None
) -> Raw:
    """Read ``folder/CLASS/*.png|jpg|jpeg|bmp|tif|tiff``.

    Classes are numbered in the order of their names.

    Args:
        folder: where the folders of the classes are.
        shape: (channels, height, width) that images of different sizes are brought to; without it
            all must be of one size. Grey images among coloured ones become coloured.
        like: the classes of the training images, for test images.

    Returns:
        [N, C, H, W]: bytes where all images have one size, or else numbers in [0, 1] in `shape`.

    Raises:
        DataError: there are no classes, a class has no images or files of another kind, an image
            cannot be read, or two differ in size and no shape is given.
    """
    files, labels = _listing(folder)
    if like is None:
        y, names = number(np.array(labels))
    else:
        y, names = number_like(np.array(labels), like, str(folder)), like
    kinds = [peek(file) for file in files]
    channels = max(kind[0] for kind in kinds)
    size = kinds[0][1:]
    other = next((row for row, kind in enumerate(kinds) if kind[1:] != size), None)
    if other is None:
        x = torch.empty((len(files), channels, *size), dtype=torch.uint8)
        for row, file in enumerate(files):
            x[row] = torch.from_numpy(decode(file, channels))
        return Raw(x, y, names)
    if shape is None:
        one, two = (f"{files[row].relative_to(folder)} ({_size(kinds[row])})" for row in (0, other))
        raise DataError(
            f"{folder}: the images differ in size.",
            got=f"{one}, {two}",
            do="set data.shape to (channels, height, width) that all are brought to",
        )
    x = torch.empty((len(files), *shape), dtype=torch.float32)
    for row, (file, kind) in enumerate(zip(files, kinds, strict=True)):
        image = torch.from_numpy(np.ascontiguousarray(decode(file, kind[0])))
        images.fill(x[row : row + 1], image[None], str(file))
    return Raw(x, y, names)


def _size(kind: tuple[int, int, int]) -> str:
    return f"{kind[1]} high, {kind[2]} wide"


def _listing(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all image files below the folders of the classes, and the class of each."""
    visible = (below for below in folder.iterdir() if not below.name.startswith("."))
    classes = sorted(below for below in visible if below.is_dir())
    if not classes:
        raise DataError(
            f"{folder} has no folders in it.",
            expected=f"one folder for each class, with images ({', '.join(_SUFFIXES)})",
        )
    files: list[Path] = []
    labels: list[str] = []
    for below in classes:
        found = sorted(
            file
            for file in below.iterdir()
            if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")
        )
        if not found:
            raise DataError(
                f"{below} has no images.",
                expected=f"files that end in {', '.join(_SUFFIXES)}",
                do="remove the folder if it is not a class",
            )
        _none_left_out(below, found)
        files += found
        labels += [below.name] * len(found)
    return files, labels


def _none_left_out(below: Path, found: list[Path]) -> None:
    """Refuse files in a class's folder that may be images and are not read."""
    read = {file.name for file in found}
    left = sorted(
        file
        for file in below.iterdir()
        if file.name not in read
        and file.is_file()
        and not file.name.startswith(".")
        and file.suffix.lower() not in _BESIDE
    )
    if left:
        raise DataError(
            f"{below} has {counted(len(left), 'file')} of a kind that is not read.",
            got=f"{left[0].name} beside {counted(len(found), 'image')}",
            expected=f"files that end in {', '.join(_SUFFIXES)}",
            do="convert them, or move them elsewhere",
        )
