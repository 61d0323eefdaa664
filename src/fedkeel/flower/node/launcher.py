"""What Flower starts in place of `flwr-clientapp`: see `warm`. It imports next to nothing.

python stand_in.py FOLDER PYTHON ARGUMENT...
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time

WAIT = 60.0
"""Seconds that a resident process may take to begin."""


def main(folder: str, python: str, arguments: list[str]) -> None:
    """Hand the arguments to the resident process of the SuperExec that started this one."""
    here, parent = os.getcwd(), os.getppid()
    request = {"arguments": arguments, "environment": dict(os.environ), "folder": here}
    os.chdir(folder)  # paths of sockets may only be short
    found = _connected(f"{parent}.sock") or _started(python, parent)
    if found is not None:
        with found:
            data = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(found, [data], [1, 2])
            found.sendall(data[sent:])
            return
    os.chdir(here)
    places = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(p for p in places if os.path.realpath(p) != folder)
    os.execvp("flwr-clientapp", ["flwr-clientapp", *arguments])


def _connected(name: str) -> socket.socket | None:
    one = socket.socket(socket.AF_UNIX)
    try:
        one.connect(name)
    except OSError:
        one.close()
        return None
    return one


def _started(python: str, parent: int) -> socket.socket | None:
    """Start the resident process and wait until it answers, None where it does not.

    On a slow machine Flower starts another stand-in meanwhile, which waits for the same process: it
    holds a lock for as long as it lives.
    """
    lock = os.open(f"{parent}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        pid = _begun(python, parent, lock) if _locked(lock) else None
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = _connected(f"{parent}.sock")
            if found is not None:
                return found
            if os.waitpid(pid, os.WNOHANG)[0] if pid else _locked(lock):
                return None
            time.sleep(0.02)
        return None
    finally:
        os.close(lock)


def _begun(python: str, parent: int, lock: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.set_inheritable(lock, True)
            os.execv(python, [python, "-P", "-m", "fedkeel.flower.node.resident", ".", str(parent)])
        finally:
            os._exit(127)
    return pid


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


if __name__ == "__main__":
    main(os.path.realpath(sys.argv[1]), sys.argv[2], sys.argv[3:])
