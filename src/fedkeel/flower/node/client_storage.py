"""Client state on the node's disk, one file for each round.

The server says which round's state it believes in, by round and digest. So the state of a round
whose reply came too late is never used, and a server that goes on from an older checkpoint finds
the state of that time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedkeel.engine.spec import TensorSpec, specs_of
from fedkeel.errors import RunError
from fedkeel.flower.node.log import disk_errors
from fedkeel.method.context import ByPart
from fedkeel.records.files import write_bytes
from fedkeel.tree import substates, unwalk, walk

_AGAIN = "; the next round tries again"
_NAME = re.compile(r"round-([0-9]{8})\.safetensors")


class LostStateError(RunError):
    """A client's state is not there, or is not the one that the server believes in."""


class ClientStorage:
    """The states of one client in one run.

    Args:
        root: the node's folder.
        run: the server's name for the run. Its digest names a folder: nothing that was received
            becomes a path.
        client: stable client index.
    """

    def __init__(self, root: Path, run: str, client: int) -> None:
        name = hashlib.blake2b(run.encode(), digest_size=12).hexdigest()
        self._folder = root / name / f"client-{int(client):08d}"
        self._client = client

    def load(self, round: int, digest: str, expected: Mapping[str, TensorSpec]) -> ByPart:
        """Return the state that the server believes in.

        Args:
            round: rounds completed when it was made.
            digest: its digest.
            expected: shape and type of every tensor, by path.

        Raises:
            LostStateError: it is not there, has another digest, or other tensors.
            RunError: the disk fails. The files are unchanged.
        """
        with disk_errors("The client's state cannot be read", _AGAIN):
            files = self._files()
            if round not in files:
                others = f"only that of round {max(files)} is there" if files else "it is gone"
                raise self._lost(round, others)
            data = files[round].read_bytes()
        if _digest(data) != digest:
            raise self._lost(round, "another one is there")
        try:
            tensors = load(data)
        except (SafetensorError, ValueError):
            raise self._lost(round, "it cannot be read") from None
        if specs_of(dict(tensors)) != dict(expected):
            raise self._lost(round, "its tensors have other names, shapes or types")
        copies = {p: torch.empty_like(tensors[p]).copy_(tensors[p]) for p in expected}
        return substates(unwalk(copies))

    def store(self, round: int, state: ByPart) -> str:
        """Write the state after a round, and return its digest.

        Raises:
            RunError: the disk fails, or is full. The older files are unchanged.
        """
        data = save({path: t.contiguous() for path, t in walk(dict(state))})
        with disk_errors("The client's state cannot be written", _AGAIN):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self._folder / f"round-{round:08d}.safetensors", data)
        return _digest(data)

    def remove_unneeded(self, current_round: int, checkpoint_round: int) -> None:
        """Remove the files that the server can no longer ask for.

        Args:
            current_round: the round whose state the server believes in, 0 for none.
            checkpoint_round: the same at its last checkpoint, to which it may go back.

        Raises:
            RunError: the disk fails. No file that is needed is gone.
        """
        with disk_errors("Old states of the client cannot be removed", _AGAIN):
            if not self._folder.is_dir():
                return
            needed = {
                file
                for round, file in self._files().items()
                if round in (current_round, checkpoint_round)
            }
            for file in list(self._folder.iterdir()):
                if file not in needed:
                    file.unlink(missing_ok=True)

    def _lost(self, round: int, reason: str) -> LostStateError:
        return LostStateError(
            f"The state of client {self._client} after round {round} is lost: {reason}.",
            why=f"it should be in {self._folder}",
        )

    def _files(self) -> dict[int, Path]:
        if not self._folder.is_dir():
            return {}
        matches = [(_NAME.fullmatch(file.name), file) for file in self._folder.iterdir()]
        return {int(match[1]): file for match, file in matches if match}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
