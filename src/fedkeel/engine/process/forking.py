"""Starting, watching and ending child processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import torch

from fedkeel.errors import FedkeelError, RunError, StoppedProcess, TrainingError

StartMethod = Literal["fork", "spawn"]

STOPPED_SECONDS = 5.0
"""A child process that has been stopped for so long is named."""

POLL_SECONDS = 0.2
"""Seconds between two looks for stopped child processes."""

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


@dataclass(eq=False)
class ChildProcess:
    """A child process, and this process's end of the pipe to it."""

    process: Any
    pipe: Connection
    _stopped_at: float | None = None
    _is_named: bool = False

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        code: int | None = self.process.exitcode
        return code

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process; false where the system cannot tell."""
        flags = getattr(os, "WSTOPPED", 0) | getattr(os, "WNOHANG", 0) | getattr(os, "WNOWAIT", 0)
        try:
            stopped = os.waitid(os.P_PID, self.process.pid, flags) is not None
        except (AttributeError, OSError):
            stopped = False
        if not stopped:
            self._stopped_at = None
        return stopped

    def name_stopped(self) -> None:
        """Say once that the process has been stopped for some seconds."""
        now = time.monotonic()
        self._stopped_at = self._stopped_at or now
        if not self._is_named and now - self._stopped_at >= STOPPED_SECONDS:
            self._is_named = True
            pid = self.process.pid
            warnings.warn(
                f"process {pid} is stopped, and the run waits for it: `kill -CONT {pid}` lets it "
                f"go on, `kill -KILL {pid}` lets another do its work",
                StoppedProcess,
                stacklevel=2,
            )

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


def wait_for_children(children: Iterable[ChildProcess], end_stopped: bool) -> list[ChildProcess]:
    """Wait a moment until children have sent something, or have ended; return those.

    One that somebody has stopped (SIGSTOP) is named after some seconds, because it will be waited
    for.

    Args:
        children: whom to wait for.
        end_stopped: whether to kill stopped ones, which no signal that asks for an end reaches.
    """
    by_pipe = {child.pipe: child for child in children}
    ready = wait(by_pipe, POLL_SECONDS)
    for pipe, child in by_pipe.items():
        if pipe not in ready and child.is_stopped():
            child.kill() if end_stopped else child.name_stopped()
    return [by_pipe[pipe] for pipe in ready if isinstance(pipe, Connection)]


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
    parent = os.getpid()
    context: Any = torch.multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    inherited = [*siblings, ours] if method == "fork" else []
    process = context.Process(
        target=_run_child, args=(target, tuple(args), theirs, inherited, parent), daemon=True
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
    parent: int,
) -> None:
    end_with_parent(parent)
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
    """End this process when its parent ends, however busy it is.

    Linux kills it. Elsewhere a thread waits for the end of the parent.

    Args:
        parent: process id of the parent, which may have ended already.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
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
    portable = kind(error.what, **text, mark=error.mark)
    if error.__cause__ is not None:  # such as what a user's function raised
        portable.add_note("".join(traceback.format_exception(error.__cause__)).rstrip())
    return portable
