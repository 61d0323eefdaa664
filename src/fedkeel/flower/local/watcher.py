"""Ends the processes of a federation when the one that started them is gone, however it ended.

python watcher.py MARK, with a pipe from that process as standard input. When the pipe closes, all
processes with the mark in their environment are killed. Where the system does not show it, those
process groups are killed whose ids came through the pipe: `+123` adds one, `-123` takes one away.

Nothing but the standard library is imported, so it starts at once and takes little memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NAME = "FEDKEEL_PROCESS"
"""Environment variable that says to which federation a process belongs. Its helpers inherit it."""

QUIET_SECONDS = 1.0
"""How long no marked process is seen before all count as ended: one may just start another."""


class Watcher:
    """A watcher of this process, as a process of its own.

    Args:
        mark: what the marks of the federation's processes begin with.
    """

    def __init__(self, mark: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__, mark],
            env={name: value for name, value in os.environ.items() if name != NAME},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process's group does not end it
        )

    def outlive_exec(self) -> None:
        """Watch also the program that this process is going to become."""
        if self._process.stdin is not None:
            os.set_inheritable(self._process.stdin.fileno(), True)

    def watch(self, group: int) -> None:
        """Let it end a process group."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """Make it forget a process group, which has ended: another group may get its number."""
        self._tell(f"-{group}")

    def end(self) -> None:
        """End it, when there is nothing left that it would have to end."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # somebody has killed the watcher
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def find(mark: str, is_whole: bool = True, command: str = "") -> list[int]:
    """Return the ids of marked processes, where the system shows their environment (Linux).

    Elsewhere nothing is found, and Flower's helpers end by themselves when they see that their
    parent is gone.

    Args:
        mark: the mark.
        is_whole: whether it is the whole mark, and not the beginning of it.
        command: only those with this text in their command line.
    """
    variable, pids = f"{NAME}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            line = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_ours = variable in variables or (
                not is_whole and any(item.startswith(variable) for item in variables)
            )
            if is_ours and command.encode() in line:
                pids.append(int(folder.name))
    return pids


def main(mark: str) -> None:
    """Wait until the pipe closes, then end what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    if not Path("/proc/self/environ").exists():
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return
    quiet_since = time.monotonic()
    while time.monotonic() < quiet_since + QUIET_SECONDS:
        for pid in find(mark, is_whole=False):
            quiet_since = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
