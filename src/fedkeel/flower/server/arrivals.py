"""Clients that have trained elsewhere, for an engine that asks for them here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedkeel.engine.base import Job, TrainingSetup
from fedkeel.engine.local import Done, ReadRecord, ended
from fedkeel.method.context import Message
from fedkeel.method.local_loop import Reply


@dataclass(frozen=True)
class Took:
    """What was taken of a client.

    Args:
        reply: what it sent.
        steps: local steps that it made.
        seen: examples that it processed.
        digest: digest of what it keeps, "" for nothing.
    """

    reply: Reply
    steps: int
    seen: int
    digest: str


class Arrived:
    """A `Trainer` whose clients have trained already.

    Args:
        setup: method, model and data.
        took: what came of each.
    """

    def __init__(self, setup: TrainingSetup, took: Mapping[int, Took]) -> None:
        self.parallel_clients, self.placed, self._took = 1, setup, took
        self.reasons: list[str] = []

    def __call__(
        self, message: Message, jobs: Sequence[Job], kept: ReadRecord, sums: bool = False
    ) -> Iterator[Done]:
        """Return what has come."""
        for job in jobs:
            one = self._took[job.client]
            yield ended(job, one.reply, one.steps, one.seen)
