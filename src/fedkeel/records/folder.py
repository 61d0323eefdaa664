"""The run folder and its checkpoint.

    runs/NAME/
      config.toml     resolved settings: running it again repeats the run
      run.json        what ran: method, citations, data, model, environment, engine, status
      rounds.jsonl    one row a round
      model.safetensors  the trained model, once the run is finished: the module's whole state dict
      model-best.safetensors  the model of the best round, which run.json names
      checkpoint/     round-00000120/: arrays.safetensors and state.json, written aside and
                      renamed
      state/          clients.bin: client state, where it lives on disk. The checkpoint says which
                      row is whose. Gone when the run is finished
      report.html     written by the report
      .lock           held by the process at work on the run; empty

Nothing is pickled. A file is written under another name, synchronised and renamed, so that a kill
at any moment leaves either the old file or the new one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from fedkeel.errors import RunError
from fedkeel.records.lock import locked
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import FORMAT, RunRecord, to_json

Arrays = dict[str, NDArray[Any]]

MODEL = "model.safetensors"
"""File in a run folder with the trained model."""

BEST_MODEL = "model-best.safetensors"
"""File in a run folder with the model of the round that run.json names as `best_model`."""

_OUTPUTS = ("rounds.jsonl", "checkpoint", "state", "report.html")
"""What a run writes beside run.json and config.toml before it is finished."""

_START_AGAIN = "take it from a copy, or delete {} to run again from the start"

ANOTHER = "choose another folder (--out; out=... in Python and in 'flwr run -c')"
"""What to do where a folder cannot be used."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Args:
        round: rounds completed.
        arrays: named arrays: parameters, buffers, server state, client state.
        state: plain values besides.
    """

    round: int
    arrays: Arrays
    state: dict[str, Any]


class RunFolder:
    """A run on disk.

    Args:
        path: the folder; it is created by `start`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def state(self) -> Path:
        """The folder of client state, where that lives on disk."""
        return self.path / "state"

    def exists(self) -> bool:
        """Return whether the folder holds a run."""
        return (self.path / "run.json").exists()

    def common(self) -> str:
        """Return a digest of what all runs of one comparison have in common.

        These are the settings that decide numbers, but for method and seed, and what run.json says
        of version, model and data, which settings name at most; "" where it cannot be read.
        """
        settings = {k: v for k, v in self.deciding().items() if k not in ("method", "seed")}
        try:
            content = self.read_run().content()
        except RunError:
            return ""
        text = json.dumps([settings, content], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide numbers, by dotted key; none where there is no file."""
        try:
            return deciding((self.path / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def check_free(self, config: str) -> None:
        """Check that a run with these settings can begin here.

        Raises:
            RunError: the folder holds files that are not of a run and that this one would write
                over, or cannot be read.
        """
        try:
            names = [name for name in _OUTPUTS if (self.path / name).exists()]
            same = self.path / "config.toml"  # a start that was killed leaves the same one
            if same.exists() and same.read_bytes() != config.encode():
                names.append(same.name)
        except OSError as error:
            raise self._refused(error) from None
        if names:
            raise RunError(
                f"{self.path} holds files that this run would write over.",
                got=", ".join(names),
                do=ANOTHER,
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder, so that no other process or thread writes into it.

        The folder is made where there is none.

        Raises:
            RunError: it cannot be made or written to, or another process, or thread, is writing
                into it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except BlockingIOError as error:
                raise RunError(
                    f"{self.path} is being written by another {error.strerror}.",
                    do=f"wait until it ends, or {ANOTHER}",
                ) from None
            except OSError as error:
                raise self._refused(error) from None
            yield

    def clear(self) -> None:
        """Remove what a run has left that failed at once; run.json stays until the next one's.

        Raises:
            RunError: it cannot be written to.
        """
        if not self.exists():
            return
        try:
            for name in (*_OUTPUTS, MODEL, BEST_MODEL):
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(error) from None

    def start(self, record: RunRecord, config: str) -> None:
        """Write what will run into the folder.

        Raises:
            RunError: it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / "config.toml", config)
            self._write_run(record)
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> RunError:
        what = f"{self.path} cannot be written to."
        return RunError(what, got=error, do=ANOTHER)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the disk in the middle of a run into an error of the run."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{self.path} cannot be written to.",
                got=error,
                do="see that the disk has room, then go on with --resume (in Python resume=True)",
            ) from error

    def write_run(self, record: RunRecord) -> None:
        """Write run.json.

        Raises:
            RunError: the disk fails, or is full; so do the others that write.
        """
        with self._writing():
            self._write_run(record)

    def _write_run(self, record: RunRecord) -> None:
        write_text(self.path / "run.json", json.dumps(to_json(record), indent=1) + "\n")

    def read_run(self) -> RunRecord:
        """Read run.json.

        Raises:
            RunError: it is missing, damaged, or of another version.
        """
        file = self.path / "run.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{self.path} is not a run folder.", got="no run.json in it") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read.", got=error) from None
        if not isinstance(values, dict):
            raise RunError(f"{file} cannot be read.", got="no JSON object")
        if values.get("format") != FORMAT:
            raise RunError(
                f"{self.path} was written by another version of fedkeel.",
                got=f"format {values.get('format')}",
                expected=f"format {FORMAT}",
                do="run the experiment again, or use the version that wrote it",
            )
        try:
            return RunRecord.from_json(values)
        except RunError as error:
            raise RunError(f"{file} cannot be read.", got=error.got) from None

    def append(self, row: RoundRecord) -> None:
        """Add a row to rounds.jsonl."""
        with self._writing(), (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(row.line())

    def rows(self, limit: int | None = None) -> list[RoundRecord]:
        """Read rounds.jsonl, or its first rows; a last line that a kill cut short is left out."""
        return list(itertools.islice(self._rows(), limit))

    def _rows(self) -> Iterator[RoundRecord]:
        file = self.path / "rounds.jsonl"
        if not file.exists():
            return
        lines = file.read_bytes().splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                row = RoundRecord.from_json(json.loads(line))
            except (ValueError, TypeError, AttributeError):
                if number == len(lines):
                    return
                raise RunError(f"{file} is damaged.", got=f"line {number}") from None
            yield row

    def keep_rows(self, last: int) -> list[RoundRecord]:
        """Drop the rows after round `last`, which a resumed run makes anew; return the others.

        Raises:
            RunError: one of the others is missing or damaged; nothing is written then.
        """
        rows = self.rows_to(last)
        with self._writing():
            write_text(self.path / "rounds.jsonl", "".join(row.line() for row in rows))
        return rows

    def rows_to(self, last: int) -> list[RoundRecord]:
        """Read the rows of rounds 0 to `last`.

        Raises:
            RunError: one of them is missing or damaged.
        """
        file = self.path / "rounds.jsonl"
        rows = [row for row in self._rows() if row.round <= last]
        if [row.round for row in rows] != list(range(last + 1)):
            raise RunError(
                f"{file} lacks rounds of its run.",
                got=f"{len(rows)} rows up to round {last}",
                expected=f"{last + 1}",
                do=_START_AGAIN.format(self.path),
            )
        return rows

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove older ones.

        One of the same round is left as it is: a run has one state after a round, and to take it
        away first would leave a moment without any.
        """
        root = self.path / "checkpoint"
        final = root / f"round-{checkpoint.round:08d}"
        with self._writing():
            root.mkdir(parents=True, exist_ok=True)
            if not final.exists():
                self._write(checkpoint, root / f".{final.name}.{os.getpid()}", final)
                _synchronise(root)
        for old in root.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _write(self, checkpoint: Checkpoint, temporary: Path, final: Path) -> None:
        """Write a checkpoint and rename it once it and the rows are on the disk."""
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _save_arrays(checkpoint.arrays, temporary / "arrays.safetensors")
        state = {"round": checkpoint.round, **checkpoint.state}
        (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
        rows = self.path / "rounds.jsonl"
        for file in [*temporary.iterdir(), *([rows] if rows.exists() else [])]:
            _synchronise(file)
        os.replace(temporary, final)

    def save_model(self, arrays: Arrays, name: str = MODEL) -> None:
        """Write a model."""
        temporary = self.path / f".{name}.{os.getpid()}"
        with self._writing():
            _save_arrays({key: array.copy(order="C") for key, array in arrays.items()}, temporary)
            _synchronise(temporary)
            os.replace(temporary, self.path / name)

    def drop_model(self) -> None:
        """Remove models and checkpoint of a run of which only the rows are needed."""
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)
        for name in (MODEL, BEST_MODEL):
            (self.path / name).unlink(missing_ok=True)

    def load(self) -> Checkpoint | None:
        """Read the newest checkpoint, or None where there is none."""
        saved = sorted((self.path / "checkpoint").glob("round-*"))
        if not saved:
            return None
        try:
            state = json.loads((saved[-1] / "state.json").read_text(encoding="utf-8"))
            arrays = load_file(saved[-1] / "arrays.safetensors")
            return Checkpoint(int(state.pop("round")), arrays, state)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, SafetensorError) as error:
            raise RunError(
                f"{saved[-1]} cannot be read.",
                got=error,
                do=_START_AGAIN.format(self.path),
            ) from None


def deciding(config: str) -> dict[str, Any]:
    """Return the settings of a file that decide numbers, by dotted key.

    Those that do not are the name, how and where it is run, and what a comparison or a search is.
    """
    out: dict[str, Any] = {}

    def add(values: dict[str, Any], before: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                add(value, f"{before}{name}.")
            else:
                out[before + name] = value

    add(tomllib.loads(config), "")
    exact = ("engine.dtype", "engine.precision")
    apart = ("name", "engine.", "flower.", "compare.", "tune.")
    return {k: v for k, v in out.items() if k in exact or not k.startswith(apart)}


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


def _save_arrays(arrays: Arrays, path: Path) -> None:
    """Write a safetensors file that others may read as they may any other: the library's may not.

    The usual mode of a file is what the umask makes of one that is made in the usual way.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path)
    path.chmod(mode)


def _synchronise(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
