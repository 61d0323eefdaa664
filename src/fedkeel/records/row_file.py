"""The file of a run's rows, rounds.jsonl."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedkeel.base.named_files import ROWS_BYTES, read_regular
from fedkeel.errors import RunError
from fedkeel.records.files import file_digest, parse_json, write_bytes
from fedkeel.records.rows import RoundRecord

ROWS = "rounds.jsonl"
"""File in a run folder with one row a round."""


class RowFile:
    """The rows of a run on disk: read, or written by the one process that makes the run.

    The writer knows what the file has to hold. Where somebody else has deleted or changed it, the
    writer writes all rows again.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_restored = False
        self._rows: list[RoundRecord] = []
        self._size = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Digest of what has been written, which is that of the file."""
        return self._digest.hexdigest()

    def write(self, rows: Sequence[RoundRecord]) -> None:
        """Write the file anew with these rows."""
        lines = [row.line().encode() for row in rows]
        write_bytes(self.path, b"".join(lines))
        self._rows, self._size, self._digest = list(rows), 0, hashlib.sha256()
        for line in lines:
            self._take(line)

    def append(self, row: RoundRecord) -> None:
        """Add a row."""
        line = row.line().encode()
        with self.path.open("ab") as file:
            is_whole = file.tell() == self._size
            if is_whole:
                file.write(line)
        if is_whole:
            self._rows.append(row)
            self._take(line)
        else:
            self._restore([*self._rows, row])

    def check(self, content: bool = False) -> None:
        """Write all rows again where the file is gone, or not as it was written.

        Args:
            content: whether to look at its content, too, and not only at its size.
        """
        try:
            is_whole = self.path.stat().st_size == self._size
            if content and is_whole:
                is_whole = file_digest(self.path) == self.digest
        except FileNotFoundError:
            is_whole = not self._rows
        if not is_whole:
            self._restore(self._rows)

    def _take(self, line: bytes) -> None:
        self._size += len(line)
        self._digest.update(line)

    def _restore(self, rows: Sequence[RoundRecord]) -> None:
        self.write(rows)
        self.was_restored = True

    def read(self, limit: int | None = None) -> list[RoundRecord]:
        """Read the rows, or the first ones; a last line that a kill cut short is left out.

        Raises:
            RunError: the file cannot be read, or a line before the last is damaged.
        """
        return list(itertools.islice(self._read(), limit))

    def _read(self) -> Iterator[RoundRecord]:
        lines = self._lines()
        for number, line in enumerate(lines, start=1):
            try:
                row = RoundRecord.from_json(parse_json(line))
            except ValueError as error:
                if number == len(lines) and not line.endswith(b"\n"):
                    return
                raise RunError(f"{self.path} is damaged.", got=f"line {number}: {error}") from None
            yield row

    def digest_of(self, count: int) -> str:
        """Return the digest of the first rows."""
        return hashlib.sha256(b"".join(self._lines()[:count])).hexdigest()

    def _lines(self) -> list[bytes]:
        try:
            return read_regular(self.path, ROWS_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.path} cannot be read.", got=error) from None
