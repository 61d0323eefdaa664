import hashlib
import io
import shutil
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedkeel.data import get
from fedkeel.data.read import catalogue, download
from fedkeel.data.read.catalogue import Download
from fedkeel.errors import DataError

BODY = bytes(range(256)) * 400  # 102,400 bytes


def md5(data):
    return f"md5:{hashlib.md5(data, usedforsecurity=False).hexdigest()}"


class Server:
    """A server on loopback whose answers are set by the test."""

    def __init__(self):
        self.files = {}
        self.ranges = True
        self.breaks = []  # bytes after which the next answers are cut off
        self.statuses = []  # statuses of the next answers
        self.asked = []  # (path, Range) of each request
        handler = type("Handler", (_Handler,), {"server_side": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        side = self.server_side
        name = self.path.lstrip("/")
        span = self.headers.get("Range")
        side.asked.append((name, span))
        if side.statuses:
            return self.send_error(side.statuses.pop(0))
        if name not in side.files:
            return self.send_error(404)
        body, start = side.files[name], 0
        if span and side.ranges:
            start = int(span.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        stop = side.breaks.pop(0) if side.breaks else len(body)
        self.wfile.write(body[start : start + stop])
        return None


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def fetch(server, tmp_path):
    """Fetch BODY as file.bin, from one mirror or several, without waiting between tries."""
    server.files["file.bin"] = BODY

    def call(*urls, checksum=None, progress=None):
        urls = urls or (f"{server.url}/file.bin",)
        wanted = checksum or md5(BODY)
        return download.fetch(urls, tmp_path / "file.bin", wanted, progress, pause=0.0)

    return call


def refused(call, *words):
    with pytest.raises(DataError) as caught:
        call()
    assert len(caught.value.lines()) <= 4
    for word in words:
        assert word in str(caught.value)


def test_a_good_file(fetch, tmp_path):
    seen = []
    assert fetch(progress=lambda *told: seen.append(told)).read_bytes() == BODY
    assert seen[-1] == (102_400, 102_400, "file.bin")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert [file.name for file in tmp_path.iterdir()] == ["file.bin"]


def test_sha256(fetch):
    assert fetch(checksum=f"sha256:{hashlib.sha256(BODY).hexdigest()}").read_bytes() == BODY


def test_a_file_that_is_here_is_kept_and_a_wrong_one_is_fetched_again(fetch, server, tmp_path):
    (tmp_path / "file.bin").write_bytes(BODY)
    fetch()
    assert server.asked == []
    (tmp_path / "file.bin").write_bytes(b"wrong")
    assert fetch().read_bytes() == BODY


def test_a_wrong_checksum_deletes_the_file(fetch, tmp_path):
    wrong = md5(b"other")
    refused(lambda: fetch(checksum=wrong), md5(BODY), wrong, "102,400 bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_broken_transfer_is_resumed(fetch, server):
    server.breaks = [30_000, 20_000]
    assert fetch().read_bytes() == BODY
    assert [span for _, span in server.asked] == [None, "bytes=30000-", "bytes=50000-"]


def test_what_a_former_run_left_is_resumed(fetch, server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY[:1000])
    seen = []
    assert fetch(progress=lambda *told: seen.append(told)).read_bytes() == BODY
    assert server.asked == [("file.bin", "bytes=1000-")]
    assert seen[-1][:2] == (102_400, 102_400)


def test_a_whole_part_is_taken_as_it_is(fetch, server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY)
    assert fetch().read_bytes() == BODY
    assert len(server.asked) == 1


def test_a_part_longer_than_the_file_is_dropped(fetch, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(BODY + b"more")
    assert fetch().read_bytes() == BODY


def test_a_server_without_ranges_starts_again(fetch, server, tmp_path):
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(b"x" * 5000)
    assert fetch().read_bytes() == BODY
    server.breaks = [40_000]
    (tmp_path / "file.bin").unlink()
    assert fetch().read_bytes() == BODY


def test_a_transfer_that_stays_broken(fetch, server, tmp_path):
    server.breaks = [40_000] + [0] * 99
    refused(fetch, "40,000 of 102,400 bytes", "run it again", "goes on after")
    assert (tmp_path / "file.bin.part").stat().st_size == 40_000
    assert len(server.asked) == 1 + download.TRIES
    server.breaks = []
    assert fetch().read_bytes() == BODY
    assert server.asked[-1] == ("file.bin", "bytes=40000-")


def test_a_server_that_is_not_there(fetch, tmp_path):
    refused(lambda: fetch("http://127.0.0.1:9/file.bin"), "could not be fetched", "refused")


def test_passing_errors_are_tried_again_and_lasting_ones_are_not(fetch, server):
    server.statuses = [503, 500]
    assert fetch().read_bytes() == BODY
    assert len(server.asked) == 3
    refused(
        lambda: download.fetch(
            [f"{server.url}/none.bin"], fetch().with_name("none.bin"), md5(b""), pause=0.0
        ),
        "none.bin could not be fetched",
        "HTTP 404",
    )
    assert len(server.asked) == 4


def test_the_next_mirror_is_tried(fetch, server):
    server.files["bad/file.bin"] = b"an error page"
    mirrors = ("none/file.bin", "bad/file.bin", "file.bin")
    assert fetch(*(f"{server.url}/{name}" for name in mirrors)).read_bytes() == BODY
    assert [name for name, _ in server.asked] == list(mirrors)


def test_a_full_disk(fetch, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(fetch, "disk is full", "1,000 bytes free", "FEDKEEL_CACHE")


def test_a_folder_that_cannot_be_written(fetch, tmp_path, server):
    (tmp_path / "file").write_text("no folder")
    refused(
        lambda: download.fetch(
            [f"{server.url}/file.bin"], tmp_path / "file" / "file.bin", md5(BODY)
        ),
        "cannot be written",
    )


def _tar(folder, files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


def _serve(monkeypatch, server, name, bodies, unpack=""):
    """Let `get(name)` fetch the given files."""
    remotes = []
    for file, body in bodies.items():
        server.files[f"mirror/{file}"] = body
        remotes.append(Download(file, md5(body), len(body), unpack))
    made = replace(catalogue.SOURCES[name], downloads=tuple(remotes))
    monkeypatch.setitem(catalogue.SOURCES, name, made)


def test_get_files(monkeypatch, server, tmp_path):
    _serve(monkeypatch, server, "usps", {"usps.bz2": b"one", "usps.t.bz2": b"two"})
    bases = [f"{server.url}/gone/", f"{server.url}/mirror/"]
    folder = get("usps", base_urls=bases, cache=tmp_path, pause=0.0)
    assert folder == tmp_path / "USPS"
    assert (folder / "usps.t.bz2").read_bytes() == b"two"
    asked = len(server.asked)
    assert get("usps", base_urls=bases, cache=tmp_path) == folder
    assert len(server.asked) == asked


def test_get_unpacks_an_archive(monkeypatch, server, tmp_path):
    files = {"train.bin": b"1", "test.bin": b"2"}
    body = _tar("cifar-100-binary", files)
    _serve(monkeypatch, server, "cifar100", {"c.tar.gz": body}, unpack="cifar-100-binary")
    folder = get("cifar100", base_urls=[f"{server.url}/mirror"], cache=tmp_path)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-100-binary"]


def test_an_archive_that_writes_elsewhere_is_refused(monkeypatch, server, tmp_path):
    body = _tar("cifar-100-binary", {"../../outside.txt": b"!"})
    _serve(monkeypatch, server, "cifar100", {"c.tar.gz": body}, unpack="cifar-100-binary")
    cache = tmp_path / "a" / "b"
    refused(
        lambda: get("cifar100", base_urls=[f"{server.url}/mirror"], cache=cache),
        "c.tar.gz cannot be read",
        "outside",
    )
    assert not list(tmp_path.rglob("outside.txt"))


def test_get_what_cannot_be_fetched():
    refused(lambda: get("digits"), "comes with scikit-learn")
    refused(lambda: get("mnist-m"), "no address that can be fetched")
    refused(lambda: get("minst"), "did you mean 'mnist'")


def test_every_address_has_a_checksum():
    for source in catalogue.SOURCES.values():
        for remote in source.downloads:
            kind, _, digest = remote.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[kind]
            assert remote.size > 0
        assert all(base.startswith("http") and base.endswith("/") for base in source.mirrors)
        assert bool(source.mirrors) == bool(source.downloads)
