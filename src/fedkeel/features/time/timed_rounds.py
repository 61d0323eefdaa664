"""Rounds in virtual time: the server waits for all clients, or for those that reply in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fedkeel.data.cohort import Selection
from fedkeel.data.partition.common import Floats
from fedkeel.features.time.schedule import Synchronous
from fedkeel.method.context import Message
from fedkeel.records.rows import RoundRecord
from fedkeel.runner.schedule import RoundSchedule


class TimedRounds(RoundSchedule):
    """The clients of a round that reply in time, and virtual time in the rows.

    Args:
        rounds: who replies when.
    """

    def __init__(self, rounds: Synchronous) -> None:
        self._rounds = rounds

    @property
    def seconds(self) -> Floats:
        """[C] how long a round takes each client, as far as it does not vary."""
        return self._rounds.seconds

    def due(self, message: Message) -> Selection:
        """Return who replies in time, and who is late or lost."""
        return self._rounds.due(message.round).cohort

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the row with the time at which its round ended."""
        return replace(row, features={**row.features, "virtual_seconds": self._rounds.now})

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Go on at the time at which the last round ended."""
        self._rounds.now = rows[-1].features.get("virtual_seconds", 0.0)
