"""Readers of image files, one by one and by lists.

The size is taken from the header before anything is decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedkeel.data.dataset import Ints
from fedkeel.data.read.formats import Pixels, unreadable_file
from fedkeel.errors import DataError, first_line

MAX_PIXELS = 50_000_000
"""Pixels of the largest image that is read. It takes about 1 GB while it is brought to a shape."""

_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""What a file may be, whatever its suffix says. Others call programs, or are not images."""

_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "RGB": 3, "RGBA": 3, "CMYK": 3, "YCbCr": 3}
"""Pillow's modes that are read, and the number of channels that they become."""


class ImageSize(NamedTuple):
    """The size of an image."""

    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width


def read_image_size(path: Path) -> ImageSize:
    """Return the size of an image file, reading its header only.

    Raises:
        DataError: not an image, one that is neither 8-bit grey nor colour, or one of several pages.
    """
    with _opened(path) as image:
        return _checked_size(path, image)


def _checked_size(path: object, image: Any) -> ImageSize:  # noqa: ANN401 - no types of Pillow here
    """Return the size of an image that is open, and refuse one that is not read."""
    mode, (width, height) = image.mode, image.size
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{path} is too large.",
            got=f"{width:,} x {height:,} pixels",
            expected=f"at most {MAX_PIXELS / 1e6:.0f} megapixels",
            why="an image is decoded as a whole before it is brought to data.shape",
            do="make it smaller, e.g. with Pillow image.thumbnail((1024, 1024)), or cut it up",
        )
    if mode not in _CHANNELS:
        raise DataError(
            f"{path} has a kind of pixel that is not read.",
            got=f"Pillow's mode {mode!r}",
            expected="8-bit grey or colour",
            do="convert the images to 8 bits, or give their numbers: an .npz file, or arrays",
        )
    if pages > 1:
        raise DataError(
            f"{path} holds several images.",
            got=f"{pages} pages",
            expected="one image in a file",
            do="write each page into a file of its own, or all into an .npz file",
        )
    return ImageSize(_CHANNELS[mode], height, width)


def read_image(path: Path, channels: int) -> Pixels:
    """Read an image file.

    Args:
        path: the file.
        channels: 1 for grey or 3 for red, green, blue.

    Returns:
        [channels, H, W] bytes; what is transparent is laid on white.

    Raises:
        DataError: not an image, or cut short.
    """
    with _opened(path) as image:
        return image_pixels(image, str(path), channels)


def image_pixels(image: Any, name: str, channels: int | None = None) -> Pixels:  # noqa: ANN401
    """Return the pixels of an image of Pillow, as those of a file are read.

    Args:
        image: the image.
        name: what to call it in messages.
        channels: 1 for grey or 3 for red, green, blue; None takes what the image has.

    Returns:
        [channels, H, W] bytes; what is transparent is laid on white.

    Raises:
        DataError: as in `read_image_size`.
    """
    from PIL import Image

    size = _checked_size(name, image)
    channels = channels or size.channels
    is_transparent = image.has_transparency_data
    full = image.convert("RGBA") if is_transparent or image.mode == "P" else image
    if is_transparent:
        full = Image.alpha_composite(Image.new("RGBA", image.size, "white"), full)
    pixels = np.array(full.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


@cache
def _known_formats() -> tuple[str, ...]:
    """Return those of the formats that this installation of Pillow reads."""
    from PIL import Image

    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an image of a known kind; turn what a damaged one raises, here or later, into words."""
    from PIL import Image

    if not path.is_file():
        raise DataError(
            f"{path} is not a file.",
            got="a named pipe, a device, or a link to nothing" if not path.is_dir() else "a folder",
            expected="an image",
            do="move it elsewhere",
        )
    try:
        with warnings.catch_warnings():  # the size is checked by its reader
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=_known_formats()) as image:
                yield image
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} is too large.", got=first_line(error)) from None
    except Exception as error:  # Pillow raises nearly anything at a damaged file
        raise unreadable_file(path, first_line(error), "an image") from None


def read_listed_images(folder: Path, listing: Path) -> tuple[Pixels, Ints]:
    """Read colour images that a text file lists with their labels: ``name label`` in each line.

    Returns:
        [N, 3, H, W] bytes, and [N] labels.

    Raises:
        DataError: a line is something else, an image cannot be read, or two differ in size.
    """
    files: list[tuple[Path, int]] = []
    for row, line in enumerate(listing.read_text(encoding="utf-8").splitlines()):
        words = line.split()
        if len(words) != 2 or not words[1].isdigit():
            raise unreadable_file(listing, f"{line[:60]!r} in line {row + 1}", "'name label'")
        files.append((folder / words[0], int(words[1])))
    if not files:
        raise unreadable_file(listing, "no examples")
    return _read_images(files, (3, *read_image(files[0][0], channels=3).shape[1:]))


def read_tiny_imagenet(
    listing: Path, annotations: Path
) -> tuple[tuple[Pixels, Ints], tuple[Pixels, Ints]]:
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
    label_of = {name: label for label, name in enumerate(classes)}
    train: list[tuple[Path, int]] = []
    for name, label in label_of.items():
        folder = listing.parent / "train" / name / "images"
        paths = sorted(folder.glob("*.JPEG"))
        if not paths:
            raise unreadable_file(listing, f"no images in {folder}", f"images of class {name}")
        train += [(path, label) for path in paths]
    validation: list[tuple[Path, int]] = []
    for row, line in enumerate(annotations.read_text(encoding="utf-8").splitlines()):
        words = line.split()
        if len(words) < 2 or words[1] not in label_of:
            got = f"{line[:60]!r} in line {row + 1}"
            raise unreadable_file(annotations, got, "'name class box'")
        validation.append((annotations.parent / "images" / words[0], label_of[words[1]]))
    return _read_images(train, (3, 64, 64)), _read_images(validation, (3, 64, 64))


def _read_images(
    files: Sequence[tuple[Path, int]], shape: tuple[int, int, int]
) -> tuple[Pixels, Ints]:
    """Read image files of one size."""
    x = np.empty((len(files), *shape), dtype=np.uint8)
    for row, (path, _) in enumerate(files):
        image = read_image(path, channels=shape[0])
        if image.shape != shape:
            raise unreadable_file(path, f"an image of {image.shape}", f"{shape}")
        x[row] = image
    return x, np.array([label for _, label in files], dtype=np.int64)
