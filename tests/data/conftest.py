"""Tiny files in the published layouts, and an environment without the user's own data."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def nothing_of_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))


def idx_bytes(array):
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def write_idx():
    """Write an array as an idx file, gzipped where the name ends in .gz."""

    def write(path: Path, array):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = idx_bytes(np.asarray(array))
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    return write


def marked(count, height, width):
    """Images that are black but for one pixel: image i has 255 - i in row i, column 2 i."""
    x = np.zeros((count, height, width), dtype=np.uint8)
    x[np.arange(count), np.arange(count), 2 * np.arange(count)] = 255 - np.arange(count)
    return x


@pytest.fixture
def write_mnist(write_idx):
    """Write 12 training and 4 test images of 28x28 with labels i mod 10 and 9 - i."""

    def write(folder: Path, gz=True, dots=False):
        end = ".gz" if gz else ""
        mark = ".idx" if dots else "-idx"
        write_idx(folder / f"train-images{mark}3-ubyte{end}", marked(12, 28, 28))
        write_idx(folder / f"train-labels{mark}1-ubyte{end}", np.arange(12) % 10)
        write_idx(folder / f"t10k-images{mark}3-ubyte{end}", marked(4, 28, 28))
        write_idx(folder / f"t10k-labels{mark}1-ubyte{end}", 9 - np.arange(4))

    return write
