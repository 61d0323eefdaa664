"""What a client keeps from round to round, on the node's disk.

Each round's state is a file of its own, named by the round, that appears whole or not at all. The
server says which one it believes in, by round and digest: a round whose reply came too late counts
for nothing, and a server that goes on from an older checkpoint finds the state of that time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import RunError
from fedkeel.method.context import ByPart
from fedkeel.tree import substates, unwalk, walk

_NAME = re.compile(r"round-([0-9]{8})\.safetensors")


class LostError(RunError):
    """What a client kept is not there, or not what the server believes in."""


class Keep:
    """The states of one client in one run.

    Args:
        root: the node's folder for all states.
        run: what its orders call the run. It names a folder by its digest: what was received is
            never a path.
        client: stable client index.
    """

    def __init__(self, root: Path, run: str, client: int) -> None:
        name = hashlib.blake2b(run.encode(), digest_size=12).hexdigest()
        self._folder = root / name / f"client-{int(client):08d}"
        self._client = client

    def load(self, round: int, digest: str, spec: Mapping[str, TensorSpec]) -> ByPart:
        """Return the state that the server believes in.

        Args:
            round: rounds completed when it was made.
            digest: its digest.
            spec: shape and type of every tensor, by path.

        Raises:
            LostError: it is not there, has another digest, or another form.
            RunError: the disk fails; what is there is still there.
        """
        with _disk("What the client keeps cannot be read"):
            there = self._rounds()
            if round not in there:
                left = f"only that of round {max(there)} is there" if there else "it is gone"
                raise self._lost(round, left)
            data = self._file(round).read_bytes()
        if _digest(data) != digest:
            raise self._lost(round, "another one is there")
        try:
            found = load(data)
        except (SafetensorError, ValueError):
            raise self._lost(round, "it cannot be read") from None
        if specs_of(dict(found)) != {path: spec[path] for path in spec}:
            raise self._lost(round, "it has another form")
        own = {path: torch.empty_like(found[path]).copy_(found[path]) for path in spec}
        return substates(unwalk(own))

    def store(self, round: int, state: ByPart) -> str:
        """Write the state after a round, and return its digest.

        Raises:
            RunError: the disk fails, or is full; nothing has changed then.
        """
        data = save({path: t.contiguous() for path, t in walk(dict(state))})
        file = self._file(round)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        with _disk("What the client keeps cannot be written"):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with aside.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(aside, file)
            except OSError:
                with suppress(OSError):
                    aside.unlink()
                raise
        return _digest(data)

    def tidy(self, believed: int, back: int) -> None:
        """Remove what nobody can ask for again.

        Args:
            believed: the round whose state the server believes in, 0 for none.
            back: the one in which it believed at its last checkpoint, to which it may go back.

        Raises:
            RunError: the disk fails; nothing that is needed is gone.
        """
        with _disk("What the client no longer needs cannot be removed"):
            if self._folder.is_dir():
                for file in list(self._folder.iterdir()):
                    found = _NAME.fullmatch(file.name)
                    if found is None or int(found[1]) not in (believed, back):
                        file.unlink(missing_ok=True)

    def _lost(self, round: int, words: str) -> LostError:
        return LostError(
            f"What client {self._client} kept after round {round} is lost: {words}.",
            why=f"it was to be in {self._folder}",
        )

    def _file(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.safetensors"

    def _rounds(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        found = [_NAME.fullmatch(file.name) for file in self._folder.iterdir()]
        return sorted(int(one[1]) for one in found if one)


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """Say in words what the disk refused."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{what}: {error.strerror or type(error).__name__}.",  # which the server is told
            do="see that the node's disk has room and is its own; the next round tries again",
        ) from None


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
