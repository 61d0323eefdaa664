"""A folder of images with one folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedkeel.data.read.formats import read_image, read_image_size
from fedkeel.data.read.identifiers import encode, encode_as
from fedkeel.data.read.images import write_images
from fedkeel.data.read.raw_examples import RawExamples
from fedkeel.errors import DataError, counted

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff")
IGNORED_SUFFIXES = (".csv", ".db", ".html", ".ini", ".json", ".md", ".txt", ".xml", ".yaml", ".yml")
"""What may lie beside images: notes on them, and files that systems leave in every folder."""


def train_and_test_folders(folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of the training images, and that of the test images if there is one.

    Where `folder` holds ``train`` and ``test`` with folders in both, these are the two.
    """
    halves = folder / "train", folder / "test"
    if all(half.is_dir() and any(path.is_dir() for path in half.iterdir()) for half in halves):
        return halves
    return folder, None


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
        [N, C, H, W]: bytes where all images have one size, or else numbers in [0, 1] in `shape`.

    Raises:
        DataError: there are no classes, a class has no images or files of another kind, an image
            cannot be read, or two differ in size and no shape is given.
    """
    files, labels = _list_images(folder)
    if label_names is None:
        y, label_names = encode(np.array(labels))
    else:
        y = encode_as(encode(np.array(labels)), label_names, str(folder))
    sizes = [read_image_size(file) for file in files]
    first = sizes[0]
    other = next(
        (row for row, size in enumerate(sizes) if size.pixels != first.pixels),
        None,
    )
    if other is None:
        channels = max(size.channels for size in sizes)
        x = torch.empty((len(files), channels, *first.pixels), dtype=torch.uint8)
        for row, file in enumerate(files):
            x[row] = torch.from_numpy(read_image(file, channels))
        return RawExamples(x, y, label_names)
    if shape is None:
        both = (
            f"{files[row].relative_to(folder)} ({sizes[row].height} high, {sizes[row].width} wide)"
            for row in (0, other)
        )
        raise DataError(
            f"{folder}: the images differ in size.",
            got=", ".join(both),
            do="set data.shape to (channels, height, width) that all are brought to",
        )
    x = torch.empty((len(files), *shape), dtype=torch.float32)
    for row, (file, size) in enumerate(zip(files, sizes, strict=True)):
        image = torch.from_numpy(np.ascontiguousarray(read_image(file, size.channels)))
        write_images(x[row : row + 1], image[None], str(file))
    return RawExamples(x, y, label_names)


def _list_images(folder: Path) -> tuple[list[Path], list[str]]:
    """Return all image files in the folders of the classes, and the class of each."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and _is_visible(path))
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if not classes:
        raise DataError(
            f"{folder} has no folders in it.",
            expected=f"one folder for each class, with images ({suffixes})",
        )
    images: list[Path] = []
    labels: list[str] = []
    for below in classes:
        files = sorted(path for path in below.iterdir() if _is_visible(path))
        images_here = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        if not images_here:
            raise DataError(
                f"{below} has no images.",
                expected=f"files that end in {suffixes}",
                do="remove the folder if it is not a class",
            )
        known = (*IMAGE_SUFFIXES, *IGNORED_SUFFIXES)
        unknown = [file for file in files if file.is_file() and file.suffix.lower() not in known]
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


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".")
