"""Which sums a node has helped to unmask: for one round, of one set of nodes only.

The same round asked twice, of almost the same nodes, gives the update of the node that differs as
the difference of the two sums. So a node writes down, before it reveals a share, for which round of
which run that is, what it has trained from, and whose sum it is.

Why that is enough: each sum is unmasked by more than half of the nodes that were asked, and each
node helps for one set of nodes only. Let sum k have weight w_k in a combination that leaves a
single node, and r_k nodes that have unmasked it. Each of those appears in another sum of the
combination. The other nodes of a sum are fewer than r_k, so the sum of |w_k| r_k would be at
most the sum of |w_k| (r_k - 1), plus 1 for the node that is left. That allows a single sum
at most, which is of two nodes or more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fedkeel.features.secure.primitives import SecureSumError
from fedkeel.flower.node.log import disk_errors
from fedkeel.flower.node.secure_secrets import NOT_KEPT
from fedkeel.records.files import synchronise
from fedkeel.records.lock import waited_for

LOCK = ".answered-sums.lock"
FILE = "answered-sums.jsonl"
"""File in a node's folder, one line for each sum that it has helped to unmask."""


@dataclass(frozen=True)
class AnsweredSums:
    """The sums that the nodes of a folder have helped to unmask, over all runs.

    Args:
        folder: the node's folder.
    """

    folder: Path

    def has(self, run: str, round: int, clients: Collection[int]) -> bool:
        """Return whether the clients' node has helped to unmask this round of this run.

        Args:
            run: the server's name for the run.
            round: rounds completed before this one.
            clients: those that the node plays.
        """
        name = _round(run, round, clients)
        return any(line["round"] == name for line in self._lines())

    def add(
        self, run: str, round: int, clients: Collection[int], subject: str, nodes: Collection[int]
    ) -> None:
        """Write down a sum, on the disk before this returns.

        Args:
            run: the server's name for the run.
            round: rounds completed before this one.
            clients: those that the node plays.
            subject: digest of the model that they were trained from, and of how.
            nodes: the nodes that are in the sum.

        Raises:
            SecureSumError: the node has helped to unmask this round before, or a sum of other nodes
                from the same model.
            RunError: the disk fails.
        """
        members, name = _digest(sorted(nodes)), _round(run, round, clients)
        text = json.dumps({"round": name, "subject": subject, "members": members})
        with ExitStack() as stack:
            with disk_errors(NOT_KEPT):  # two at a time would not see each other
                stack.enter_context(waited_for(self.folder / LOCK))
            self._check(name, subject, members)
            with disk_errors(NOT_KEPT):
                self._append(text)

    def _check(self, name: str, subject: str, members: str) -> None:
        """Refuse a sum beside which the node has helped to unmask another one."""
        for line in self._lines():
            if line["round"] == name:
                raise SecureSumError(ANSWERED)
            if line["subject"] == subject and line["members"] != members:
                raise SecureSumError(
                    "This node has helped to unmask a sum of other nodes from the same model, and "
                    "the difference of two sums may tell of one node.",
                    do="have the same nodes take part, or take another seed",
                )

    def _append(self, text: str) -> None:
        """Write a line, after a line break: the one before may have been cut off by a kill."""
        handle = os.open(self.folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, f"\n{text}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        synchronise(self.folder)

    def _lines(self) -> Iterator[dict[str, str]]:
        with disk_errors(NOT_KEPT):
            file = self.folder / FILE
            texts = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for text in texts:
            try:
                line = json.loads(text)
                yield {name: str(line[name]) for name in ("round", "subject", "members")}
            except (ValueError, KeyError, TypeError):
                continue  # cut off by a kill, so that nothing was sent for it; or empty


ANSWERED = "This node has helped to unmask this round before, and does so once."


def _round(run: str, round: int, clients: Collection[int]) -> str:
    return _digest([run, round, sorted(clients)])


def _digest(facts: list[object] | list[int]) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
