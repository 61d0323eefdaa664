"""What a node keeps to for an app that it has joined for secure sums: it sends nothing else for it.

A run is submitted with settings that change those of the app's file, and an app may be sent anew.
So a node writes down, before its first answer, that it has joined an app for sums, and in which
it takes part. It refuses whatever asks for less.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path

from fedkeel.config import Experiment, Flower
from fedkeel.errors import RunError
from fedkeel.features.budget.feature import privacy_of
from fedkeel.features.budget.policy import PolicyError
from fedkeel.features.secure.participant import MIN_PARTICIPANTS
from fedkeel.records.files import SEAL, is_intact, parse_json, sealed, synchronise, write_bytes

FILE = "sums-only-{}.json"
"""File in a node's folder for an app that it has joined for secure sums, by a digest of its name.
"""


def app_name(file: Path) -> str:
    """Return the name of a Flower app by its experiment file: publisher and name, as Flower has it.

    Its version is not part of it: a new version is the same app. Without the app's
    ``pyproject.toml`` it is the path of the file.

    Args:
        file: the experiment, in the app's folder or in a package there.
    """
    for folder in list(file.absolute().parents)[:2]:
        try:
            values = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            return f"{values['tool']['flwr']['app']['publisher']}/{values['project']['name']}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return str(file.absolute())


def check_sums_only(folder: Path, app: str, installed: Experiment, sent: Experiment) -> None:
    """Refuse a run that asks for more than sums of an app that promises, or has promised, sums.

    Args:
        folder: the node's folder.
        app: the app's name.
        installed: the experiment in the app's file.
        sent: the same with the settings of the run that was submitted.

    Raises:
        PolicyError: it asks for single updates, for smaller sums, or for less noise.
        RunError: the promise cannot be read, so nothing is answered.
    """
    file = _file(folder, app)
    promised = max(_read(file), _minimum(installed.flower))
    if promised:
        _check_sums(app, file, promised, sent.flower)
        _check_noise(installed, sent)


def promise_sums(folder: Path, app: str, sent: Experiment) -> None:
    """Promise the sums of a run that the node is going to answer, on the disk before this returns.

    Args:
        folder: the node's folder.
        app: the app's name.
        sent: the experiment of the run.

    Raises:
        RunError: the promise cannot be read or written, so nothing is answered.
    """
    file, nodes = _file(folder, app), _minimum(sent.flower)
    if nodes > _read(file):
        _write(file, app, nodes)


def _file(folder: Path, app: str) -> Path:
    return folder / FILE.format(hashlib.sha256(app.encode()).hexdigest()[:16])


def _minimum(flower: Flower) -> int:
    """Return how many nodes a sum has at least, 0 where single updates may be sent."""
    return max(flower.secure_minimum or 0, MIN_PARTICIPANTS) if flower.secure_aggregation else 0


def _check_sums(app: str, file: Path, promised: int, sent: Flower) -> None:
    if _minimum(sent) >= promised:
        return
    raise PolicyError(
        f"This node takes part in {app:.80} for secure sums, and sends nothing else for it.",
        got=f"sums of {_minimum(sent)} nodes" if sent.secure_aggregation else "single updates",
        expected=f"sums of {promised} nodes at least",
        why="the app's own file says so, or a run of it that this node has joined",
        do=f"submit the run with secure_aggregation = true, secure_minimum = {promised}; or, if "
        f"the site agrees to less, change the app's file and remove {file}",
    )


def _check_noise(installed: Experiment, sent: Experiment) -> None:
    """Refuse settings that take away the noise that the app's own file adds to the sums."""
    before, now = privacy_of(installed), privacy_of(sent)
    if before is None:
        return
    is_kept = (
        now is not None
        and now.unit == before.unit
        and now.epsilon <= before.epsilon
        and now.delta <= before.delta
    )
    if not is_kept:
        raise PolicyError(
            "The settings of this run take away privacy that the app's own file promises.",
            got="no [privacy]"
            if now is None
            else f"unit {now.unit!r}, epsilon {now.epsilon:g}, delta {now.delta:g}",
            expected=f"unit {before.unit!r}, epsilon {before.epsilon:g}, delta {before.delta:g}",
            do="change the app's own file, and send it to the nodes",
        )


def _read(file: Path) -> int:
    """Return the smallest sum that the node has promised to take part in, 0 for no promise."""
    try:
        values = parse_json(file.read_bytes())
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise _unusable(file, "read", error) from None
    if not isinstance(values, dict) or SEAL not in values or not is_intact(values):
        raise _unusable(file, "read", "it is not as it was written")
    return max(int(values.get("nodes", MIN_PARTICIPANTS)), MIN_PARTICIPANTS)


def _write(file: Path, app: str, nodes: int) -> None:
    text = json.dumps(sealed({"app": app, "nodes": nodes}), indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode(), mode=0o600)
        synchronise(file.parent)
    except OSError as error:
        raise _unusable(file, "written", error.strerror) from None


def _unusable(file: Path, verb: str, reason: object) -> RunError:
    return RunError(
        f"What this node has promised to an app cannot be {verb}.",
        got=f"{file}: {reason}",
        why="without it a server could ask for single updates later, so nothing is answered",
        do="see that the node's disk has space and that the node may write to it",
    )
