"""Between nodes and a SuperLink: a counter of bytes, and a proxy that lets little through."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedkeel.flower.local import keys


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
            thread = threading.Thread(target=self._pass, args=(here, self._opened(here)))
            self._threads.append(thread)
            thread.start()

    def _opened(self, here: socket.socket) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._target))

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


class WebProxy(Counter):
    """Passes on what a client asks for by CONNECT, as the web proxy of a hospital does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(0)

    def _opened(self, here: socket.socket) -> socket.socket:
        here.settimeout(10)
        head = b""
        while b"\r\n\r\n" not in head:
            head += here.recv(1)
        self.asked.append(head.split(b"\r\n")[0].decode())
        host, _, port = self.asked[-1].split()[1].rpartition(":")
        there = socket.create_connection((host, int(port)))
        here.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        return there


@contextmanager
def counted(port: int) -> Iterator[Counter]:
    counter = Counter(port)
    try:
        yield counter
    finally:
        counter.close()


class Gate(BaseHTTPRequestHandler):
    """Does what the exported README has nginx do: passes on what nodes need, and nothing else."""

    protocol_version = "HTTP/1.1"
    superlink: HTTPSConnection
    allowed = "/v1/fleet/"
    refused: list[str]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith(self.allowed):
            self.refused.append(self.path)
            self._reply(403, {}, b"")
            return
        link = HTTPSConnection(self.superlink.host, self.superlink.port, context=self.context)
        link.request("POST", self.path, body, dict(self.headers))
        with link.getresponse() as found:
            self._reply(found.status, dict(found.headers), found.read())
        link.close()

    def do_GET(self) -> None:
        self.do_POST()

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


@contextmanager
def gate(port: int, folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Open a gate to a SuperLink with its own certificate: give its port, and what it refused."""
    context = ssl.create_default_context(cafile=str(folder / keys.CA))
    refused: list[str] = []
    link = HTTPSConnection("127.0.0.1", port)
    kind = type("Open", (Gate,), {"superlink": link, "context": context, "refused": refused})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.SERVER_KEY)
    server.socket = own.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield int(server.server_address[1]), refused
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
