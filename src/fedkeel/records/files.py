"""Files that a kill leaves whole, and digests that tell whether one has changed since."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from fedkeel.base.named_files import open_regular

Arrays = dict[str, NDArray[Any]]

SEAL = "digest"
"""Key of a sealed JSON object that has the digest of all the others."""


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a kill leaves either the old file or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file so that a kill, or a full disk, leaves either the old file or the new one.

    Args:
        path: the file.
        data: its content.
        mode: its permissions; None for those of any new file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_arrays(path: Path, arrays: Arrays) -> str:
    """Write a safetensors file, and return its digest.

    Others may read it as they may any other file; the library's own files they may not. The usual
    mode is what the umask makes of a file that is made in the usual way.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path)
    path.chmod(mode)
    return file_digest(path)


def synchronise(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite_values(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value with NaN and infinities, which JSON has no word for, as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite_values(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_values(v) for v in value]
    if isinstance(value, np.generic):
        return finite_values(value.item())
    return value


# ---- digests ------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, as ``sha256sum`` prints it.

    Raises:
        OSError: it cannot be read, or is a device or a pipe, which may have no end.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_as_written(path: Path, digest: str) -> bool:
    """Return whether a file is there, can be read, and has a digest."""
    try:
        return file_digest(path) == digest
    except OSError:
        return False


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of its values."""
    return {**values, SEAL: _values_digest(values)}


def is_intact(values: Mapping[str, Any]) -> bool:
    """Return whether a sealed object has the values that it was sealed with.

    Versions before 0.2 wrote no digests: what they wrote is taken as it is.
    """
    if SEAL not in values:
        return True
    try:
        digest = _values_digest({k: v for k, v in values.items() if k != SEAL})
    except RecursionError:
        return False
    return bool(values[SEAL] == digest)


def _values_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
