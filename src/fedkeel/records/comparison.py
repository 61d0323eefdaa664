"""The folder of a comparison: run folders, and a file that lists them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkeel.base.named_files import read_regular
from fedkeel.errors import RunError
from fedkeel.records.files import parse_json, write_text
from fedkeel.records.folder import RunFolder, no_run
from fedkeel.records.run_record import EngineChoice, to_json

INDEX = "comparison.json"
"""File in a comparison's folder that lists its runs."""


def write_index(out: Path, name: str, folders: Sequence[str], engine: EngineChoice) -> int:
    """List the runs of a comparison, after those that are listed and alike: see `common`.

    Args:
        out: its folder.
        name: what the experiment is called.
        folders: names of the run folders, in the order of a table; one without a run is left out.
        engine: the engine of all of them.

    Returns:
        The number of runs that were listed before and are not any more: they have other settings,
        another model, other data or another version. Of a run whose config.toml is gone, its record
        says so, as in the report.
    """
    before = [folder.name for folder in runs_of(out)] if os.path.exists(out / INDEX) else []
    begun = [folder for folder in folders if RunFolder(out / folder).exists()]
    if not begun:  # after an error before the first run, the index stays
        return 0
    common = {RunFolder(out / folder).common() for folder in begun}
    same = {name for name in before if RunFolder(out / name).common() in common}
    likenesses = {RunFolder(out / name).read_run().likeness() for name in (*same, *begun)}

    def is_alike(name: str) -> bool:
        run = RunFolder(out / name)
        has_lost_settings = run.exists() and not run.deciding()
        return name in same or (has_lost_settings and run.read_run().likeness() in likenesses)

    alike = list(filter(is_alike, before))
    listed: list[dict[str, Any]] = []
    for folder in dict.fromkeys([*alike, *begun]):
        record = RunFolder(out / folder).read_run()
        listed.append({"method": record.method, "seed": record.seed, "folder": folder})
    index = {"name": name, "engine": to_json(engine), "runs": listed}
    write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
    return len(before) - len(alike)


def runs_of(path: Path) -> list[Path]:
    """Return the run folders that a path stands for: itself, or those of a comparison.

    Raises:
        RunError: it is neither.
    """
    if RunFolder(path).exists():
        return [path]
    index = path / INDEX
    if not os.path.exists(index):  # False for a name that is too long, too
        if not os.path.isdir(path):
            raise no_run(path, [INDEX])
        below = _below(path)
        raise RunError(
            f"{path} holds neither a run nor a comparison.",
            expected=f"a folder with run.json or {INDEX}",
            do=f"give what is in it, e.g. {below}"
            if below
            else "give a folder that `fedkeel run` or `fedkeel compare` wrote",
        )
    try:
        return [path / run["folder"] for run in parse_json(read_regular(index))["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{index} cannot be read.", got=repr(error)) from None


def _below(path: Path) -> str:
    """Return which runs or comparisons are one or two folders below, "" where there are none."""
    for depth in ("*", "*/*"):
        comparisons = [p for p in sorted(path.glob(depth)) if (p / INDEX).exists()]
        if comparisons:
            return str(comparisons[0])
        if any(RunFolder(p).exists() for p in path.glob(depth)):
            return f"{path}/{depth}"
    return ""
