"""Whether the code that a run folder names may run: that of others needs the user's consent.

A run whose settings name code leaves a mark in its folder. It is made with a key that only this
user of this machine has, of the settings and of the files in which the code was found. So a folder
that came from elsewhere, or whose settings or code lie elsewhere now, has no mark that fits.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedkeel.base.named_code import place_of
from fedkeel.base.named_files import read_regular
from fedkeel.config import Run
from fedkeel.config.code_names import ADDRESS, names_to_trust
from fedkeel.errors import RunError
from fedkeel.records.files import parse_json, write_text

MARK = "made-here.json"
"""File in a run folder by which the user who made the run is known."""

_CONFIG = "config.toml"
_KEY_BYTES = 32


def mark_as_made_here(folder: Path, settings: Run) -> None:
    """Leave the mark in the folder of a run that begins, where its settings name code.

    Without a home folder in which the key can be kept there is no mark: the folder is then as one
    that came from elsewhere.
    """
    names = {name for _, name in names_to_trust(settings)}
    if not names:
        return
    with suppress(OSError):
        key = _key(is_made=True)
        marks = {} if key is None else {name: _mark(key, folder, name) for name in sorted(names)}
        write_text(folder / MARK, json.dumps(marks, indent=1) + "\n")


def check_trusted(folder: Path, names: Iterable[tuple[str, str]], trust: bool) -> None:
    """Refuse to import what a folder names that was not made here, before anything is imported.

    Args:
        folder: the run folder.
        names: the import paths that would be imported, and the address of a cluster, each with the
            key of its setting.
        trust: whether the user has said that the folder is trusted.

    Raises:
        RunError: it is not: says which modules would be imported, and where they were found.
    """
    unknown = {} if trust else {name: key for key, name in names}
    if not unknown:
        return
    untrusted: dict[str, str] = {}
    for name in sorted(unknown):
        is_address = unknown[name] == ADDRESS
        place = place_of(name.partition(":")[0])
        if place.whose in ("nobody", "standard") and not is_address:
            continue  # the name is refused where it is looked up
        if not _is_marked(folder, name):
            untrusted[name] = "a cluster" if is_address else place.file or "memory"
    if untrusted:
        raise RunError(
            f"{folder} names code, and was not made here by you.",
            got=", ".join(
                f"{unknown[name]} = {name!r} in {file}" for name, file in untrusted.items()
            ),
            why="modules would be imported and called"
            + (
                "; what a cluster sends would be unpickled"
                if "a cluster" in untrusted.values()
                else ""
            ),
            do="look at them; if you trust them, add --trust (in Python trust=True)",
        )


def is_made_here(folder: Path, settings: Run) -> bool:
    """Return whether a run folder has a mark that fits for every name of code in its settings."""
    return all(_is_marked(folder, name) for _, name in names_to_trust(settings))


def state_folder() -> Path:
    """Return the folder in which fedkeel keeps what belongs to this user on this machine."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "fedkeel"


def _mark(key: bytes, folder: Path, name: str) -> str:
    """Return the mark of a name: of the settings, and of the file in which its code lies."""
    settings = read_regular(folder / _CONFIG)
    file = place_of(name.partition(":")[0]).file
    text = json.dumps([name, os.path.realpath(file), hashlib.sha256(settings).hexdigest()])
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _is_marked(folder: Path, name: str) -> bool:
    key = _key()
    try:
        return key is not None and hmac.compare_digest(
            _mark(key, folder, name), _marks(folder).get(name, "")
        )
    except OSError:
        return False


def _marks(folder: Path) -> dict[str, str]:
    try:
        values = parse_json(read_regular(folder / MARK))
    except (OSError, ValueError):
        return {}
    items = values.items() if isinstance(values, dict) else ()
    return {name: mark for name, mark in items if isinstance(mark, str) and mark.isascii()}


def _key(is_made: bool = False) -> bytes | None:
    """Return this user's key, None where there is none that only this user can read.

    Args:
        is_made: whether to make one where there is none.
    """
    file = state_folder() / "folder-key"
    try:
        if is_made and not file.exists():
            _make_key(file)
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            key = stream.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):  # the latter where the user has no home
        return None
    is_private = os.name == "nt" or (
        status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    )
    return key if is_private and len(key) == _KEY_BYTES else None


def _make_key(file: Path) -> None:
    """Write a new key; where another process has just done so, its key stays."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
