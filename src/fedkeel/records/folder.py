"""The run folder and its checkpoint.

    runs/NAME/
      config.toml     resolved settings: running it again repeats the run
      run.json        what ran: method, citations, data, model, environment, engine, status
      rounds.jsonl    one row a round
      histogram.safetensors  examples by client and class, where they are many: for each pair that
                      occurs its `client`, `label` and `count`; `shape` is [clients, classes]
      pictures.safetensors  counts of what the last model answers on the test set, for the report:
                      `confusion` by true and predicted class; `probabilities` by bin and truth;
                      `quantities` by bin of the true and the predicted value, in their `range`
      model.safetensors  the trained model, once the run is finished: the module's whole state dict
      models/CLIENT.safetensors  each client's own model, where it has one
      model-best.safetensors  the model of the best round, which run.json names
      checkpoint/     round-00000120/: arrays.safetensors and state.json, written aside and
                      renamed
      state/          clients.bin: client state, where it lives on disk. The checkpoint says which
                      row is whose. Gone when the run is finished
      sums/           secure sums of a federation that no checkpoint holds yet
      made-here.json  a mark of the user who made the run, where its settings name code
      report.html     written by the report
    track.json      what each tracker calls the run, where it reports to one
    tensorboard/    event files, where it reports to TensorBoard

Nothing is pickled. A file is written under another name, synchronised and renamed, so that a kill
at any moment leaves either the old file or the new one. The process at work on the run locks the
folder. Digests tell whether a file has changed since it was written: those of a checkpoint stand in
its state.json, those of a finished run in run.json, and each of the two has one of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedkeel.base.feature import declarations
from fedkeel.base.named_files import RECORD_BYTES, expanded, read_regular
from fedkeel.errors import RunError, nearest
from fedkeel.records.checkpoint import Checkpoint, checkpoints, read_checkpoint, write_checkpoint
from fedkeel.records.client_models import CLIENT_MODELS
from fedkeel.records.files import (
    Arrays,
    file_digest,
    is_as_written,
    is_intact,
    parse_json,
    sealed,
    synchronise,
    write_arrays,
    write_text,
)
from fedkeel.records.histogram import HISTOGRAM, Histogram
from fedkeel.records.lock import FolderLock, locked
from fedkeel.records.pictures import PICTURES, Pictures
from fedkeel.records.row_file import ROWS, RowFile
from fedkeel.records.rows import RoundRecord
from fedkeel.records.run_record import FORMAT, RunRecord, to_json

CONFIG = "config.toml"
"""File in a run folder with the settings of the run."""

RUN = "run.json"
"""File in a run folder with what the run is and what became of it."""

MODEL = "model.safetensors"
"""File in a run folder with the trained model."""

BEST_MODEL = "model-best.safetensors"
"""File in a run folder with the model of the round that run.json names as `best_model`."""

_OUTPUTS = (ROWS, HISTOGRAM, PICTURES, "checkpoint", "state", "sums", "report.html")
"""What a run writes beside run.json and config.toml before it is finished."""

_RECORD_CHANGED = "run.json has changed since it was written"

_START_AGAIN = "take it from a copy, or delete {} to run again from the start"

_Read = TypeVar("_Read")

ANOTHER = "choose another folder (--out; out=... in Python and in 'flwr run -c')"
"""What to do where a folder cannot be used."""


class RunFolder:
    """A run on disk.

    Args:
        path: the folder; it is created by `start`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = expanded(path)
        self._rows = RowFile(self.path / ROWS)
        self._lock: FolderLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def state(self) -> Path:
        """The folder of client state, where that lives on disk."""
        return self.path / "state"

    def holds(self, file: Path) -> bool:
        """Return whether a file is the settings of the run in this folder."""
        return file.name == CONFIG and self.exists()

    def exists(self) -> bool:
        """Return whether the folder holds a run."""
        return os.path.exists(self.path / RUN)  # False for a name that is too long, too

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
            return deciding(read_regular(self.path / CONFIG).decode())
        except (OSError, ValueError):
            return {}

    def settings(self) -> dict[str, Any]:
        """Return the settings with which the run was begun; none where there is no file."""
        try:
            return tomllib.loads(read_regular(self.path / CONFIG).decode())
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
            same = self.path / CONFIG  # a start that was killed leaves the same one
            if same.exists() and read_regular(same) != config.encode():
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
                self._lock = stack.enter_context(locked(self.path))
            except BlockingIOError as error:
                raise RunError(
                    f"{self.path} is being written by another {error.strerror}.",
                    do=f"wait until it ends, or {ANOTHER}",
                ) from None
            except (OSError, ValueError) as error:  # a ValueError for a name that cannot be one
                raise self._refused(error) from None
            try:
                yield
            finally:
                self._lock = None

    def clear(self) -> None:
        """Remove what a run has left that failed at once; run.json stays until the next one's.

        Raises:
            RunError: it cannot be written to.
        """
        if not self.exists():
            return
        try:
            self._remove((*_OUTPUTS, MODEL, BEST_MODEL, CLIENT_MODELS))
        except OSError as error:
            raise self._refused(error) from None

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def start(self, record: RunRecord, config: str) -> None:
        """Write what will run into the folder.

        Raises:
            RunError: it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / CONFIG, config)
            self._write_run(record)
        except OSError as error:
            raise self._refused(error) from None

    def start_again(self, record: RunRecord, config: str) -> None:
        """Write that a run goes on to more rounds; its models are those of its end no more.

        A kill in between leaves a run that goes on with the same command.
        """
        with self._writing():
            write_text(self.path / CONFIG, config)
            self._write_run(record)
            self._remove((MODEL, BEST_MODEL, CLIENT_MODELS))

    def _refused(self, error: Exception) -> RunError:
        what = f"{self.path} cannot be written to."
        return RunError(what, got=error, do=ANOTHER)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the disk in the middle of a run into an error of the run.

        Nothing is written where the folder is another one than this process has locked.
        """
        if self._lock is not None and not self._lock.is_ours():
            raise RunError(
                f"{self.path} was deleted or replaced while the run wrote into it.",
                do="run again, and leave the folders of runs that go on as they are",
            )
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
        write_text(self.path / RUN, json.dumps(sealed(to_json(record)), indent=1) + "\n")

    def read_run(self) -> RunRecord:
        """Read run.json.

        Raises:
            RunError: it is missing, damaged, or of another version.
        """
        file, values = self.path / RUN, self._run_values()
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

    def _run_values(self) -> dict[str, Any]:
        """Return what stands in run.json."""
        file = self.path / RUN
        try:
            values = parse_json(read_regular(file, RECORD_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise no_run(self.path) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{file} cannot be read.", got=error) from None
        if not isinstance(values, dict):
            raise RunError(f"{file} cannot be read.", got="no JSON object")
        return values

    def check_record(self) -> None:
        """Check that run.json is as it was written; see `changes`.

        Raises:
            RunError: it is not.
        """
        if not is_intact(self._run_values()):
            raise self._changed(_RECORD_CHANGED)

    def check_results(self, record: RunRecord, rows: Sequence[RoundRecord]) -> None:
        """Check that the record and the rows of a finished run are as it has left them.

        Raises:
            RunError: they are not.
        """
        for change in self.changes(record, rows, models=False):
            raise self._changed(change)

    def _changed(self, change: str) -> RunError:
        return RunError(f"{self.path}: {change}.", do=_START_AGAIN.format(self.path))

    def changes(
        self, record: RunRecord, rows: Sequence[RoundRecord], models: bool = True
    ) -> list[str]:
        """Return what is not as the run has left it, one sentence each.

        Versions before 0.2 wrote no digests: of their runs, only the rows are looked at.

        Args:
            record: what `read_run` returned.
            rows: what `rows` returned.
            models: whether to look at the models and the settings, too, which takes longest.

        Raises:
            RunError: run.json cannot be read.
        """
        out = [] if is_intact(self._run_values()) else [_RECORD_CHANGED]
        for name, digest in record.digests.items():
            file = self.path / name
            if models and not file.exists():
                out.append(f"{name} has been deleted since the run ended")
            elif (name == ROWS or models) and not is_as_written(file, digest):
                out.append(f"{name} has changed since the run ended")
        is_finished = record.status == "finished"
        has_digest = CONFIG in record.digests
        if models and is_finished and not has_digest and not (self.path / CONFIG).exists():
            out.append(f"{CONFIG} has been deleted since the run ended")
        rounds = [row.round for row in rows]
        is_complete = is_finished and not record.message
        last = record.rounds if is_complete else max(rounds, default=-1)
        if len(rounds) != last + 1 or rounds != list(range(last + 1)):
            have = len({round for round in rounds if round <= last})
            out.append(f"{ROWS} holds {have:,} of the rounds 0 to {last:,}")
        return out

    # ---- rows -------------------------------------------------------------------------------

    def append(self, row: RoundRecord) -> None:
        """Add a row to rounds.jsonl."""
        with self._writing():
            self._rows.append(row)

    def rows(self, limit: int | None = None) -> list[RoundRecord]:
        """Read rounds.jsonl, or its first rows; a last line that a kill cut short is left out."""
        return self._rows.read(limit)

    def keep_rows(self, last: int, digest: str = "") -> list[RoundRecord]:
        """Drop what comes after round `last`, which a resumed run makes anew; return other rows.

        Raises:
            RunError: as `rows_to`; nothing is written then.
        """
        rows = self.rows_to(last, digest)
        with self._writing():
            self._rows.write(rows)
            for path in checkpoints(self.path / "checkpoint", after=last):
                shutil.rmtree(path)
        return rows

    def rows_to(self, last: int, digest: str = "") -> list[RoundRecord]:
        """Read the rows of rounds 0 to `last`.

        Args:
            last: the last round.
            digest: digest of these rows; "" where it is not known.

        Raises:
            RunError: one of them is missing, damaged, or not as it was written.
        """
        rows = [row for row in self._rows.read() if row.round <= last]
        if [row.round for row in rows] != list(range(last + 1)):
            raise RunError(
                f"{self._rows.path} lacks rounds of its run.",
                got=f"{len(rows)} rows up to round {last}",
                expected=f"{last + 1}",
                do=_START_AGAIN.format(self.path),
            )
        if digest and digest != self._rows.digest_of(len(rows)):
            raise RunError(
                f"{self._rows.path} has changed since it was written.",
                do=_START_AGAIN.format(self.path),
            )
        return rows

    def complete_rows(self) -> str:
        """Write the rows again where somebody has changed the file; return their digest."""
        with self._writing():
            self._rows.check(content=True)
        return self._rows.digest

    @property
    def rows_were_restored(self) -> bool:
        """Whether somebody changed rounds.jsonl during the run, so that it was written again."""
        return self._rows.was_restored

    # ---- checkpoint and models --------------------------------------------------------------

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove older ones."""
        with self._writing():
            self._rows.check()
            checkpoint = replace(checkpoint, rows=self._rows.digest)
            write_checkpoint(self.path / "checkpoint", checkpoint, self._rows.path)

    def load(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole, or None where there is none.

        Raises:
            RunError: there are checkpoints, and none of them is whole.
        """
        damaged: list[tuple[Path, str]] = []
        for path in checkpoints(self.path / "checkpoint"):
            try:
                saved = read_checkpoint(path)
            except ValueError as error:
                damaged.append((path, str(error)))
                continue
            texts = [f"{path} cannot be read ({why})" for path, why in damaged]
            return replace(saved, damaged="; ".join(texts))
        for path, why in damaged:
            raise RunError(f"{path} cannot be read.", got=why, do=_START_AGAIN.format(self.path))
        return None

    def save_model(self, arrays: Arrays, name: str = MODEL) -> str:
        """Write a model, and return its digest."""
        temporary = self.path / f".{Path(name).name}.{os.getpid()}"
        with self._writing():
            (self.path / name).parent.mkdir(exist_ok=True)
            copies = {key: array.copy(order="C") for key, array in arrays.items()}
            digest = write_arrays(temporary, copies)
            synchronise(temporary)
            os.replace(temporary, self.path / name)
        return digest

    def save_histogram(self, histogram: Histogram) -> None:
        """Write the histogram of the partition."""
        self.save_model(histogram.arrays(), HISTOGRAM)

    def digests_of_inputs(self) -> dict[str, str]:
        """Return the digests of the settings, and of the histogram where it has a file, by name."""
        files = [self.path / name for name in (CONFIG, HISTOGRAM)]
        with self._writing():
            return {file.name: file_digest(file) for file in files if file.exists()}

    def histogram(self) -> Histogram | None:
        """Read the histogram of the partition, or None where it has no file of its own.

        Raises:
            RunError: it is damaged.
        """
        return self._read_arrays(HISTOGRAM, Histogram.of_arrays)

    def save_pictures(self, pictures: Pictures) -> str:
        """Write the counts for the pictures of a report, and return their digest."""
        return self.save_model(pictures.arrays(), PICTURES)

    def pictures(self) -> Pictures | None:
        """Read the counts for the pictures of a report, or None where there are none.

        Raises:
            RunError: they are damaged.
        """
        return self._read_arrays(PICTURES, Pictures.of_arrays)

    def _read_arrays(self, name: str, read: Callable[[dict[str, Any]], _Read]) -> _Read | None:
        file = self.path / name
        if not file.exists():
            return None
        try:
            return read(load_file(file))
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise RunError(
                f"{file} cannot be read.", got=error, do="delete it: it is only for the report"
            ) from None

    def drop_model(self) -> None:
        """Remove models and checkpoint of a run of which only the rows are needed.

        The record then has no digests of them, so that nobody is told that they were deleted.
        """
        record = self.read_run()
        models = (MODEL, BEST_MODEL, f"{CLIENT_MODELS}/")
        kept = {name: d for name, d in record.digests.items() if not name.startswith(models)}
        with self._writing():
            self._write_run(replace(record, digests=kept))
            self._remove(("checkpoint", MODEL, BEST_MODEL, CLIENT_MODELS))


def deciding(config: str) -> dict[str, Any]:
    """Return the settings of a file that decide numbers, by dotted key.

    Those that do not are the name, how and where it is run, what a comparison or a search is, and
    the tables of features that change no number.
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
    tables = [table for table, kind in declarations().items() if not kind.decides_numbers]
    others = (f"{table}." for table in ("engine", "flower", "compare", "tune", *tables))
    apart = ("name", *others)
    return {k: v for k, v in out.items() if k in exact or not k.startswith(apart)}


def no_run(path: Path, others: Sequence[str] = ()) -> RunError:
    """Return what to say of a path that is no run folder, with the folder that may be meant.

    Args:
        path: the path.
        others: names of files; a folder with one of them may be meant too.
    """
    what = f"{path} is not a run folder."
    if os.path.isfile(path):
        run = "run it first, and give the folder that `fedkeel run` names"
        do = run if path.suffix == ".toml" else "give the folder in which this file is"
        return RunError(what, got="a file", expected="a folder with run.json", do=do)
    if not os.path.lexists(path):
        return RunError(f"There is no folder {path}.", do=_runs_beside(path, others))
    below = [entry.name for entry in sorted(path.iterdir()) if RunFolder(entry).exists()]
    if below:
        runs = f"{len(below)} runs" if len(below) > 1 else "a run"
        return RunError(what, got=f"a folder of {runs}", do=f"give one: {path / below[0]}")
    return RunError(what, got="no run.json in it", do="give a folder that `fedkeel run` wrote")


def _runs_beside(path: Path, others: Sequence[str]) -> str:
    """Return which runs, or folders with other files, are where a path should be."""
    parent, marks = path.parent, (RUN, *others)
    names = []
    if os.path.isdir(parent):
        names = [e.name for e in parent.iterdir() if any(os.path.exists(e / m) for m in marks)]
    if not names:
        return "check the path; `fedkeel run` says at its end where the run is"
    close = nearest(path.name, names)
    if close is not None:
        return f"did you mean {parent / close}?"
    return f"runs in {parent}: {', '.join(sorted(names)[:12])}"
