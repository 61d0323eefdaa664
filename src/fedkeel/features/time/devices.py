"""The devices of the clients: how fast each computes, receives and sends."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeel.base.named_files import TABLE_BYTES, expanded, open_regular
from fedkeel.base.rng import generator, generators
from fedkeel.data.dataset import Ints
from fedkeel.data.partition.common import Floats
from fedkeel.errors import ConfigError, DataError
from fedkeel.features.time.settings import System

MEGABIT = 1e6 / 8
"""Bytes of a megabit."""

COLUMNS = ("speed", "mbit_down", "mbit_up")
"""What a file of devices may say of a client."""


@dataclass(frozen=True)
class Devices:
    """The devices of C clients.

    Args:
        speed: [C] how many times as fast as a device of speed 1 each computes.
        down: [C] bytes in a second from the server; infinite where that takes no time.
        up: [C] bytes in a second to the server, likewise.
    """

    speed: Floats
    down: Floats
    up: Floats


def make_devices(settings: System, clients: int, seed: int) -> Devices:
    """Return the devices of a run.

    A class is drawn for each client from the stream (seed, "device class"), its speed from (seed,
    "speed") and both directions of its connection from (seed, "bandwidth"): exp(sigma z) with z
    standard normal, times what the class or the settings say.

    Raises:
        DataError: the file of devices cannot be used.

    >>> make_devices(System(), clients=2, seed=0).speed.tolist()
    [1.0, 1.0]
    """
    speed, down, up = _base(settings, clients, seed)
    if settings.speed == "lognormal":
        speed = speed * np.exp(settings.sigma * generator(seed, "speed").standard_normal(clients))
    factor = np.exp(settings.mbit_sigma * generator(seed, "bandwidth").standard_normal(clients))
    columns = {"speed": speed, "mbit_down": down * factor, "mbit_up": up * factor}
    if settings.devices is not None:
        _read(expanded(settings.devices), columns)
    return Devices(speed, columns["mbit_down"] * MEGABIT, columns["mbit_up"] * MEGABIT)


def _base(settings: System, clients: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """Return speed and connection [C] before they are varied."""
    common = [settings.mbit_down or np.inf, settings.mbit_up or np.inf]
    kinds = list(settings.classes.values())
    if not kinds:
        speed, down, up = (np.full(clients, value) for value in (1.0, *common))
        return speed, down, up
    bounds = np.cumsum([kind.share for kind in kinds])[:-1]
    drawn = np.searchsorted(bounds, generator(seed, "device class").random(clients), side="right")
    table = np.array(
        [[kind.speed, kind.mbit_down or common[0], kind.mbit_up or common[1]] for kind in kinds]
    )
    speed, down, up = table[drawn].T.copy()
    return speed, down, up


def _read(path: Path, columns: dict[str, Floats]) -> None:
    """Write what a file says of clients over what was drawn."""
    count = len(columns["speed"])
    for line, row in read_csv(path, "system.devices"):
        client = number(row, "client", path, line)
        if client != int(client) or not 0 <= client < count:
            raise _wrong(path, line, f"client {row['client']}", f"a number from 0 to {count - 1}")
        for name in COLUMNS:
            if row.get(name):
                value = number(row, name, path, line)
                if not value > 0.0:
                    raise _wrong(path, line, f"{name} {row[name]}", "more than 0")
                columns[name][int(client)] = value


def read_csv(path: Path, setting: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the values of each row of a file that a setting names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open_regular(path, TABLE_BYTES) as opened:
            file = io.TextIOWrapper(opened, encoding="utf-8-sig", newline="")
            yield from enumerate(csv.DictReader(file), start=2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"The file of {setting} cannot be read.", got=error) from None


def number(row: dict[str, str], name: str, path: Path, line: int) -> float:
    """Return a number of a row, or refuse what is not a number."""
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise _wrong(path, line, f"{name} {row.get(name)!r}", "a number") from None
    if not np.isfinite(value):
        raise _wrong(path, line, f"{name} {row[name]}", "a finite number")
    return value


def _wrong(path: Path, line: int, got: str, expected: str) -> DataError:
    return DataError(f"{path}, line {line} cannot be used.", got=got, expected=expected)


def jitter(settings: System, seed: int, round: int, clients: Ints) -> Floats:
    """Return [K] factors of clients' computing time in a round."""
    if not settings.jitter:
        return np.ones(len(clients))
    streams = generators(seed, "jitter", round, clients.tolist())
    drawn = [random.standard_normal() for random in streams]
    return np.asarray(np.exp(settings.jitter * np.array(drawn, dtype=np.float64)))


def files_digest(settings: System) -> dict[str, str]:
    """Return digests of the files that the settings name; "" of one that is not here."""
    digests = {}
    for name in ("devices", "trace"):
        file = getattr(settings, name)
        if file is not None:
            path = expanded(file)
            data = path.read_bytes() if path.is_file() else b""
            digests[name] = hashlib.blake2b(data, digest_size=8).hexdigest() if data else ""
    return digests
