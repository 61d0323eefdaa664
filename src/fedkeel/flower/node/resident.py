"""A resident process that answers each message in a fork of itself, to import only once.

Flower starts the program ``flwr-clientapp`` for every message, which takes seconds to import
PyTorch and Flower itself. `launcher` has the same name and comes first in the path. It hands its
arguments to a process that has imported both, and that forks. The fork is what Flower would have
started: it has the same arguments, environment and output, and serves one message. Each SuperExec
has one resident process, which ends with it. Where none can be started, the launcher starts
Flower's own program.

Linux only: elsewhere a fork after such imports is not safe.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

from fedkeel.records.files import write_bytes

PROGRAM = "flwr-clientapp"

FOLDER = Path.home() / ".fedkeel" / "resident"
"""Folder of the launcher and of sockets, for SuperNodes that are started by hand."""

POLL_SECONDS = 0.5
"""Time between looks whether the SuperExec still runs."""

MAX_REQUEST_BYTES = 1 << 20
"""Size of a request: arguments and environment."""


def is_supported() -> bool:
    """Return whether this system allows it."""
    return sys.platform == "linux"


def install(folder: Path) -> None:
    """Write the launcher into a folder that only its owner can use, to be put into the path.

    Args:
        folder: also holds the sockets of the resident processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(stat.S_IRWXU)
    command = [sys.executable, "-IS", str(Path(__file__).with_name("launcher.py")), str(folder)]
    script = f'#!/bin/sh\nexec {shlex.join(command)} {shlex.quote(sys.executable)} "$@"\n'
    write_bytes(folder / PROGRAM, script.encode(), mode=stat.S_IRWXU)


def serve(folder: str, parent: int) -> None:
    """Import everything, and answer launchers for as long as a SuperExec lives.

    Args:
        folder: folder of the socket.
        parent: process id of the SuperExec.
    """
    from flwr.supernode.cli import flwr_clientapp

    import fedkeel.flower.apps
    import fedkeel.flower.node.answer  # noqa: F401

    os.chdir(folder)  # the path of a socket has to be short
    name = f"{parent}.sock"
    temporary = f".{name}.{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(temporary)
        listener.listen(16)
        os.replace(temporary, name)  # from here on launchers can connect
        _close_output()
        listener.settimeout(POLL_SECONDS)
        gc.collect()
        gc.freeze()  # forks share these pages
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects forks that have ended
        while _is_running(parent):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                _take_over(connection)
                flwr_clientapp()
                return
            connection.close()
    for file in (name, f"{parent}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(file)


def _close_output() -> None:
    """Close the output of the launcher that started this process: its reader waits for that."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _take_over(connection: socket.socket) -> None:
    """Take over arguments, environment, folder and output of a launcher."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(10.0)
    data, outputs, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
    while not data.endswith(b"\n"):
        more = connection.recv(MAX_REQUEST_BYTES)
        if not more or len(data) > MAX_REQUEST_BYTES:
            raise ConnectionError("a launcher broke off")
        data += more
    connection.close()
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    request = json.loads(data)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [PROGRAM, *request["arguments"]]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
