"""Starting, watching and ending child processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from fedkeel.errors import FedkeelError, RunError, TrainingError

StartMethod = Literal["fork", "spawn"]

_PR_SET_PDEATHSIG = 1
"""Number of the option of Linux's prctl: which signal a process gets when its parent ends."""


@cache
def start_method() -> StartMethod:
    """Return how child processes start: forked where that is safe, which pickles nothing.

    It is not safe where torch sees a GPU: neither autograd nor CUDA works in a process that was
    forked from one that has used them.
    """
    on_linux = sys.platform.startswith("linux")
    return "fork" if on_linux and torch.cuda.device_count() == 0 else "spawn"


@dataclass
class ChildProcess:
    """A child process, and this process's end of the pipe to it."""

    process: Any
    pipe: Connection

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        code: int | None = self.process.exitcode
        return code

    def terminate(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def kill(self) -> None:
        """Kill the process; `join` has to follow."""
        self.process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end; close the pipe when it has ended."""
        self.process.join(timeout)
        if not self.process.is_alive():
            self.pipe.close()

    def end(self, patience: float = 0.0) -> None:
        """Close the pipe and wait some seconds for the process to end; kill it if it does not."""
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start_child(
    target: Callable[..., None],
    args: Sequence[Any],
    siblings: Iterable[Connection],
    what: str,
    do: str,
    method: StartMethod | None = None,
) -> ChildProcess:
    """Start a child process that calls `target` with `args` and its end of a new pipe.

    Args:
        target: what the process does.
        args: arguments of `target`, without the pipe.
        siblings: this process's ends of pipes to other children, which a fork inherits. The child
            closes them, so that each pipe ends when this process does.
        what: message of the error where `args` cannot be pickled for a spawned process.
        do: what the user can do about that error.
        method: how the process starts, None for `start_method`.

    Raises:
        RunError: `args` cannot be pickled.
    """
    method = method or start_method()
    context: Any = torch.multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    inherited = [*siblings, ours] if method == "fork" else []
    process = context.Process(
        target=_run_child, args=(target, tuple(args), theirs, inherited), daemon=True
    )
    with warnings.catch_warnings():  # the thread of a progress bar may run; the child ignores it
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise RunError(what, got=str(error).strip().splitlines()[0], do=do) from error
    theirs.close()
    return ChildProcess(process, ours)


def _run_child(
    target: Callable[..., None],
    args: tuple[Any, ...],
    pipe: Connection,
    inherited: Sequence[Connection],
) -> None:
    for connection in inherited:
        connection.close()
    target(*args, pipe)


def exit_reason(code: int | None) -> str | None:
    """Return what usually ends a process with this exit code, None where it is not known."""
    if code == -getattr(signal, "SIGKILL", 9):
        return f"{code} is usually the system's answer to a lack of memory"
    if code == 1:
        return (
            "where processes are spawned, a script's own calls have to stand under "
            "`if __name__ == '__main__':`"
        )
    return None


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends; Linux only.

    Args:
        parent: process id of the parent, which may have ended already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def is_orphaned() -> bool:
    """Return whether the process that started this one has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return False
    return os.getppid() != parent.pid or not parent.is_alive()  # the latter is for Windows


def portable_error(error: FedkeelError) -> FedkeelError:
    """Return an error that can be pickled: its facts as text, its type one of this package."""
    kind = type(error) if type(error).__module__.startswith("fedkeel.") else TrainingError
    facts = {name: getattr(error, name) for name in ("got", "expected", "why", "do")}
    text = {name: None if value is None else str(value) for name, value in facts.items()}
    return kind(error.what, **text, mark=error.mark)
