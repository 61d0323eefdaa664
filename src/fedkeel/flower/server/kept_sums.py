"""Secure sums that are being unmasked, kept in the run folder until the next checkpoint.

Nodes help to unmask a round once. So a server that stops after it has asked for that cannot ask for
the round again: it goes on from here. What is kept is written before the nodes are asked, and each
reply as it comes; the sum follows from them to the bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedkeel.config import Settings
from fedkeel.errors import RunError
from fedkeel.features.secure.collector import Collector
from fedkeel.features.secure.participant import Commitments, Revealed
from fedkeel.features.secure.primitives import SecureSumError, Words
from fedkeel.flower.protocol import ClientResult
from fedkeel.flower.secure_protocol import (
    Hex,
    NodeKeys,
    NodeNumber,
    Texts,
    UnmaskReply,
    by_node,
    texts,
)
from fedkeel.flower.server.traffic import TrafficRecord
from fedkeel.records.files import synchronise, write_bytes

FOLDER = "sums"
"""Folder of the kept sums in a run folder."""

_SUM, _SHARES, _TOTAL, _FACTS = "round-{:08d}.safetensors", "round-{:08d}.json", "total", "sum"

_NAME = re.compile(r"round-([0-9]{8})\.(safetensors|json)")


class KeptNode(Settings):
    """A node of a sum.

    Args:
        keys: its public keys.
        clients: the clients that it was asked for.
        seed: what it is bound to, of its seed; "" where it has shared nothing.
        bound: what it is bound to, of its shares.
        is_in_sum: whether it has sent its vector.
    """

    keys: NodeKeys
    clients: tuple[int, ...]
    seed: Hex
    bound: Texts
    is_in_sum: bool

    @property
    def number(self) -> int:
        """The node's number."""
        return int(self.keys.node)


class KeptSum(Settings):
    """A sum whose vectors have come, without their total.

    Args:
        run: the server's name for the run.
        round: rounds completed before this one.
        session: names the sum.
        threshold: nodes of the sum, at least.
        total_weight: as in `SumRequest`.
        asked: how many clients were asked.
        nodes: the nodes that have sent keys.
        trained: what nodes have said of the clients in the sum.
        lost: clients that have lost their state.
        faults: those of the round so far, as in `RoundRecord`.
        down: bytes sent in the round so far, by part.
        up: bytes received, likewise.
    """

    run: str
    round: int
    session: str
    threshold: int
    total_weight: float = Field(gt=0.0)
    asked: int
    nodes: tuple[KeptNode, ...]
    trained: tuple[ClientResult, ...]
    lost: tuple[int, ...]
    faults: dict[str, tuple[int, ...]]
    down: dict[str, int]
    up: dict[str, int]

    def collector(self, total: Words) -> Collector:
        """Return the collector of the sum, with the total [n] of its masked vectors."""
        return Collector.restored(
            self.session,
            self.threshold,
            {node.number: node.keys.keys for node in self.nodes},
            {
                node.number: Commitments(bytes.fromhex(node.seed), by_node(node.bound))
                for node in self.nodes
                if node.seed
            },
            [node.number for node in self.nodes if node.is_in_sum],
            total,
        )


class KeptShares(Settings):
    """What nodes have revealed of a sum so far, and the account of the round with that.

    Args:
        revealed: their replies, by the node's number.
        faults: as in `KeptSum`.
        down: as in `KeptSum`.
        up: as in `KeptSum`.
    """

    revealed: dict[NodeNumber, UnmaskReply]
    faults: dict[str, tuple[int, ...]]
    down: dict[str, int]
    up: dict[str, int]

    @classmethod
    def of(cls, revealed: Mapping[int, Revealed], traffic: TrafficRecord) -> KeptShares:
        """Return what is kept of what was revealed."""
        replies = {
            str(node): UnmaskReply(seeds=texts(item.seeds), keys=texts(item.keys))
            for node, item in revealed.items()
        }
        faults = {reason: tuple(clients) for reason, clients in traffic.faults.items()}
        return cls(revealed=replies, faults=faults, down=traffic.down, up=traffic.up)


_TRAFFIC = ("faults", "down", "up")


class KeptSums:
    """The sums of a run that no checkpoint holds yet.

    Args:
        folder: the run folder; None keeps nothing.
        resume: whether to go on with those that are there.
    """

    def __init__(self, folder: Path | None, resume: bool = False) -> None:
        self._folder = None if folder is None else folder / FOLDER
        self.run = ""  # that of the sums which are there
        if self._folder is not None and resume:
            for file in self._folder.glob("round-*.safetensors"):
                self.run = self._facts(file).run

    def keep(self, kept: KeptSum, collector: Collector) -> None:
        """Write a sum, on the disk before this returns: its nodes are asked to unmask it next.

        Raises:
            RunError: the disk fails.
        """
        if self._folder is None:
            return
        file = self._folder / _SUM.format(kept.round)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _SHARES.format(kept.round)).unlink(missing_ok=True)
            arrays = {_TOTAL: collector.total.view(np.int64)}
            save_file(arrays, temporary, metadata={_FACTS: kept.model_dump_json()})
            temporary.chmod(0o600)
            synchronise(temporary)
            os.replace(temporary, file)
            synchronise(self._folder)

    def keep_revealed(self, round: int, shares: KeptShares) -> None:
        """Write what nodes have revealed of a sum so far.

        Raises:
            RunError: the disk fails.
        """
        if self._folder is None:
            return
        with self._disk_errors():
            file = self._folder / _SHARES.format(round)
            write_bytes(file, shares.model_dump_json().encode(), mode=0o600)

    def load(self, run: str, round: int) -> tuple[KeptSum, Collector] | None:
        """Return a sum with what nodes have revealed of it, None where it was not kept.

        Raises:
            RunError: it cannot be read.
        """
        if self._folder is None or not (self._folder / _SUM.format(round)).exists():
            return None
        file, shares = (self._folder / name.format(round) for name in (_SUM, _SHARES))
        kept = self._facts(file)
        if kept.run != run:
            return None
        with self._disk_errors(), safe_open(file, framework="np") as opened:
            collector = kept.collector(opened.get_tensor(_TOTAL).view(np.uint64))
        try:
            if shares.exists():
                kept_shares = KeptShares.model_validate_json(shares.read_bytes())
                for node, reply in kept_shares.revealed.items():
                    collector.take_revealed(int(node), reply.revealed)
                kept = kept.model_copy(update={k: getattr(kept_shares, k) for k in _TRAFFIC})
        except (OSError, ValueError, SecureSumError) as error:
            raise self._damaged(shares, error) from None
        return kept, collector

    def discard(self, round: int) -> None:
        """Remove the sums of the rounds before `round`: a checkpoint holds what became of them.

        Raises:
            RunError: the disk fails.
        """
        if self._folder is None or not self._folder.is_dir():
            return
        with self._disk_errors():
            later = False
            for file in list(self._folder.iterdir()):
                match = _NAME.fullmatch(file.name)
                if match and int(match[1]) >= round:
                    later = True
                else:
                    file.unlink()
            if not later:
                self._folder.rmdir()

    def _facts(self, file: Path) -> KeptSum:
        try:
            with safe_open(file, framework="np") as opened:
                return KeptSum.model_validate_json(opened.metadata()[_FACTS])
        except (OSError, KeyError, TypeError, SafetensorError, ValidationError) as error:
            raise self._damaged(file, error) from None

    def _damaged(self, file: Path, error: Exception) -> RunError:
        return RunError(
            "A secure sum that was kept cannot be read.",
            got=f"{file}: {type(error).__name__}",
            why="nodes help to unmask a round once, so it cannot be made again",
            do="remove the file: the run then goes on without that round",
        )

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RunError(
                "A secure sum cannot be kept.",
                got=error,
                do="see that the disk has room, then go on with resume",
            ) from None
