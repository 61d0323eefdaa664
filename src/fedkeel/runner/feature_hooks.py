"""What a feature does from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fedkeel.records.rows import RoundRecord
from fedkeel.runner.callbacks import Callback


class Hooks(Callback):
    """Follows the rounds of a run as a callback does, adds to their records, and has a state.

    Every method does nothing until a subclass overrides it.
    """

    def recorded(self, row: RoundRecord) -> RoundRecord:
        """Return the record of a new round with what the feature adds, before it is evaluated."""
        return row

    def timed(self, row: RoundRecord) -> RoundRecord:
        """Return the record of a new round with what depends on its seconds, before it is kept."""
        return row

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has to hold, by names that no other feature uses."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]], rows: Sequence[RoundRecord]) -> None:
        """Take back a state.

        Args:
            arrays: all that the checkpoint holds.
            rows: the rounds until then.
        """


def recorded(hooks: Sequence[Hooks], row: RoundRecord) -> RoundRecord:
    """Return the record of a new round with what all features add."""
    for each in hooks:
        row = each.recorded(row)
    return row


def timed(hooks: Sequence[Hooks], row: RoundRecord) -> RoundRecord:
    """Return the record of a new round with what all features add once its seconds are known."""
    for each in hooks:
        row = each.timed(row)
    return row
