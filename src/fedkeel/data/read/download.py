"""Downloads of the known sets: mirrors, resumed transfers, checksums.

A file arrives under the name ``FILE.part``. When it is complete and its checksum is right, it is
renamed. A transfer that broke is resumed by the next one, also in a later process.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from fedkeel.data.read.catalogue import Download, find
from fedkeel.data.read.formats import unreadable_file
from fedkeel.data.read.sources import cache_folder, locate
from fedkeel.errors import DataError, first_line

Progress = Callable[[int, int | None, str], None]
"""Called with bytes done, bytes in all or None where the server does not say, and file name."""

BLOCK = 1 << 18
"""Bytes that are read at a time."""

TIMEOUT = 30.0
"""Seconds without a byte after which a transfer counts as broken."""

TRIES = 4
"""Number of transfers in a row that may bring nothing new."""

_TEMPORARY = {408, 425, 429, 500, 502, 503, 504}
"""HTTP status codes after which the request is repeated."""


class _BrokenTransfer(Exception):  # noqa: N818 - never leaves this module
    """A transfer that did not bring the complete file.

    Args:
        why: what happened.
        is_final: whether another request to the same address would be useless.
        total: bytes of the complete file, where the server said so.
    """

    def __init__(self, why: str, is_final: bool = False, total: int | None = None) -> None:
        self.why, self.is_final, self.total = why, is_final, total


def get(
    name: str,
    progress: Progress | None = None,
    base_urls: Sequence[str] | None = None,
    cache: Path | None = None,
    pause: float = 1.0,
) -> Path:
    """Download a known set, unless it is here already.

    Args:
        name: one of the known names.
        progress: is called as each file grows.
        base_urls: addresses of folders to fetch from, in place of the official ones; each is tried
            in turn.
        cache: folder to put it in; see `fedkeel.data.read.sources.cache_folder`.
        pause: seconds to wait before a broken transfer is tried again, doubled each time.

    Returns:
        The folder that has the set.

    Raises:
        DataError: there is no such set or it cannot be fetched; the transfer broke (running it
            again resumes); a checksum is wrong; the disk is full.
    """
    source = find(name)
    if not source.downloads:
        raise DataError(f"{name!r} cannot be downloaded: {source.note}.")
    located = locate(source, cache)
    if located is not None:
        return located.folder
    folder = cache_folder(cache) / source.folders[0]
    for download in source.downloads:
        parent = folder.parent if download.unpacked_folder else folder
        bases = source.mirrors if base_urls is None else base_urls
        urls = [f"{base.rstrip('/')}/{download.file}" for base in bases]
        file = fetch(urls, parent / download.file, download.checksum, progress, pause)
        if download.unpacked_folder:
            _unpack(file, download)
    return folder


def fetch(
    urls: Sequence[str],
    target: Path,
    checksum: str,
    progress: Progress | None = None,
    pause: float = 1.0,
) -> Path:
    """Download one file, from the first address that has it.

    Args:
        urls: addresses of the same file, best first.
        target: where it goes. A file that is there with the right checksum is kept.
        checksum: ``md5:`` or ``sha256:`` and the digest in hexadecimal.
        progress: is called as the file grows.
        pause: seconds before the first retry.

    Returns:
        `target`.

    Raises:
        DataError: as for `get`; a file with a wrong checksum is deleted.
    """
    part = target.with_name(f"{target.name}.part")
    problem = DataError(f"There is no address for {target.name}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if _digest(target, checksum) == checksum:
                return target
            target.unlink()
        for url in urls:
            try:
                _fetch_from(url, part, checksum, progress, pause)
            except DataError as error:
                problem = error
                continue
            part.replace(target)
            return target
    except OSError as error:
        raise _disk_error(error, target) from None
    raise problem


def _fetch_from(
    url: str, part: Path, checksum: str, progress: Progress | None, pause: float
) -> None:
    """Fetch one file from one address, with retries, and compare its checksum."""
    failures, largest = 0, _size(part)
    while True:
        try:
            _transfer(url, part, progress)
            break
        except _BrokenTransfer as broken:
            size = _size(part)
            failures = 0 if size > largest else failures + 1
            largest = max(largest, size)
            if broken.is_final or failures == TRIES:
                total = f" of {broken.total:,}" if broken.total else ""
                raise DataError(
                    f"{part.stem} could not be fetched.",
                    got=f"{size:,}{total} bytes from {url}: {broken.why}",
                    do=f"run it again: it goes on after the {size:,} bytes that are here"
                    if size
                    else "check the connection and run it again",
                ) from None
            time.sleep(pause * 2.0**failures)
    digest = _digest(part, checksum)
    if digest == checksum:
        return
    size = _size(part)
    part.unlink()
    raise DataError(
        f"The checksum of {part.stem} is wrong; the fetched file is deleted.",
        got=f"{digest} ({size:,} bytes from {url})",
        expected=checksum,
        do="run it again; if it stays wrong, the server or something before it sends another file",
    )


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Fetch the missing rest of a file in one request.

    Raises:
        _BrokenTransfer: the file is not complete; what arrived is in `part`.
        OSError: `part` cannot be written.
    """
    present = _size(part)
    response = _request(url, present)
    if response is None:
        return
    with response:
        length = response.headers.get("Content-Length", "")
        start = 0
        if response.status == 206:
            first = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
            start = int(first) if first.isdigit() else present
        total = start + int(length) if length.isdigit() else None
        if start not in (0, present):
            part.unlink()
            raise _BrokenTransfer(f"the server sent bytes from {start:,} on, not from {present:,}")
        if total is not None and shutil.disk_usage(part.parent).free < total - start:
            raise OSError(errno.ENOSPC, "not enough room")
        done = start
        with part.open("ab" if start else "wb") as file:
            while True:
                try:
                    block = response.read(BLOCK)
                except (OSError, http.client.HTTPException) as error:
                    raise _BrokenTransfer(first_line(error), total=total) from None
                if not block:
                    break
                file.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, total, part.stem)
    if total is not None and done != total:
        raise _BrokenTransfer("the connection was closed before the end", total=total)


def _request(url: str, start: int) -> http.client.HTTPResponse | None:
    """Ask for a file from byte `start` on; None where the server says that the file ends there."""
    headers = {"User-Agent": "fedkeel", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and error.headers.get("Content-Range", "").endswith(f"/{start}"):
            return None
        if error.code == 416 and start:  # the part is longer than the file: it is of another one
            return _request(url, 0)
        why = f"HTTP {error.code} {error.reason}"
        raise _BrokenTransfer(why, is_final=error.code not in _TEMPORARY) from None
    except urllib.error.URLError as error:
        raise _BrokenTransfer(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenTransfer(first_line(error)) from None
    return response


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _digest(file: Path, checksum: str) -> str:
    """Return the checksum of a file, by the algorithm that `checksum` begins with."""
    algorithm = checksum.partition(":")[0]
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _files_below(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield what an archive holds, files and folders below the one it is unpacked into.

    Raises:
        TarError: it holds something else.
    """
    for member in archive:
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name!r} is not a file or folder of its own")
        yield member


def _unpack(file: Path, download: Download) -> None:
    """Unpack the one folder in a tar archive beside the archive, and delete the archive."""
    name = download.unpacked_folder
    temporary = file.with_name(f"{name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with tarfile.open(file) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(temporary, filter="data")
            else:  # before Python 3.11.4
                archive.extractall(temporary, _files_below(archive))
        shutil.rmtree(file.with_name(name), ignore_errors=True)
        (temporary / name).rename(file.with_name(name))
        shutil.rmtree(temporary, ignore_errors=True)
    except (tarfile.TarError, EOFError) as error:
        raise unreadable_file(file, first_line(error), f"a tar archive of {name}") from None
    except OSError as error:
        raise _disk_error(error, file) from None
    file.unlink()


def _disk_error(error: OSError, target: Path) -> DataError:
    """Return the error of a disk that is full or cannot be written."""
    folder = next((path for path in target.parents if path.exists()), Path("/"))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            f"The disk is full: {target.name} does not fit.",
            got=f"{shutil.disk_usage(folder).free:,} bytes free in {folder}",
            do="make room, or set FEDKEEL_CACHE to a folder on another disk, and run it again",
        )
    return DataError(
        f"{target.name} cannot be written to {target.parent}.",
        got=first_line(error),
        do="set FEDKEEL_CACHE to a folder that can be written to",
    )
