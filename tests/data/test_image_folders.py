"""Folders of images in other layouts, transparent images, and what must not be decoded."""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.config import Data
from fedkeel.data.read.load import load
from fedkeel.errors import DataError


def save(path: Path, pixels: object, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.array(pixels, dtype=np.uint8))
    (image.convert(mode) if mode else image).save(path)


def images(folder: Path, names: str, count: int = 4) -> None:
    for k, name in enumerate(names.split()):
        for i in range(count):
            save(folder / name / f"{i}.png", [[10 * k + i, 100]])


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load(Data(source=str(folder)))
    assert "remove" not in str(caught.value)
    return str(caught.value)


def settings_in(message: str) -> dict[str, object]:
    """What the message says to set."""
    found = re.findall(r'(data\.source|data\.test) = (\[[^]]*\]|"[^"]*")', message)
    texts = {key.split(".")[1]: re.findall(r'"([^"]*)"', value) for key, value in found}
    return {key: value[0] if len(value) == 1 else tuple(value) for key, value in texts.items()}


def test_training_and_validation_folders(tmp_path: Path) -> None:
    images(tmp_path, "train/a train/b val/a val/b")
    message = refusal(tmp_path)
    train, test = load(Data(**settings_in(message)))
    assert (len(train), len(test), train.label_names) == (8, 8, ("a", "b"))
    images(tmp_path, "test/a test/b", 3)
    train, test = load(Data(source=str(tmp_path)))
    assert (len(train), len(test)) == (8, 6)
    assert train.warnings == (f"{tmp_path}/val is left out: only train and test are read",)


def test_one_folder_for_each_patient(tmp_path: Path) -> None:
    images(tmp_path, "p1/a p1/b p2/a p2/b")
    message = refusal(tmp_path)
    assert 'partition.kind = "source"' in message
    train, test = load(Data(**settings_in(message), test_fraction=0.25))
    assert train.sources == ("p1", "p2")
    assert (len(train), len(test), train.label_names) == (12, 4, ("a", "b"))


def test_one_folder_too_far_up(tmp_path: Path) -> None:
    images(tmp_path, "scans/a scans/b")
    train, _ = load(Data(**settings_in(refusal(tmp_path)), test_fraction=0.25))
    assert (train.sources, train.label_names) == (("scans",), ("a", "b"))


@pytest.mark.parametrize("names", ["a b a/more", "a/images b/images", "a/p1 a/p2 b/p3 b/p4"])
def test_images_below_the_folder_of_a_class(tmp_path: Path, names: str) -> None:
    images(tmp_path, names)
    message = refusal(tmp_path)
    assert "would be left out" in message
    assert f"move them up into {tmp_path}/a" in message


def test_images_beside_the_folders_of_the_classes(tmp_path: Path) -> None:
    images(tmp_path, "a b .")
    message = refusal(tmp_path)
    assert "4 images, such as 0.png" in message


def test_a_folder_without_images_may_be_no_class(tmp_path: Path) -> None:
    images(tmp_path, "a b")
    (tmp_path / "c").mkdir()
    assert "put the images of this class there" in refusal(tmp_path)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    """A black stroke only in the alpha channel was read as a black image."""
    for k, name in enumerate(("left", "right")):
        alpha = [[255 * (k == 0), 128 * (mode in ("RGBA", "LA")), 255 * (k == 1)]]
        rgba = np.dstack([np.zeros((1, 3, 3)), np.array(alpha)]).astype(np.uint8)
        for i in range(2):
            path = tmp_path / name / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            image = Image.fromarray(rgba)
            if mode in ("P", "L"):  # one value stands for what is transparent
                index = Image.fromarray((rgba[..., 3] // 255).astype(np.uint8), mode="L")
                if mode == "P":
                    index = Image.fromarray((rgba[..., 3] // 255).astype(np.uint8), mode="P")
                    index.putpalette([9, 9, 9, 0, 0, 0])
                index.save(path, transparency=0)
            else:
                image.convert(mode).save(path)
    train, _ = load(Data(source=str(tmp_path), test_fraction=0.5))
    stroke = 1 / 255 if mode == "L" else 0.0
    half = 127 / 255 if mode in ("RGBA", "LA") else 1.0
    expected = torch.tensor([[stroke, half, 1.0], [1.0, half, stroke]])
    torch.testing.assert_close(train.x[:, 0, 0], expected)


def test_images_that_are_all_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name / "0.png", [[7, 7]])
    assert "all 2 images are alike" in refusal(tmp_path)


def test_one_size_is_brought_to_a_shape_as_several_sizes_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        for i in range(3):
            save(tmp_path / name / f"{i}.png", rng.integers(0, 256, (9, 7, 3)))
    plain, _ = load(Data(source=str(tmp_path), test_fraction=0.4))
    small, _ = load(Data(source=str(tmp_path), test_fraction=0.4, shape=(1, 4, 3)))
    luma = (plain.x * torch.tensor([0.299, 0.587, 0.114]).reshape(3, 1, 1)).sum(1, keepdim=True)
    resized = torch.nn.functional.interpolate(luma, (4, 3), mode="bilinear", antialias=True)
    assert torch.equal(small.x, resized)


def test_images_of_another_size_in_the_middle_are_brought_to_the_shape(tmp_path: Path) -> None:
    """The first and the last image have the shape already."""
    for name in "ab":
        for i, side in enumerate((8, 10, 8)):
            save(tmp_path / name / f"{i}.png", np.full((side, side), 10 * i + 100 * (name == "b")))
    train, test = load(Data(source=str(tmp_path), shape=(1, 8, 8), test_fraction=0.34))
    x = torch.cat([train.x, test.x])
    assert x.shape == (6, 1, 8, 8)
    assert sorted(x.flatten(1).mean(1).mul(255).round().tolist()) == [0, 10, 20, 100, 110, 120]


def png_header(width: int, height: int) -> bytes:
    """A PNG file that ends after its header."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data = zlib.compress(b"")
    end = b"IDAT" + data
    end = struct.pack(">I", len(data)) + end + struct.pack(">I", zlib.crc32(end))
    return b"\x89PNG\r\n\x1a\n" + chunk + end


@pytest.mark.parametrize("side", [7_500, 12_000, 60_000, 2**31 - 1])
def test_a_large_image_among_small_ones_is_not_decoded(tmp_path: Path, side: int) -> None:
    images(tmp_path, "a b")
    (tmp_path / "b" / "z.png").write_bytes(png_header(side, side))
    with pytest.raises(DataError) as caught:
        load(Data(source=str(tmp_path), shape=(1, 8, 8)))
    assert f"{tmp_path}/b/z.png" in str(caught.value)
    assert "too large" in str(caught.value) or side == 2**31 - 1


def test_images_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    images(tmp_path, "a b")
    with pytest.raises(DataError) as caught:
        load(Data(source=str(tmp_path), shape=(3, 2_000_000, 2_000_000)))
    message = str(caught.value)
    assert "8 images of 2000000 x 2000000 pixels does not fit into memory" in message


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    """It was waited for without end."""
    images(tmp_path, "a b")
    os.mkfifo(tmp_path / "b" / "z.png")
    assert f"{tmp_path}/b/z.png is not a file" in refusal(tmp_path)
    (tmp_path / "b" / "z.png").unlink()
    (tmp_path / "b" / "z.png").symlink_to(tmp_path / "nowhere")
    assert f"{tmp_path}/b/z.png is not a file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n",
        b"II*\0\xff\xff\xff\xff",
        b"BM" + 60 * b"\xff",
    ],
    ids=["a program", "cut TIFF", "odd BMP"],
)
def test_what_is_no_image_is_refused_by_its_name(tmp_path: Path, data: bytes) -> None:
    images(tmp_path, "a b")
    (tmp_path / "b" / "z.png").write_bytes(data)
    assert f"{tmp_path}/b/z.png" in refusal(tmp_path)


def test_damaged_images_are_refused_by_their_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images(tmp_path, "a b")
    for suffix in ("png", "jpg", "bmp", "tif"):
        file = tmp_path / "b" / f"0.{suffix}"
        save(file, rng.integers(0, 256, (8, 8, 3)))
        whole = file.read_bytes()
        for _ in range(15):
            damaged = bytearray(whole)
            for place in rng.integers(0, len(whole), 3):
                damaged[place] = rng.integers(256)
            file.write_bytes(bytes(damaged[: rng.integers(1, len(damaged) + 1)]))
            message = ""
            try:
                load(Data(source=str(tmp_path), shape=(1, 2, 2)))
            except DataError as error:
                message = str(error)
            assert not message or str(file) in message
        file.unlink()
        if suffix == "png":
            save(file, [[9, 9]])
