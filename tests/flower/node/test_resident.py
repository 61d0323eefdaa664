"""The resident process that answers messages by copies of itself, and what stands in for it."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedkeel.flower.node import launcher, resident
from toys import alive, eventually

pytestmark = pytest.mark.skipif(not resident.is_supported(), reason="needs Linux")

SUPEREXEC = """
import os, subprocess, sys
for words in (["--help"], ["--wrong"], ["--help"]):
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = subprocess.Popen(["flwr-clientapp", *words], **pipe)
    out, err = done.communicate()  # until the copy has closed them too
    print(len(out), "runtime-api-address" in out, "usage: flwr-clientapp" in err, flush=True)
print(" ".join(os.listdir(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def environment(*places: Path) -> dict[str, str]:
    path = [*map(str, places), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path)}


@pytest.mark.processes
def test_copies_are_what_flower_would_have_started(tmp_path: Path) -> None:
    """With the same arguments and output; and the resident process ends with the SuperExec."""
    folder = tmp_path / ("long" * 30) / "resident"  # longer than the path of a socket may be
    resident.install(folder)
    assert folder.stat().st_mode & 0o077 == 0
    superexec = subprocess.Popen(
        [sys.executable, "-c", SUPEREXEC, str(folder)],
        env=environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert superexec.stdin
    assert superexec.stdout
    said = [superexec.stdout.readline().split() for _ in range(4)]
    helped, wrong = ["True", "False"], ["False", "True"]
    assert [words[1:] for words in said[:3]] == [helped, wrong, helped]
    assert sorted(said[3]) == sorted(
        [resident.PROGRAM, f"{superexec.pid}.lock", f"{superexec.pid}.sock"]
    )
    residents = [
        int(place.name)
        for place in Path("/proc").glob("[0-9]*")
        if f"fedkeel.flower.node.resident\0.\0{superexec.pid}\0" in _words(place)
    ]
    assert len(residents) == 1
    superexec.stdin.close()
    assert superexec.wait(20) == 0
    superexec.stdout.close()
    assert eventually(lambda: not alive(residents[0]))
    assert os.listdir(folder) == [resident.PROGRAM]


@pytest.mark.processes
def test_a_node_started_by_hand(tmp_path: Path) -> None:
    """It is Flower's own program, with Flower's own options, and the stand-in first in its path."""
    done = subprocess.run(
        [Path(sys.executable).with_name("fedkeel"), "flower", "node", "--help"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: flower-supernode" in done.stdout
    assert (tmp_path / ".fedkeel" / "resident" / resident.PROGRAM).stat().st_mode & 0o077 == 0


def _words(place: Path) -> str:
    try:
        return (place / "cmdline").read_text()
    except OSError:
        return ""


def test_where_there_is_none_to_be_had_the_program_itself_is_started(tmp_path: Path) -> None:
    real = tmp_path / "real" / resident.PROGRAM
    real.parent.mkdir()
    real.write_text('#!/bin/sh\necho "started with $*, from $PWD"\nexit 3\n')
    real.chmod(0o755)
    folder = tmp_path / "resident"
    resident.install(folder)
    words = [sys.executable, "-IS", launcher.__file__, str(folder), "/bin/false", "--token", "x y"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(folder, real.parent),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, f"started with --token x y, from {tmp_path}\n")


def test_one_resident_process_is_started_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of stand-ins that come meanwhile each would have started its own."""
    monkeypatch.chdir(tmp_path)  # paths of sockets may only be short

    def refused() -> int:
        raise AssertionError("another one was started")

    with open("7.lock", "w") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener.bind("7.sock")
        listener.listen()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", refused)
            found = launcher._start("/bin/false", 7)
        assert found is not None
        found.close()
    os.unlink("7.sock")
    assert launcher._start("/bin/false", 7) is None  # the lock went with whoever held it
