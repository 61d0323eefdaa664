"""The folder of a comparison: run folders, and a file that lists them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedkeel.errors import RunError
from fedkeel.records.folder import RunFolder, write_text
from fedkeel.records.rows import RunRecord

INDEX = "comparison.json"
"""File in a comparison's folder that lists its runs."""


def write_index(out: Path, name: str, runs: Sequence[tuple[RunRecord, str]]) -> None:
    """List the runs of a comparison.

    Args:
        out: its folder.
        name: what the experiment is called.
        runs: what ran, and the folder's name, in the order of a table.
    """
    listed = [{"method": r.method, "seed": r.seed, "folder": folder} for r, folder in runs]
    write_text(out / INDEX, json.dumps({"name": name, "runs": listed}, indent=1) + "\n")


def runs_of(path: Path) -> list[Path]:
    """Return the run folders that a path stands for: itself, or those of a comparison.

    Raises:
        RunError: it is neither.
    """
    if RunFolder(path).exists():
        return [path]
    index = path / INDEX
    if not index.exists():
        raise RunError(
            f"{path} holds neither a run nor a comparison.",
            expected=f"a folder with run.json or {INDEX}",
            do="give a folder that `fedkeel run` or `fedkeel compare` wrote",
        )
    try:
        return [path / run["folder"] for run in json.loads(index.read_text("utf-8"))["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{index} cannot be read.", got=repr(error)) from None
