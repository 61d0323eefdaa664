"""Files that settings name and that have no end are refused at once, with a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fedkeel as fk
from fedkeel.base.named_files import read_regular, read_within
from fedkeel.config import load
from fedkeel.errors import ConfigError, FedkeelError
from fedkeel.features.budget.policy import read_policy
from fedkeel.features.budget.secret import server_seed
from fedkeel.features.time.availability import read_trace
from fedkeel.features.time.devices import make_devices
from toys import deadline


def endless(folder: Path) -> list[str]:
    """A device, a link to one, a pipe that nobody writes to, and a folder."""
    pipe, link = folder / "pipe", folder / "link.csv"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    return ["/dev/zero", str(link), str(pipe), str(folder)]


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    for file in endless(tmp_path):
        private = fk.Privacy(epsilon=1.0, delta=1e-5, key_file=file)
        of_devices = fk.System(devices=file)
        with deadline(30.0):
            for read in (
                lambda private=private: server_seed(0, private),
                lambda of_devices=of_devices: make_devices(of_devices, 3, 0),
                lambda file=file: read_trace(Path(file), 3),
                lambda file=file: read_policy(Path(file)),
            ):
                with pytest.raises(FedkeelError, match="cannot be read") as caught:
                    read()
                assert any(
                    word in str(caught.value) for word in ("a device or a pipe", "directory")
                )
    with deadline(30.0), pytest.raises(ConfigError, match="larger than 16 MiB"):
        load("/dev/zero")


def test_only_so_much_is_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"x" * 100)
    assert read_regular(file, 100) == read_within(file, 100) == b"x" * 100
    for read in (read_regular, read_within):
        with pytest.raises(OSError, match="larger than"):
            read(file, 99)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")
