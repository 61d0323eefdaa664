"""The command, as a process that can be killed and as a call that is quick.

A process comes from a fork server that has imported everything once: it begins at once, and is in
all else what `fedkeel` in a shell is.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from fedkeel.cli import main
from fedkeel.features.progress.display import PREPARING
from toys import eventually

EXECUTABLE = Path(sys.executable).parent / "fedkeel"

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["commands", "fedkeel.runner.start", "fedkeel.study.compare", "fedkeel.report.page"]
)


@dataclass
class Done:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error after the line that says that a run is being prepared."""
        return self.err.removeprefix(f"{PREPARING}\n")

    @property
    def json(self) -> Any:
        """Standard output, which has to be one JSON document."""
        return json.loads(self.out)


class Process:
    """A command that runs."""

    def __init__(self, *words: object, folder: Path) -> None:
        self._out, self._err = (Path(tempfile.mkstemp(dir=folder)[1]) for _ in range(2))
        files = (str(self._out), str(self._err))
        argv = [str(word) for word in words]
        self._process: BaseProcess = _server.Process(target=_serve, args=(argv, folder, files))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> Done:
        """Wait until it ends; one that does not is killed, and the test fails."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"still running after {seconds} s: {self._err.read_text()}")
        code = self._process.exitcode
        assert code is not None
        done = Done(code, self._out.read_text(), self._err.read_text())
        self._out.unlink()
        self._err.unlink()
        return done


def _serve(argv: list[str], folder: Path, files: tuple[str, str]) -> None:
    os.chdir(folder)
    for number, file in zip((1, 2), files, strict=True):
        handle = os.open(file, os.O_WRONLY)
        os.dup2(handle, number)
        os.close(handle)
    sys.argv = ["fedkeel", *argv]
    main()


def run(*words: object, folder: Path, seconds: float = 60.0) -> Done:
    """Run a command as a process of its own, to its end."""
    return Process(*words, folder=folder).wait(seconds)


def shell(*words: object, folder: Path, seconds: float = 90.0) -> Done:
    """Run the installed executable, as a shell does."""
    command = [str(EXECUTABLE), *map(str, words)]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
    )
    return Done(found.returncode, found.stdout, found.stderr)


def call(*words: object, encoding: str = "utf-8") -> Done:
    """Call the command within this process, in the current folder: the quickest.

    Standard output and error are in an encoding, as Python makes them by PYTHONIOENCODING.
    """
    out, before = io.TextIOWrapper(io.BytesIO(), encoding), sys.argv
    err = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace")
    sys.argv = ["fedkeel", *map(str, words)]
    code: object = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    for stream in (out, err):
        stream.seek(0)
    return Done(code if isinstance(code, int) else 0, out.read(), err.read())


def rows(out: Path) -> int:
    """How many whole rows a run has written."""
    file = out / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_rows(out: Path, count: int, seconds: float = 30.0) -> None:
    """Wait until a run has written so many rows."""
    assert eventually(lambda: rows(out) >= count, seconds), f"{rows(out)} rows in time"


EXPERIMENT = """\
name = "toy"
rounds = 4
method = "fedavg"

[data]
source = "toy.npz"

[partition]
kind = "dirichlet"
clients = 12
alpha = 0.3
min_size = 4

[model]
name = "mlp"

[model.args]
hidden = [8]

[local]
lr = 0.05
epochs = 2
batch_size = 8

[cohort]
clients = 5

[evaluation]
target = 0.5

[engine]
kind = "sequential"
checkpoint_seconds = 0.0
"""


def experiment(folder: Path, text: str = EXPERIMENT) -> Path:
    """Write a small experiment and its data into a folder."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, size=400)
    centres = random.normal(size=(4, 6)) * 2
    inputs = (centres[labels] + random.normal(size=(400, 6))).astype(np.float32)
    np.savez(folder / "toy.npz", x=inputs, y=labels)
    file = folder / "toy.toml"
    file.write_text(text)
    return file
