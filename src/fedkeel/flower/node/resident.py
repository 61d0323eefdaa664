"""A resident process that answers messages by copies of itself, so that each need not import anew.

Flower starts the program `flwr-clientapp` for every message, which takes seconds to import PyTorch
and Flower itself. A stand-in of that name, found first in the path, hands its arguments to a
process that has imported both, and that forks: the copy is what Flower would have started, with the
same arguments, environment and output, and serves one message. One such process belongs to each
SuperExec and ends with it. Where there is none to be had, the stand-in does what Flower would have
done.

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

PROGRAM = "flwr-clientapp"

HOME = Path.home() / ".fedkeel" / "warm"
"""Where the stand-in goes, and sockets, for SuperNodes that are started by hand."""

POLL = 0.5
"""Seconds between looks whether the SuperExec is still there."""

LARGEST = 1 << 20
"""Bytes that a request may have: arguments and environment."""


def possible() -> bool:
    """Return whether this system allows it."""
    return sys.platform == "linux"


def install(folder: Path) -> None:
    """Write the stand-in into a folder that only its owner can use, which then goes into the path.

    Args:
        folder: where to; sockets of the resident processes lie there too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(stat.S_IRWXU)
    words = [sys.executable, "-IS", str(Path(__file__).with_name("client_app.py")), str(folder)]
    text = f'#!/bin/sh\nexec {shlex.join(words)} {shlex.quote(sys.executable)} "$@"\n'
    aside = folder / f".{PROGRAM}.{os.getpid()}"
    aside.write_text(text, encoding="utf-8")
    aside.chmod(stat.S_IRWXU)
    os.replace(aside, folder / PROGRAM)


def serve(folder: str, parent: int) -> None:
    """Import everything, and answer stand-ins for as long as a SuperExec lives.

    Args:
        folder: where the socket goes.
        parent: process id of the SuperExec.
    """
    from flwr.supernode.cli import flwr_clientapp

    import fedkeel.flower.apps  # noqa: F401

    os.chdir(folder)  # paths of sockets may only be short
    name = f"{parent}.sock"
    aside = f".{name}.{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(aside)
        listener.listen(16)
        os.replace(aside, name)  # whoever finds it can connect
        _let_go_of_output()
        listener.settimeout(POLL)
        gc.collect()
        gc.freeze()  # copies share these pages
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects copies that have ended
        while _lives(parent):
            try:
                asked, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                _become(asked)
                flwr_clientapp()
                return
            asked.close()
    for left in (name, f"{parent}.lock"):
        with suppress(FileNotFoundError):
            os.unlink(left)


def _let_go_of_output() -> None:
    """Hold nobody's output open: what went wrong until now has been said there."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _become(asked: socket.socket) -> None:
    """Take over arguments, environment, folder and output of a stand-in."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked.settimeout(10.0)
    data, handles, _, _ = socket.recv_fds(asked, LARGEST, 2)
    while not data.endswith(b"\n"):
        more = asked.recv(LARGEST)
        if not more or len(data) > LARGEST:
            raise ConnectionError("a stand-in broke off")
        data += more
    asked.close()
    for number, handle in zip((1, 2), handles, strict=True):
        os.dup2(handle, number)
        os.close(handle)
    request = json.loads(data)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [PROGRAM, *request["arguments"]]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
