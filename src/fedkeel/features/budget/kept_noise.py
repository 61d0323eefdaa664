"""Calibrated noise, kept in a file by those who prepare the same run again and again.

A node prepares its run for every message, in a process of its own, and a calibration takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path

from fedkeel.base.named_files import read_regular
from fedkeel.features.budget.accountant import Kind, Release, calibrated_sigma
from fedkeel.records.files import SEAL, is_intact, parse_json, sealed, write_text
from fedkeel.version import __version__

FILE = "noise.json"

_folder: ContextVar[Path | None] = ContextVar("folder of kept noise", default=None)


@contextmanager
def noise_kept_in(folder: Path) -> Iterator[None]:
    """Keep noise that is calibrated meanwhile in a file of a folder, and take it from there."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def kept_sigma(release: Release, kind: Kind, count: int, epsilon: float, delta: float) -> float:
    """Return `calibrated_sigma`, from the file where it is kept."""
    folder = _folder.get()
    if folder is None:
        return calibrated_sigma(release, kind, count, epsilon, delta)
    facts = [__version__, version("dp-accounting"), *vars(release).values()]
    key = json.dumps([*facts, kind, count, epsilon, delta])
    file = folder / FILE
    kept = _read(file)
    if key not in kept:
        kept[key] = calibrated_sigma(release, kind, count, epsilon, delta)
        with suppress(OSError):  # a node that cannot write it computes it again
            folder.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(sealed(kept)))
    return kept[key]


def _read(file: Path) -> dict[str, float]:
    """Return what a file keeps, nothing where it is absent or damaged."""
    try:
        values = parse_json(read_regular(file))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict) or SEAL not in values or not is_intact(values):
        return {}
    return {key: value for key, value in values.items() if isinstance(value, float)}
