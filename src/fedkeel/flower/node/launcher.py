"""The program that Flower starts in place of ``flwr-clientapp``, see `resident`.

python launcher.py FOLDER PYTHON ARGUMENT...

It imports almost nothing, so it starts fast.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time

START_SECONDS = 60.0
"""Time that a resident process may take to start."""


def main(folder: str, python: str, arguments: list[str]) -> None:
    """Hand the arguments to the resident process of the SuperExec that started this program."""
    directory, parent = os.getcwd(), os.getppid()
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": directory}
    os.chdir(folder)  # the path of a socket has to be short
    connection = _connect(f"{parent}.sock") or _start(python, parent)
    if connection is not None:
        with connection:
            data = json.dumps(request).encode() + b"\n"
            size = socket.send_fds(connection, [data], [1, 2])
            connection.sendall(data[size:])
            return
    os.chdir(directory)
    folders = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(p for p in folders if os.path.realpath(p) != folder)
    os.execvp("flwr-clientapp", ["flwr-clientapp", *arguments])


def _connect(name: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def _start(python: str, parent: int) -> socket.socket | None:
    """Start the resident process and connect to it; None where it does not start.

    On a slow machine Flower starts another launcher meanwhile, which waits for the same process:
    that process holds a lock for as long as it lives.
    """
    lock = os.open(f"{parent}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        pid = _fork_resident(python, parent, lock) if _try_lock(lock) else None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            connection = _connect(f"{parent}.sock")
            if connection is not None:
                return connection
            if os.waitpid(pid, os.WNOHANG)[0] if pid else _try_lock(lock):
                return None
            time.sleep(0.02)
        return None
    finally:
        os.close(lock)


def _fork_resident(python: str, parent: int, lock: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.set_inheritable(lock, True)
            os.execv(python, [python, "-P", "-m", "fedkeel.flower.node.resident", ".", str(parent)])
        finally:
            os._exit(127)
    return pid


def _try_lock(lock: int) -> bool:
    """Take the lock, and return whether this process may start the resident one."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


if __name__ == "__main__":
    main(os.path.realpath(sys.argv[1]), sys.argv[2], sys.argv[3:])
