"""The files of a checkpoint: written under another name, renamed, and checked when read."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedkeel.base.named_files import ROWS_BYTES, read_regular
from fedkeel.records.files import (
    SEAL,
    Arrays,
    file_digest,
    is_intact,
    parse_json,
    sealed,
    synchronise,
    write_arrays,
)

ARRAYS, STATE = "arrays.safetensors", "state.json"
"""Files of a checkpoint."""

_DIGESTS = "digests"
"""Key in state.json: the digest of the arrays, and of the rows up to this round."""

_ROWS = "rounds.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Args:
        round: rounds completed.
        arrays: named arrays: parameters, buffers, server state, client state.
        state: plain values besides.
        rows: digest of the rows of rounds 0 to `round`; "" where it is not known.
        damaged: what is wrong with a newer checkpoint that this one is taken for; "" mostly.
    """

    round: int
    arrays: Arrays
    state: dict[str, Any]
    rows: str = ""
    damaged: str = ""


def write_checkpoint(root: Path, checkpoint: Checkpoint, rows: Path) -> None:
    """Write a checkpoint, then remove older ones.

    One of the same round is left as it is: a run has one state after a round, and to take it away
    first would leave a moment without any.

    Args:
        root: the folder of checkpoints.
        checkpoint: what is written.
        rows: file of the rows, which has to reach the disk before the checkpoint has its name.
    """
    final = root / _name(checkpoint.round)
    root.mkdir(parents=True, exist_ok=True)
    if not final.exists():
        _write_aside(root / f".{final.name}.{os.getpid()}", final, checkpoint, rows)
        synchronise(root)
    for old in root.iterdir():
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def _name(round: int) -> str:
    return f"round-{round:08d}"


def _write_aside(temporary: Path, final: Path, checkpoint: Checkpoint, rows: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    digests = {ARRAYS: write_arrays(temporary / ARRAYS, checkpoint.arrays), _ROWS: checkpoint.rows}
    state = {"round": checkpoint.round, **checkpoint.state, _DIGESTS: digests}
    (temporary / STATE).write_text(json.dumps(sealed(state)), encoding="utf-8")
    for file in [*temporary.iterdir(), *([rows] if rows.exists() else [])]:
        synchronise(file)
    os.replace(temporary, final)


def checkpoints(root: Path, after: int = -1) -> list[Path]:
    """Return the checkpoints in a folder, the newest first, of rounds after `after`."""
    paths = sorted(root.glob("round-*"), reverse=True)
    return paths if after < 0 else [path for path in paths if path.name > _name(after)]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, and check that its files are as they were written.

    Raises:
        ValueError: they are not, or cannot be read.
    """
    try:
        state = parse_json(read_regular(path / STATE, ROWS_BYTES))
        if not is_intact(state):
            raise ValueError(f"{STATE} has changed since it was written")
        state.pop(SEAL, None)
        digests = state.pop(_DIGESTS, {})
        if digests and file_digest(path / ARRAYS) != digests[ARRAYS]:
            raise ValueError(f"{ARRAYS} has changed since it was written")
        round = int(state.pop("round"))
        if path.name != _name(round):
            raise ValueError(f"{STATE} is of round {round}")
        return Checkpoint(round, load_file(path / ARRAYS), state, digests.get(_ROWS, ""))
    except (OSError, TypeError, AttributeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
