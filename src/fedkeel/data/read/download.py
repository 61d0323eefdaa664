"""Downloading the known sets: mirrors, resumed transfers, checksums.

A file arrives under the name ``FILE.part``; when it is whole and its checksum is right it gets its
name. What a broken transfer left behind is continued by the next one.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from fedkeel.data.read.catalogue import Remote, find
from fedkeel.data.read.formats import damaged, reason
from fedkeel.data.read.sources import cache_folder, locate
from fedkeel.errors import DataError

Progress = Callable[[int, int | None, str], None]
"""Called with bytes done, bytes in all or None where the server does not say, and file name."""

_AT_ONCE = 1 << 18  # bytes
_SILENCE = 30.0  # seconds without a byte after which a transfer counts as broken
_TRIES = 4  # transfers in a row that bring nothing new
_PASSING = {408, 425, 429, 500, 502, 503, 504}  # HTTP answers after which it is tried again


class _Broken(Exception):  # noqa: N818 - never leaves this module
    """A transfer that did not bring the whole file.

    Args:
        why: what happened.
        lasting: whether trying the same address again is useless.
        total: bytes of the whole file, where the server said so.
    """

    def __init__(self, why: str, lasting: bool = False, total: int | None = None) -> None:
        self.why = why
        self.lasting = lasting
        self.total = total


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
        progress: told how far each file is.
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
    if not source.remotes:
        raise DataError(f"{name!r} cannot be downloaded: {source.note}.")
    found = locate(source, cache)
    if found is not None:
        return found[0]
    bases = source.bases if base_urls is None else base_urls
    folder = cache_folder(cache) / source.folders[0]
    for remote in source.remotes:
        into = folder.parent if remote.unpack else folder
        urls = [f"{base.rstrip('/')}/{remote.file}" for base in bases]
        file = fetch(urls, into / remote.file, remote.checksum, progress, pause)
        if remote.unpack:
            _unpack(file, remote)
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
        progress: told how far the file is.
        pause: seconds before the first retry.

    Returns:
        `target`.

    Raises:
        DataError: as for `get`; a wrong checksum deletes what was fetched.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if _digest(target, checksum) == checksum:
                return target
            target.unlink()
        problem = None
        for url in urls:
            problem = _from(url, part, checksum, progress, pause)
            if problem is None:
                part.replace(target)
                return target
    except OSError as error:
        raise _disk(error, target) from None
    raise problem or DataError(f"There is no address for {target.name}.")


def _from(
    url: str, part: Path, checksum: str, progress: Progress | None, pause: float
) -> DataError | None:
    """Fetch one file from one address, again after passing faults; return what was wrong."""
    tries, most = 0, _size(part)
    while True:
        try:
            _transfer(url, part, progress)
            break
        except _Broken as broken:
            arrived = _size(part)
            tries = 0 if arrived > most else tries + 1
            most = max(most, arrived)
            if broken.lasting or tries == _TRIES:
                return _unfinished(part, url, broken)
            time.sleep(pause * 2.0**tries)
    got = _digest(part, checksum)
    if got == checksum:
        return None
    size = _size(part)
    part.unlink()
    return DataError(
        f"The checksum of {part.stem} is wrong; what was fetched is deleted.",
        got=f"{got} ({size:,} bytes from {url})",
        expected=checksum,
        do="run it again; if it stays wrong, the server or something before it sends another file",
    )


def _unfinished(part: Path, url: str, broken: _Broken) -> DataError:
    size = _size(part)
    of = f" of {broken.total:,}" if broken.total else ""
    resume = f"run it again: it goes on after the {size:,} bytes that are here"
    return DataError(
        f"{part.stem} could not be fetched.",
        got=f"{size:,}{of} bytes from {url}: {broken.why}",
        do=resume if size else "check the connection and run it again",
    )


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Fetch what is missing of a file in one request.

    Raises:
        _Broken: the file is not whole; what arrived is in `part`.
        OSError: `part` cannot be written.
    """
    have = _size(part)
    answer = _ask(url, have)
    if answer is None:
        return
    with answer:
        start, total = _span(answer, have)
        if start not in (0, have):
            part.unlink()
            raise _Broken(f"the server sent bytes from {start:,} on, not from {have:,}")
        if total is not None and shutil.disk_usage(part.parent).free < total - start:
            raise OSError(errno.ENOSPC, "not enough room")
        with part.open("ab" if start else "wb") as file:
            done = _copy(answer, file, start, total, progress, part.stem)
    if total is not None and done != total:
        raise _Broken("the connection was closed before the end", total=total)


def _ask(url: str, have: int) -> http.client.HTTPResponse | None:
    """Ask for a file from byte `have` on; None where the server says that this is its end."""
    headers = {"User-Agent": "fedkeel", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and error.headers.get("Content-Range", "").endswith(f"/{have}"):
            return None
        if error.code == 416 and have:  # what is here is longer than the file: of another one
            return _ask(url, 0)
        why = f"HTTP {error.code} {error.reason}"
        raise _Broken(why, lasting=error.code not in _PASSING) from None
    except urllib.error.URLError as error:
        raise _Broken(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(reason(error)) from None
    return answer


def _span(answer: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Return (first byte sent, size of the whole file) of an answer; size None if not said."""
    length = answer.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    if answer.status != 206:
        return 0, total
    span = answer.headers.get("Content-Range", "").removeprefix("bytes ")
    first = span.partition("-")[0]
    start = int(first) if first.isdigit() else have
    return start, None if total is None else start + total


def _copy(
    answer: http.client.HTTPResponse,
    file: BinaryIO,
    done: int,
    total: int | None,
    progress: Progress | None,
    name: str,
) -> int:
    """Write an answer's body to a file and return how long the file is then."""
    while True:
        try:
            block = answer.read(_AT_ONCE)
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(reason(error), total=total) from None
        if not block:
            return done
        file.write(block)
        done += len(block)
        if progress is not None:
            progress(done, total, name)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _digest(file: Path, like: str) -> str:
    """Return the checksum of a file, by the algorithm that `like` begins with."""
    kind = like.partition(":")[0]
    with file.open("rb") as stream:
        made = hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False))
    return f"{kind}:{made.hexdigest()}"


def _unpack(file: Path, remote: Remote) -> None:
    """Unpack the one folder that a tar archive holds, beside the archive, and drop the archive."""
    aside = file.with_name(f"{remote.unpack}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        with tarfile.open(file) as archive:
            archive.extractall(aside, filter="data")
        shutil.rmtree(file.with_name(remote.unpack), ignore_errors=True)
        (aside / remote.unpack).rename(file.with_name(remote.unpack))
        shutil.rmtree(aside, ignore_errors=True)
    except (tarfile.TarError, EOFError) as error:
        raise damaged(file, reason(error), f"a tar archive of {remote.unpack}") from None
    except OSError as error:
        raise _disk(error, file) from None
    file.unlink()


def _disk(error: OSError, target: Path) -> DataError:
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
        got=reason(error),
        do="set FEDKEEL_CACHE to a folder that can be written to",
    )
