"""TLS and node keys, as in the exported app: strangers stay out, and bytes are as recorded."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import rows
from fedkeel.errors import RunError
from fedkeel.flower import keys
from fedkeel.flower.processes import Federation
from fedkeel.flower.up import shared
from fedkeel.records import RunFolder
from toys import eventually


class Counter:
    """Passes a port on to another one, and counts what goes through."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self._target, self._stop = target, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._stop.is_set():
            try:
                here, _ = self._listener.accept()
            except TimeoutError:
                continue
            there = socket.create_connection(("127.0.0.1", self._target))
            thread = threading.Thread(target=self._pass, args=(here, there))
            self._threads.append(thread)
            thread.start()

    def _pass(self, here: socket.socket, there: socket.socket) -> None:
        with here, there:
            while not self._stop.is_set():
                ready, _, _ = select.select([here, there], [], [], 0.1)
                for one in ready:
                    try:
                        data = one.recv(1 << 16)
                        (there if one is here else here).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    self.up += len(data) if one is here else 0
                    self.down += len(data) if one is there else 0

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


@contextmanager
def counted(port: int) -> Iterator[Counter]:
    counter = Counter(port)
    try:
        yield counter
    finally:
        counter.close()


def test_tls_and_keys(app: Path, tmp_path: Path) -> None:
    """A stranger's node with a key of its own, and one that expects another authority, stay out."""
    nodes = [f'{one} state="{tmp_path / "state"}"' for one in shared(1)] * 3
    federation = Federation(tmp_path / "federation", nodes[:1], secure=True)
    with federation:
        federation.nodes = nodes
        keys.make(tmp_path / "others", ["127.0.0.1"], 1)
        right, wrong = str(federation.keys / keys.CA), str(tmp_path / "others" / keys.CA)
        stranger = str(tmp_path / "others" / "node-0")
        known = str(federation.keys / "node-0")
        flag = "--auth-supernode-private-key"
        federation.start_node(1, more=["--root-certificates", right, flag, stranger])
        federation.start_node(2, more=["--root-certificates", wrong, flag, known])
        out = tmp_path / "run"
        settings = "rounds=1; model.args.hidden=[20000]; method=scaffold; cohort.clients=3"
        with counted(federation.port) as wire:
            federation.stop("node-0")
            federation.start_node(0, link=f"127.0.0.1:{wire.port}")
            federation.submit(app, {"out": str(out), "settings": settings})
            assert eventually(lambda: rows(out) >= 2, 120), federation.tail("superlink")
            time.sleep(0.5)
            up, down = wire.up, wire.down
        assert not federation.alive("node-1")
        log = (federation.folder / "node-2.log").read_text()
        assert "CERTIFICATE_VERIFY_FAILED" in log or "certificate verify failed" in log
        row = RunFolder(out).rows()[1]
        assert row.faults == {}
        assert RunFolder(out).read_run().engine["workers"] == 1
    sent, received = sum(row.bytes_down.values()), sum(row.bytes_up.values())
    assert sent > 3_000_000
    assert sent < down < 1.02 * sent + 100_000
    assert received < up < 1.02 * received + 100_000


def test_keys_are_private_and_never_written_over(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", ["superlink.example.org", "10.0.0.1"], 2)
    names = sorted(p.name for p in (tmp_path / "keys").iterdir())
    assert names == [
        "ca.crt",
        "node-0",
        "node-0.pub",
        "node-1",
        "node-1.pub",
        "server.key",
        "server.pem",
    ]
    for name in ("server.key", "node-0", "node-1"):
        assert (tmp_path / "keys" / name).stat().st_mode & 0o077 == 0
    with pytest.raises(RunError, match="holds keys already"):
        keys.make(tmp_path / "keys", ["localhost"], 1)
